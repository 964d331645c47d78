"""The table of a build: figures from gates.json, none of them claimed when quality failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from artifacts.errors import TrimtabError
from pipeline.report import lines_of


def gates_json(build: Path, *failed: str) -> None:
    names = ("target_perplexity", "loops", "mtp_acceptance")
    verdicts = [
        {"gate": name, "passed": name not in failed, "reason": f"{name} is so"} for name in names
    ]
    ratio: dict[str, Any] = {
        "point": 0.991,
        "sample": 300,
        "lower": 0.97,
        "upper": 1.01,
        "tokens_per_step": 2.5,
        "tokens_per_step_16bit": 2.52,
    }
    figures = {
        "target_perplexity_ratio": {
            "point": 1.02,
            "sample": 20000,
            "perplexity": 8.568,
            "perplexity_16bit": 8.4,
        },
        "lm_head_kl_ratio": {
            "point": 0.6,
            "sample": 20000,
            "kl": 0.003,
            "kl_round_to_nearest": 0.005,
        },
        "draft_vocab_coverage": {"point": 0.93, "sample": 40000, "ids": 2048},
        "mtp_tokens_per_step_ratio": ratio,
    }
    build.mkdir(exist_ok=True)
    (build / "gates.json").write_text(json.dumps({"gates": verdicts, "figures": figures}))


def table(build: Path, stats: Path | None = None) -> dict[str, tuple[str, str, str]]:
    return {line.label: (line.before, line.after, line.remark) for line in lines_of(build, stats)}


def test_figures_are_read(tmp_path: Path) -> None:
    gates_json(tmp_path)
    found = table(tmp_path)
    assert found["perplexity, held-out text"][:2] == ("8.400", "8.568")
    assert found["lm_head KL (left: round-to-nearest)"][:2] == ("0.00500", "0.00300")
    assert found["draft vocabulary coverage"][:2] == ("", "93.00%")
    assert found["tokens per step, mtp, greedy"] == (
        "2.520",
        "2.500",
        "ratio 0.991 (0.970 to 1.010), 300 prompts",
    )
    assert found["gates"][1] == "3 of 3 passed"


def test_no_acceptance_is_claimed_when_quality_failed(tmp_path: Path) -> None:
    gates_json(tmp_path, "loops")
    stats = tmp_path / "stats.jsonl"
    stats.write_text('{"draft": "mtp", "tokens": 9, "steps": 3, "seconds": 1}\n')
    found = table(tmp_path, stats)
    for label in ("tokens per step, mtp, greedy", "tokens per step, generated with mtp"):
        assert found[label] == ("", "", "not shown: loops failed")
    assert found["  failed: loops"][2] == "loops is so"
    gates_json(tmp_path, "mtp_acceptance")
    assert table(tmp_path)["tokens per step, mtp, greedy"][1] == "2.500"


def test_generations_are_pooled(tmp_path: Path) -> None:
    gates_json(tmp_path)
    stats = tmp_path / "stats.jsonl"
    rows = [("none", 10, 10, 2.0), ("mtp", 9, 3, 1.0), ("mtp", 11, 5, 1.0)]
    keys = ("draft", "tokens", "steps", "seconds")
    stats.write_text("".join(json.dumps(dict(zip(keys, r, strict=True))) + "\n" for r in rows))
    found = table(tmp_path, stats)
    assert found["tokens per step, generated with mtp"][1:] == ("2.500", "20 tokens, 10 a second")
    stats.write_text("{}\n")
    with pytest.raises(TrimtabError, match="not what `trimtab generate --stats` writes"):
        table(tmp_path, stats)


def test_no_gates_no_table(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="it was never validated"):
        lines_of(tmp_path)
