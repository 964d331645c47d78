"""The card: metadata, figures from the manifest, claims withheld."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from artifacts.card import is_speed, render, size_text, table
from artifacts.manifest import load
from tests.artifacts.builds import Built, gates


def test_metadata_and_figures(sealed: Built) -> None:
    manifest = load(sealed.build)
    text = render(manifest)
    assert text == (sealed.build / "README.md").read_text(encoding="utf-8")
    data = ModelCard(text).data.to_dict()
    assert data["base_model"] == "acme/Tiny" and data["base_model_relation"] == "quantized"
    assert data["license"] == "apache-2.0" and data["library_name"] == "transformers"
    assert "speculative-decoding" in data["tags"]
    target = manifest.parts["target"]
    assert (
        f"| **target** | {target.parameters:,} |  | 12.35 MB | {size_text(target.bytes)} |" in text
    )
    assert "| target_perplexity | 1.02 | point, at most 1.05 | 300 tokens | passed |" in text
    assert "| dflash2 | 4 | 3.210 |" in text
    assert '"num_speculative_tokens": 3}' in text
    assert "python fetch_tiny_test.py DEST" in text
    assert "Not validated" not in text


def test_changing_the_manifest_changes_the_card(sealed: Built) -> None:
    manifest = load(sealed.build)
    target = manifest.parts["target"].model_copy(update={"bytes": 987_654_321})
    parts = {**manifest.parts, "target": target}
    text = render(manifest.model_copy(update={"parts": parts, "repo_id": "acme/out"}))
    assert "987.7 MB" in text
    assert "hf download acme/out fetch_tiny_test.py" in text


def test_speed_is_withheld_when_quality_failed(sealed: Built) -> None:
    manifest = load(sealed.build)
    failing = manifest.model_copy(update={"gates": gates(failing="target_perplexity")})
    text = render(failing)
    assert "**Not validated.** These gates did not pass: target_perplexity." in text
    assert "3.210" not in text and "| dflash2 | 4 | withheld |" in text
    assert "| drafter_acceptance | withheld |" in text
    assert "| target_perplexity | 1.02 |" in text and "**failed**" in text


def test_a_failed_speed_gate_hides_nothing(sealed: Built) -> None:
    manifest = load(sealed.build)
    failing = manifest.model_copy(update={"gates": gates(failing="drafter_acceptance")})
    text = render(failing)
    assert "did not pass: drafter_acceptance." in text and "3.210" in text


def test_no_gates_no_claims(sealed: Built) -> None:
    text = render(load(sealed.build).model_copy(update={"gates": {}}))
    assert "None were judged." in text and "3.210" not in text


@pytest.mark.parametrize(
    ("count", "expected"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (3_850_000_000, "3.85 GB")],
)
def test_size_text(count: int | None, expected: str) -> None:
    assert size_text(count) == expected


def test_table_and_speed_words() -> None:
    assert table(("a", "b"), [[1, "x|y"]]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |"
    assert is_speed("mtp_tokens_per_step_ratio") and is_speed("drafter_sampled_ratio")
    assert not is_speed("target_perplexity_ratio") and not is_speed("distinct_ratio")
