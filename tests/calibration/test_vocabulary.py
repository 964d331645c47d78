"""Draft vocabulary: counts, forced and banned ids, sizes, choice, order independence."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from artifacts.errors import TrimtabError
from calibration.id_lists import assemble, count, coverage, coverage_by_domain, special_ids
from calibration.tokensets import stable_unit
from calibration.vocabulary import Outputs, choose

VOCAB = 512


def zipf_rows(rows: int, length: int, ids: range, seed: int, power: float = 1.0) -> list[list[int]]:
    rng = random.Random(seed)
    weights = [1 / (r + 1) ** power for r in range(len(ids))]
    return [rng.choices(list(ids), weights, k=length) for _ in range(rows)]


def outputs(rows: list[list[int]], prefix: str = "d") -> Outputs:
    domains = ["code" if r % 3 == 0 else "chat" for r in range(len(rows))]
    return Outputs(rows, domains, [f"{prefix}{r // 2}" for r in range(len(rows))])


def slow_list(scores: dict[int, float], size: int, forced: set[int], banned: set[int]) -> list[int]:
    """The obvious way: take forced ids, then fill from the best downwards."""
    ranked = sorted(range(VOCAB), key=lambda i: (-scores.get(i, 0), i))
    kept = {i for i in forced if i not in banned}
    for i in ranked:
        if len(kept) == size:
            break
        if i not in banned:
            kept.add(i)
    return sorted(kept)


def test_counts_equal_a_dictionary() -> None:
    rows = zipf_rows(20, 30, range(80), seed=1)
    expected = Counter(i for row in rows for i in row)
    counts_v = count(rows, VOCAB)
    assert counts_v.dtype == np.int64
    assert {i: int(n) for i, n in enumerate(counts_v) if n} == dict(expected)
    with pytest.raises(TrimtabError, match="512 is outside the vocabulary of 512"):
        count([[1, 512]], VOCAB)
    with pytest.raises(TrimtabError, match="-1 is outside"):
        count([[-1]], VOCAB)


def test_prompt_only_ids_are_absent_and_coverage_is_the_hand_computed_value() -> None:
    rows = zipf_rows(200, 40, range(80), seed=2)
    prompts = zipf_rows(200, 40, range(100, 120), seed=3)
    counts_v = count(rows, VOCAB)
    ids = assemble(counts_v.astype(float), 64, forced=(), banned=())
    assert len(ids) == 64 and max(ids) < 80
    held = zipf_rows(50, 40, range(80), seed=4)
    hits = sum(i in set(ids) for row in held for i in row)
    assert coverage(count(held, VOCAB), ids) == pytest.approx(hits / 2000)
    with_prompts = count(rows + prompts, VOCAB)  # the mutant: prompts counted too
    assert assemble(with_prompts.astype(float), 64, forced=(), banned=()) != ids


@pytest.mark.parametrize("seed", range(5))
def test_list_equals_the_obvious_way(seed: int) -> None:
    rng = random.Random(seed)
    counts_v = count(zipf_rows(30, 30, range(0, 300), seed=seed), VOCAB)
    forced = set(rng.sample(range(VOCAB), 20))
    banned = set(rng.sample(range(VOCAB), 12))
    got = assemble(counts_v.astype(float), 128, forced=sorted(forced), banned=sorted(banned))
    assert got == slow_list(dict(enumerate(counts_v.tolist())), 128, forced, banned)


def test_stop_id_displaces_the_rarest_or_fails_when_strict() -> None:
    counts_v = np.zeros(VOCAB)
    counts_v[:32] = np.arange(132, 100, -1)
    ids = assemble(counts_v, 32, forced=[498], banned=[499], multiple=1)
    assert ids == [*range(31), 498]
    with pytest.raises(TrimtabError, match="498"):
        assemble(counts_v, 32, forced=[498], banned=[499], multiple=1, strict=True)
    assert 499 not in assemble(counts_v, 32, forced=[498, 499], banned=[499], multiple=1)


@pytest.mark.parametrize("size", [0, -1, 4.0, 513, True, "64", None])
def test_bad_sizes_are_refused(size: object) -> None:
    with pytest.raises(TrimtabError):
        assemble(np.zeros(VOCAB), size, forced=(), banned=())  # type: ignore[arg-type]


def test_size_against_special_set_rounding_and_usable_ids() -> None:
    scores_v = np.zeros(VOCAB)
    with pytest.raises(TrimtabError, match="smaller than the 70 special"):
        assemble(scores_v, 64, forced=range(70), banned=())
    assert len(assemble(scores_v, 90, forced=(), banned=())) == 128
    with pytest.raises(TrimtabError, match="above the 499"):
        assemble(scores_v, 500, forced=(), banned=range(499, 512))
    with pytest.raises(TrimtabError, match="512 is outside"):
        assemble(scores_v, 64, forced=[512], banned=())


def test_other_order_gives_the_same_bytes() -> None:
    rows = zipf_rows(60, 30, range(200), seed=5)
    held = zipf_rows(60, 30, range(200), seed=6)
    text_v = count(zipf_rows(300, 30, range(250), seed=7), VOCAB)
    made = []
    for shuffle in range(2):
        order = list(range(60))
        if shuffle:
            random.Random(1).shuffle(order)
        own = outputs(rows).select(order)
        heldout = outputs(held, "h").select(order)
        choice = choose(
            own=own,
            heldout=heldout,
            vocab_size=VOCAB,
            forced=[498],
            banned=[499],
            size=128,
            floor=0.9,
            text_counts_v=text_v,
        )
        made.append(json.dumps(choice.to_json(), sort_keys=True))
    assert made[0] == made[1]


def test_few_own_tokens_take_the_text_as_a_prior_and_many_do_not() -> None:
    """Own output and text share their head; the text has a tail of its own."""
    text_v = count(zipf_rows(2000, 40, range(400), seed=8, power=0.9), VOCAB)
    held = outputs(zipf_rows(400, 40, range(300), seed=9), "h")
    small = choose(
        own=outputs(zipf_rows(4, 40, range(300), seed=10)),
        heldout=held,
        vocab_size=VOCAB,
        forced=[498],
        size=128,
        sizes=(64, 192),
        floor=0.5,
        text_counts_v=text_v,
    )
    kinds = {c.kind for c in small.table}
    assert kinds == {"own", "text", "own+text"}
    best = {k: max(c.coverage[128] for c in small.table if c.kind == k) for k in kinds}
    assert best["own+text"] > best["own"]
    assert "text" in small.candidate and small.candidate in small.reason
    assert set(small.table[0].coverage) == {64, 128, 192}
    assert len({c.own_tokens for c in small.table if c.kind == "own"}) == 3  # 1/8 of 4 rows is none

    rich_v = count(zipf_rows(20000, 40, range(300), seed=11), VOCAB)
    rich = choose(
        own=outputs(zipf_rows(4, 40, range(300), seed=10)),
        heldout=held,
        vocab_size=VOCAB,
        forced=[498],
        size=128,
        floor=0.5,
        own_counts_v=rich_v,
        text_counts_v=text_v,
    )
    at_rich = {c.name: c.coverage[128] for c in rich.table}
    assert at_rich[rich.candidate] > at_rich[small.candidate]  # both were compared
    assert rich.tokens["own"] == 160 + 800000
    assert rich.meets_floor and rich.forced_added == [498]


def test_reported_half_shares_no_document_with_the_choosing_half() -> None:
    """Held-out rows of one document all land in one half: coverage is of the other documents."""
    rows = [[r] * 10 for r in range(40)]
    held = Outputs(rows, ["x"] * 40, [f"doc{r % 2}-{r // 4}" for r in range(40)])
    choice = choose(
        own=outputs(zipf_rows(50, 40, range(40), seed=12)),
        heldout=held,
        vocab_size=VOCAB,
        forced=(),
        size=64,
        floor=0.5,
    )
    assert choice.tokens["development"] + choice.tokens["report"] == 400
    assert choice.coverage == 1.0 and choice.coverage_by_domain == {"x": 1.0}
    half = [stable_unit(0, f"vocabulary:{d}") < 0.5 for d in held.documents]
    rows = [[5] * 10 if first else [100, 5] * 5 for first in half]  # the other half has an id more
    other = choose(
        own=outputs([[5] * 9]),
        heldout=Outputs(rows, held.domains, held.documents),
        vocab_size=VOCAB,
        forced=(),
        size=64,
        floor=0.5,
    )
    assert set(other.table[0].coverage.values()) == {1.0} and other.coverage == 0.5
    single = Outputs(rows, ["x"] * 40, ["same"] * 40)
    with pytest.raises(TrimtabError, match="cannot be halved"):
        choose(own=outputs(rows), heldout=single, vocab_size=VOCAB, forced=(), size=64, floor=0.5)


def test_size_is_the_smallest_that_reaches_the_floor() -> None:
    own = outputs(zipf_rows(400, 40, range(300), seed=13))
    held = outputs(zipf_rows(400, 40, range(300), seed=14), "h")

    def sized(floor: float) -> tuple[int, str, bool]:
        choice = choose(
            own=own,
            heldout=held,
            vocab_size=VOCAB,
            forced=(),
            size=None,
            sizes=(64, 128, 256),
            floor=floor,
        )
        return choice.size, choice.reason, choice.meets_floor

    assert sized(0.7)[0] == 64
    assert sized(0.95)[0] == 256
    size, reason, meets = sized(0.9999)
    assert size == 256 and "none reaches" in reason and not meets


def test_special_ids_come_from_tokenizer_and_generation_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 490, "content": "<think>"}, {"id": 497}]})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [498, 497]}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 496}}))
    assert special_ids(tmp_path) == [490, 496, 497, 498]
    with pytest.raises(TrimtabError, match=r"no tokenizer\.json"):
        special_ids(tmp_path / "absent")


def test_coverage_by_domain_is_each_domains_own() -> None:
    found = coverage_by_domain(
        Outputs([[1, 2], [3, 4], [1, 1]], ["a", "b", "a"], ["x", "y", "z"]), [1, 3], VOCAB
    )
    assert found == {"a": 0.75, "b": 0.5}
