"""The command generate on a tiny sealed build: same text whatever drafts, figures, streaming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from artifacts.errors import TrimtabError
from pipeline import cli
from pipeline.generating import METHODS, Request, _pieces, generate_text


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY and DRAFT as they are, sealed."""
    from artifacts.manifest import BuildInfo, seal
    from tests.checkpoints import draft, tiny

    folder = tmp_path_factory.mktemp("build")
    tiny(folder / "target")
    draft(folder / "drafter")
    gates = {"gates": [{"gate": "none", "passed": True}], "figures": {}}
    (folder / "gates.json").write_text(json.dumps(gates))
    (folder / "ledger.json").write_text("[]")
    seal(
        folder,
        BuildInfo(
            name="tiny",
            base_model="tiny",
            licence="mit",
            recipe={},
            inputs={},
            versions={},
            seeds={},
            device="cpu float32",
            gates=gates,
        ),
    )
    return folder


def test_methods_are_the_decoders() -> None:
    from artifacts.runtime import decode

    assert METHODS == decode.METHODS


def test_greedy_text_is_the_same_whatever_drafts(
    build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = tmp_path / "stats.jsonl"
    texts = set()
    for method in ("none", "mtp", "dflash2", "lookup", "dflash2+lookup"):
        arguments = ["generate", str(build), "--prompt", "w1 w2", "--draft", method, "--greedy"]
        arguments += ["--max-new-tokens", "12", "--device", "cpu", "--stats", str(stats)]
        assert cli.main(arguments) == 0
        shown = capsys.readouterr()
        texts.add(shown.out)
        assert f"draft {method}: " in shown.err
        assert "tokens per step" in shown.err
        if method not in ("none", "lookup"):
            assert "acceptance by position: " in shown.err
    assert len(texts) == 1
    rows = [json.loads(line) for line in stats.read_text().splitlines()]
    assert [row["draft"] for row in rows] == ["none", "mtp", "dflash2", "lookup", "dflash2+lookup"]
    assert rows[0]["tokens"] == rows[0]["steps"]


def test_sampling_depends_on_the_seed_only(build: Path) -> None:
    def text(seed: int) -> str:
        request = Request(prompt="w1", seed=seed, max_new_tokens=8, device="cpu", temperature=1.0)
        return generate_text(build, request)

    assert text(1) == text(1)
    assert len({text(seed) for seed in (1, 2, 3)}) > 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft": "eagle"}, "--draft eagle: must be one of none, mtp"),
        ({"draft": "dflash"}, "method dflash does not fit the drafter"),
        ({"prompt": "", "raw": True}, "--prompt: encodes to no token"),
    ],
)
def test_what_cannot_be_done(build: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TrimtabError, match=words):
        generate_text(build, Request(**{"prompt": "w1", "device": "cpu", **changes}))


def test_a_damaged_or_missing_build_is_refused(build: Path, tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="is not a build"):
        generate_text(tmp_path, Request(prompt="a"))
    path = build / "target" / "config.json"
    before = path.read_bytes()
    path.write_bytes(before + b" ")
    try:
        with pytest.raises(TrimtabError, match=r"config\.json"):
            generate_text(build, Request(prompt="a", device="cpu"))
    finally:
        path.write_bytes(before)


def test_characters_cut_between_tokens_wait() -> None:
    class Bytes:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return bytes(tokens).decode("utf-8", errors="replace")

    steps = iter([(0x61,), (0xC3,), (0xA9, 0x62), (0xE2, 0x82)])
    assert list(_pieces(Bytes(), steps, [])) == ["a", "\u00e9b", "\ufffd"]
