"""The recipe: every kind of error in one line, resolution of paths, round trip, documented keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts.errors import TrimtabError
from pipeline import recipe as recipes
from pipeline.gates import Gate, Gates

BASE = """
name: small
base: {path: base}
prompts:
  calibration: {path: c.jsonl}
  development: {path: d.jsonl}
  heldout: {path: h.jsonl}
  texts: {path: t.jsonl}
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def parse(extra: str, base: str = BASE) -> recipes.Recipe:
    return recipes.parse(base + extra, name="recipe.yaml", folder=Path("/house"))


def error_of(extra: str, base: str = BASE) -> str:
    with pytest.raises(TrimtabError) as caught:
        parse(extra, base)
    return caught.value.message


ERRORS = {
    "lm_head: {bit: 4}": "recipe.yaml: lm_head.bit: unknown key; did you mean bits?",
    "lmhead: {bits: 4}": "recipe.yaml: lmhead: unknown key; did you mean lm_head?",
    "mtp: {bits: 5}": "recipe.yaml: mtp.bits: is 5, must be 4, 8 or 16",
    "mtp: {depth: 0}": "recipe.yaml: mtp.depth: is 0, must be at least 1",
    "threads: '2'": 'recipe.yaml: threads: is "2", must be a whole number',
    "seed: 1.5": "recipe.yaml: seed: is 1.5, must be a whole number",
    "seed: true": "recipe.yaml: seed: is true, must be a whole number",
    "embedding: keep": 'recipe.yaml: embedding: is "keep", must be a section with keys of '
    "format, group_size",
    "lm_head: null": "recipe.yaml: lm_head: is null, must be a section with keys of bits, "
    "group_size",
    "base: {path: x}": "recipe.yaml: line 9: base: given twice, before in line 3",
    "mtp: {bits: 4, bits: 8}": "recipe.yaml: line 9: bits: given twice, before in line 9",
    "lm_head: [": "recipe.yaml: line 9: expected the node content, but found '<stream end>'",
    "1: 2": "recipe.yaml: line 9: key 1 is not text; put it in quotes",
    "drafter: {}": "recipe.yaml: drafter: needs exactly one of path and repo",
    "drafter: {path: a, repo: b/c}": "recipe.yaml: drafter: needs exactly one of path and repo",
    "drafter: {path: a, revision: x}": "recipe.yaml: drafter: revision belongs to repo, "
    "not to path",
    "drafter: {repo: a}": "recipe.yaml: drafter: repo is 'a', must be owner/name",
    "drafter: {repo: a/b, revision: main}": "recipe.yaml: drafter: revision is 'main', must be a "
    "commit of a/b (40 hexadecimal digits)",
    "drafter: {repo: a/b, revision: 1111111111111111111111111111111111111111}": "recipe.yaml: "
    "drafter.revision: is 1111111111111111111111111111111111111111, must be text "
    "(put it in quotes)",
    "lm_head: {group_size: 100}": "recipe.yaml: lm_head.group_size: is 100, must be -1 (one group "
    "a row) or a multiple of 8",
    "target: {ignore: x}": 'recipe.yaml: target.ignore: is "x", must be a list in [ ]',
    "target: {ignore: ['re:(']}": "recipe.yaml: target: ignore: 're:(' is not a regular expression",
    "target: {dampening: 2020-01-01}": 'recipe.yaml: target.dampening: is "2020-01-01", must be a '
    "number",
    "target: {dampening: .nan}": "recipe.yaml: holds .nan or .inf, which no key takes",
    "traffic: {sampling: {top_p: 1.5}}": "recipe.yaml: traffic.sampling.top_p: is 1.5, must be at "
    "most 1.0",
    "draft_vocab: {compare: [2]}": "recipe.yaml: draft_vocab: compare has 2.0, must be shares "
    "above 0 and up to 1",
    "publish: {to: {path: x}, licence: no}": "recipe.yaml: publish.licence: is false, must be text "
    "(put it in quotes)",
    "publish: {to: {}, licence: mit}": "recipe.yaml: publish.to: needs exactly one of path and "
    "repo",
    "publish: {licence: mit}": "recipe.yaml: publish.to: is required and missing",
    "gates: {loops: {side: at_least}}": "recipe.yaml: gates.loops.side: is fixed; threshold, bound "
    "and minimum_sample can be set",
    "gates: {loop: {}}": "recipe.yaml: gates.loop: unknown key; did you mean loops?",
    "gates: {loops: {limit: 1}}": "recipe.yaml: gates.loops.limit: unknown key",
    "gates: {draft_vocab_coverage: {threshold: 1}}": "recipe.yaml: gates.draft_vocab_coverage: "
    "unknown key; its threshold is draft_vocab.floor",
}


@pytest.mark.parametrize("extra", list(ERRORS), ids=lambda text: text[:40])
def test_each_error_is_one_line_that_names_the_key(extra: str) -> None:
    message = error_of(extra)
    assert message.startswith(ERRORS[extra])
    assert "\n" not in message


def test_all_errors_are_given_at_once() -> None:
    lines = error_of("seeds: 1\nmtp: {bits: 3}\nlm_head: {group_sizes: 8}").splitlines()
    assert sorted(lines) == sorted(
        [
            "recipe.yaml: mtp.bits: is 3, must be 4, 8 or 16",
            "recipe.yaml: lm_head.group_sizes: unknown key; did you mean group_size?",
            "recipe.yaml: seeds: unknown key; did you mean seed?",
        ]
    )


def test_prompt_columns_are_known_fields() -> None:
    base = BASE.replace("{path: c.jsonl}", "{path: c.jsonl, columns: {msgs: chat}}")
    assert error_of("", base).startswith(
        "recipe.yaml: prompts.calibration: columns.msgs: unknown field; known are messages, text"
    )
    base = BASE.replace("{path: c.jsonl}", "{dataset: a/b}")
    assert "revision is None, must be a commit of a/b" in error_of("", base)


@pytest.mark.parametrize("text", ["", "- a", "just text", "3"])
def test_not_a_mapping(text: str) -> None:
    assert error_of("", text) == "recipe.yaml: must hold keys such as name, base and prompts"


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="cannot be read \\(no such file\\)"):
        recipes.load(tmp_path / "none.yaml")


def test_paths_are_relative_to_the_recipes_folder() -> None:
    loaded = parse("drafter: {path: ../d}\ndraft_vocab: {own_counts: c.safetensors}")
    assert loaded.base.path == Path("/house/base")
    assert loaded.drafter is not None
    assert loaded.drafter.path == Path("/d")
    assert loaded.draft_vocab is not None
    assert loaded.draft_vocab.own_counts == Path("/house/c.safetensors")
    assert parse("publish: {to: {path: hub}, licence: mit}").publish is not None


def test_resolved_recipe_loads_again_and_resolves_to_the_same() -> None:
    loaded = parse(
        f"drafter: {{repo: a/b, revision: '{COMMIT}', group_size: 64}}\n"
        "gates: {loops: {threshold: 0.2}}\ntraffic: {sampling: {temperature: 1}}\n"
        "publish: {to: {repo: me/it}, licence: mit}\nmtp: null\nsigns: {original: {path: o}}"
    )
    again = recipes.parse(recipes.dump(loaded), name="recipe.yaml", folder=Path("/elsewhere"))
    assert again == loaded
    assert again.gates.loops.threshold == 0.2
    assert again.gates.loops.minimum_sample == Gates().loops.minimum_sample


def test_active_gates_follow_what_is_built() -> None:
    every = parse("drafter: {path: d}").active_gates()
    assert {"drafter_acceptance", "mtp_acceptance", "lm_head_kl", "draft_vocab_coverage"} <= set(
        every
    )
    assert every["draft_vocab_coverage"].threshold == 0.9
    some = parse("mtp: null\nlm_head: {bits: 16}\ntarget: {source: imported}").active_gates()
    assert set(some) == {
        "structure",
        "target_perplexity",
        "target_kl",
        "loops",
        "distinct",
        "lossless",
        "consumer_logits",
    }
    assert "mtp_acceptance" not in parse("mtp: {bits: 16}").active_gates()


def test_every_key_is_documented() -> None:
    rows = recipes.fields()
    assert len(rows) > 100
    assert [name for name, _, sentence in rows if len(sentence) < 10] == []
    names = {name for name, _, _ in rows}
    assert {"lm_head.bits", "signs.original.repo", "gates.lm_head_kl", "mtp.depth"} <= names
    assert ("lm_head.bits", "4", "Bits of a weight; 16 keeps it as it is.") in rows


def test_recipes_are_frozen() -> None:
    loaded = parse("")
    with pytest.raises(Exception, match="frozen"):
        loaded.seed = 3
    assert isinstance(loaded.gates.loops, Gate)


def test_merge_keys_and_anchors_work() -> None:
    loaded = parse("lm_head: &four {bits: 8, group_size: 64}\nmtp:\n  <<: *four\n  depth: 2")
    assert loaded.mtp is not None
    assert (loaded.mtp.bits, loaded.mtp.group_size, loaded.mtp.depth) == (8, 64, 2)
