"""Likelihood, KL, coverage; intervals; diversity."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from artifacts.checkpoint import Checkpoint
from artifacts.errors import TrimtabError
from artifacts.runtime.target import Target
from calibration import metrics
from calibration.metrics import (
    compare_documents,
    coverage,
    diversity,
    document_nll,
    head_kl,
    kl_rows,
    mean_interval,
    perplexity_ratio_interval,
    rate_ratio_interval,
    ratio_interval,
)
from tests.checkpoints import tiny

V = 11


class Bigram:
    """A model whose logits depend on the last token alone."""

    device = "cpu"

    def __init__(self, seed: int, widest: list[int] | None = None) -> None:
        self.table_vv = torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 2
        self.widest = widest if widest is not None else []

    def forward(self, ids_bt: torch.Tensor, *, lengths_b: torch.Tensor | None = None) -> Any:
        return SimpleNamespace(hidden_bth=torch.nn.functional.one_hot(ids_bt, V).float())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.widest.append(hidden.shape[0])
        return hidden @ self.table_vv

    def log_probs(self, token: int) -> list[float]:
        row = [float(x) for x in self.table_vv[token].double()]
        total = math.log(sum(math.exp(x) for x in row))
        return [x - total for x in row]


DOCS = [[1, 2, 3, 2, 1], [4], [5, 5, 6], [], [0, 10, 9, 8, 7, 6, 5], [3, 2]]


def by_hand(model: Bigram, document: list[int]) -> tuple[float, int]:
    nll, hits = 0.0, 0
    for here, following in pairwise(document):
        log_p = model.log_probs(here)
        nll -= log_p[following]
        hits += log_p.index(max(log_p)) == following
    return nll, hits


@pytest.mark.parametrize("batch_tokens", [1, 10, 1000])
def test_document_nll_by_hand(batch_tokens: int) -> None:
    model = Bigram(0)
    result = document_nll(model, DOCS, batch_tokens=batch_tokens)
    wanted = [by_hand(model, document) for document in DOCS]
    np.testing.assert_allclose(result.nll_d, [nll for nll, _ in wanted], rtol=1e-5)
    assert result.top1_d.tolist() == [hits for _, hits in wanted]
    assert result.tokens_d.tolist() == [4, 0, 2, 0, 6, 1]
    assert result.perplexity == pytest.approx(math.exp(sum(n for n, _ in wanted) / 13), rel=1e-5)
    assert result.top1 == pytest.approx(sum(h for _, h in wanted) / 13)


def test_logits_never_exist_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = document_nll(Bigram(0), DOCS)
    monkeypatch.setattr(metrics, "CHUNK_LOGITS", 3 * V)
    model = Bigram(0)
    parts = document_nll(model, DOCS)
    assert max(model.widest) <= 3
    np.testing.assert_allclose(parts.nll_d, whole.nll_d, rtol=1e-6)


def test_compare_documents_by_hand() -> None:
    first, second = Bigram(0), Bigram(1)
    both = compare_documents(first, second, DOCS)
    kl, agree = [], []
    for document in DOCS:
        total, same = 0.0, 0
        for here in document[:-1]:
            p, q = first.log_probs(here), second.log_probs(here)
            total += sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
            same += p.index(max(p)) == q.index(max(q))
        kl.append(total)
        agree.append(same)
    np.testing.assert_allclose(both.kl_d, kl, rtol=1e-4)
    assert both.agree_d.tolist() == agree
    assert both.kl == pytest.approx(sum(kl) / 13, rel=1e-4)
    assert both.reference.perplexity == pytest.approx(document_nll(first, DOCS).perplexity)
    ratio = document_nll(second, DOCS).perplexity / both.reference.perplexity
    assert both.perplexity_ratio == pytest.approx(ratio)
    same_model = compare_documents(first, first, DOCS)
    assert same_model.kl == 0.0 and same_model.agree_d.sum() == 13


def test_no_token_to_predict_is_refused() -> None:
    with pytest.raises(TrimtabError, match="no token to predict in 2 documents"):
        document_nll(Bigram(0), [[1], []])


def test_perplexity_of_our_runtime_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny(tmp_path, num_hidden_layers=2)
    draw = torch.Generator().manual_seed(0)
    docs = [torch.randint(0, 490, (n,), generator=draw).tolist() for n in (40, 13, 2)]
    ours = document_nll(Target.load(Checkpoint.open(folder)), docs)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for index, document in enumerate(docs):
        ids = torch.tensor([document])
        with torch.no_grad():
            loss = float(model(ids, labels=ids).loss)
        assert ours.nll_d[index] == pytest.approx(loss * (len(document) - 1), rel=1e-4)


def test_kl_rows_and_head_kl_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(50, 6, generator=draw)
    first, second = (torch.randn(V, 6, generator=draw) for _ in range(2))
    p = torch.softmax((states @ first.T).double(), dim=1)
    q = torch.softmax((states @ second.T).double(), dim=1)
    wanted = (p * (p / q).log()).sum(dim=1)
    torch.testing.assert_close(
        kl_rows(states @ first.T, states @ second.T).double(), wanted, rtol=1e-4, atol=1e-6
    )
    monkeypatch.setattr(metrics, "CHUNK_LOGITS", 7 * V)
    torch.testing.assert_close(head_kl(states, first, second), wanted, rtol=1e-4, atol=1e-6)
    shifted = first + torch.ones(V, 1)  # the same for every token, so softmax does not see it
    assert float(head_kl(states, first, shifted).abs().max()) < 1e-5


def test_coverage_by_hand() -> None:
    result = coverage([3, 1, 4, 3], [[1, 1, 2], [], [4, 5, 9, 3]])
    assert result.covered_o.tolist() == [2, 0, 2]
    assert result.total_o.tolist() == [3, 0, 4]
    assert result.share == pytest.approx(4 / 7)


def simulated(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """40 documents of 3 to 12 items; a and b share their document's size; true ratio 0.8."""
    generator = np.random.default_rng(seed)
    groups = np.repeat(np.arange(40), generator.integers(3, 13, size=40))
    level = generator.gamma(4.0, 1.0, size=40)[groups]
    b = level * generator.gamma(9.0, 1 / 9, size=len(groups))
    return 0.8 * level * generator.gamma(9.0, 1 / 9, size=len(groups)), b, groups


def test_ratio_interval_covers_the_truth_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(300):
        a, b, groups = simulated(seed)
        interval = ratio_interval(a, b, groups, seed=seed, resamples=600)
        assert interval.low <= interval.value <= interval.high
        hits += interval.low <= 0.8 <= interval.high
    assert 0.91 <= hits / 300 <= 0.985


def test_ratio_interval_resamples_documents_not_items() -> None:
    """Items of one document repeat each other: taking them for independent would be too narrow."""
    generator = np.random.default_rng(0)
    values = np.repeat(generator.gamma(2.0, 1.0, size=20), 50)
    groups = np.repeat(np.arange(20), 50)
    ones = np.ones(len(values))
    by_document = ratio_interval(values, ones, groups)
    by_item = ratio_interval(values, ones, np.arange(len(values)))
    assert by_document.value == pytest.approx(by_item.value)
    assert by_document.high - by_document.low > 4 * (by_item.high - by_item.low)
    assert (by_document.groups, by_item.groups) == (20, 1000)


def test_ratio_interval_is_paired() -> None:
    a, b, groups = simulated(1)
    paired = ratio_interval(a, b, groups)
    assert paired.value == pytest.approx(a.sum() / b.sum())
    assert ratio_interval(b, b, groups).low == ratio_interval(b, b, groups).high == 1.0
    mean = mean_interval(a, groups)
    assert (paired.high - paired.low) / paired.value < (mean.high - mean.low) / mean.value


def test_intervals_repeat_and_leave_the_random_state_alone() -> None:
    a, b, groups = simulated(2)
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    first, second = (ratio_interval(a, b, groups, seed=5) for _ in range(2))
    assert first == second != ratio_interval(a, b, groups, seed=6)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
    named = np.array([f"doc-{group}" for group in groups])
    assert ratio_interval(a, b, named).value == pytest.approx(first.value)


def test_intervals_agree_with_scipys_bca() -> None:
    from scipy.stats import bootstrap

    generator = np.random.default_rng(3)
    values = generator.gamma(1.0, 1.0, size=50)
    ours = mean_interval(values, resamples=20_000)
    theirs = bootstrap(
        (values,), np.mean, method="BCa", n_resamples=20_000, rng=generator
    ).confidence_interval
    assert ours.low == pytest.approx(theirs.low, abs=0.02)
    assert ours.high == pytest.approx(theirs.high, abs=0.02)


def test_other_ratios_by_hand() -> None:
    groups = [0, 0, 1, 2]
    rate = rate_ratio_interval([8, 4, 6, 3], [2, 1, 2, 1], [6, 4, 6, 2], [2, 1, 2, 1], groups)
    assert rate.value == pytest.approx((21 / 6) / (18 / 6))
    ppl = perplexity_ratio_interval([3.0, 2, 5, 1], [2.0, 2, 4, 1], [2, 1, 4, 3], groups)
    assert ppl.value == pytest.approx(math.exp((11 - 9) / 10))
    assert mean_interval([1.0, 2, 3, 6], groups).value == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ratio_interval([1.0], [1.0], [0]), "at least 2 documents"),
        (lambda: ratio_interval([1.0, 2], [0.0, 0], [0, 1]), "the figure is inf"),
        (lambda: ratio_interval([1.0, math.nan], [1.0, 1], [0, 1]), "not finite"),
        (lambda: ratio_interval([1.0, 2, 3], [1.0, 1], [0, 1]), "has shape"),
        (lambda: mean_interval([]), "at least 2 documents"),
        (lambda: ratio_interval([1.0, 0, 0], [1.0, 0, 0], [0, 1, 2]), "hangs on a single"),
    ],
)
def test_unusable_samples_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        call()


def test_diversity_by_hand() -> None:
    report = diversity([[1, 2, 3, 1, 2], [4, 4], [4, 4], [7]])
    assert (report.outputs, report.tokens) == (4, 10)
    assert report.distinct_outputs == pytest.approx(3 / 4)
    assert report.distinct_ngrams[1] == pytest.approx(5 / 10)
    assert report.distinct_ngrams[2] == pytest.approx(4 / 6)  # 12 23 31 | 44 of 12 23 31 12 44 44
    assert report.distinct_ngrams[4] == 1.0
    assert (report.loop_outputs, report.loop_tokens) == (0.0, 0.0)
    assert (report.longest_run, report.longest_phrase) == (2, (4, 4)[:1])


@pytest.mark.parametrize("period", [1, 3, 32])
def test_loops_are_found_wherever_they_are(period: int) -> None:
    draw = np.random.default_rng(period)
    phrase = list(range(100, 100 + period))
    text = draw.permutation(90).tolist()
    repeats = -(-max(32, 4 * period) // period)
    looped = [*text[:40], *phrase * repeats, *text[40:]]
    report = diversity([text, looped, text[:50]])
    assert report.loop_outputs == pytest.approx(1 / 3)
    assert report.loop_tokens == pytest.approx(repeats * period / report.tokens)
    assert report.longest_run == repeats * period
    assert list(report.longest_phrase) == phrase
    short = [*text[:40], *phrase * 3, *text[40:]]
    assert diversity([short]).loop_outputs == 0.0


def test_a_model_that_says_one_phrase_is_seen() -> None:
    healthy = [np.random.default_rng(s).integers(0, 500, 120).tolist() for s in range(20)]
    damaged = [[*output[:10], *[9, 8, 7] * 40] for output in healthy]
    good, bad = diversity(healthy), diversity(damaged)
    assert (good.loop_outputs, bad.loop_outputs) == (0.0, 1.0)
    assert bad.loop_tokens > 0.9 and good.loop_tokens == 0.0
    assert bad.distinct_ngrams[4] < 0.2 < good.distinct_ngrams[4]


def test_diversity_of_nothing_is_refused() -> None:
    with pytest.raises(TrimtabError, match="diversity of no tokens"):
        diversity([[], []])
