"""How varied a model's outputs are, and how much of them runs in a loop.

Axes: b outputs, t positions.
Covers shares of distinct outputs and n-grams, and periodic stretches (a phrase said again and
again). Does not cover quality (`metrics`) or the limits (the recipe's gates).
In: lists of token ids. Out: `DiversityReport`.
Invariant: order of the outputs does not matter to any share.

A damaged model that repeats one phrase is easy to draft for, so its acceptance looks excellent;
these figures are what tells it from a fast one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from artifacts.errors import TrimtabError

MAX_PERIOD = 32
LOOP_TOKENS = 32  # shortest stretch that counts as a loop
LOOP_REPEATS = 4  # and it must say its phrase this often


@dataclass(frozen=True)
class DiversityReport:
    """outputs, tokens: how much was looked at. distinct_outputs: different outputs / outputs.

    distinct_ngrams: for n = 1..4, different n-grams / n-grams over all outputs.
    loop_outputs: share of the outputs that hold a loop; loop_tokens: share of the tokens inside
    one. A loop is a stretch of at least 32 tokens that says a phrase of at most 32 tokens at least
    4 times. longest_run: tokens of the longest periodic stretch (phrase said at least twice), with
    the phrase in longest_phrase.
    """

    outputs: int
    tokens: int
    distinct_outputs: float
    distinct_ngrams: dict[int, float]
    loop_outputs: float
    loop_tokens: float
    longest_run: int
    longest_phrase: tuple[int, ...]


def diversity(outputs: Sequence[Sequence[int]]) -> DiversityReport:
    """Measures outputs (token ids without their prompts). TrimtabError when there is no token."""
    tokens = sum(len(output) for output in outputs)
    if not tokens:
        raise TrimtabError("diversity of no tokens: there are no outputs, or all are empty")
    width = max(len(output) for output in outputs)
    ids_bt = np.full((len(outputs), width), -1, dtype=np.int64)
    for row, output in enumerate(outputs):
        ids_bt[row, : len(output)] = output
    looped_bt = np.zeros(ids_bt.shape, dtype=bool)
    longest = 0
    phrase: tuple[int, ...] = ()
    for period in range(1, min(MAX_PERIOD, width - 1) + 1):
        for row, start, stop in _periodic(ids_bt, period):
            if stop - start >= max(LOOP_TOKENS, LOOP_REPEATS * period):
                looped_bt[row, start:stop] = True
            if stop - start > longest and stop - start >= 2 * period:
                longest = stop - start
                phrase = tuple(int(token) for token in ids_bt[row, start : start + period])
    return DiversityReport(
        outputs=len(outputs),
        tokens=tokens,
        distinct_outputs=len({tuple(output) for output in outputs}) / len(outputs),
        distinct_ngrams={n: _distinct(outputs, n) for n in range(1, 5)},
        loop_outputs=float(looped_bt.any(axis=1).mean()),
        loop_tokens=float(looped_bt.sum()) / tokens,
        longest_run=longest,
        longest_phrase=phrase,
    )


def _periodic(ids_bt: NDArray[np.int64], period: int) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every maximal stretch in which token t equals token t - period."""
    equal_bt = (ids_bt[:, period:] == ids_bt[:, :-period]) & (ids_bt[:, period:] >= 0)
    edges_bt = np.diff(np.pad(equal_bt, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(edges_bt == 1)
    _, stops = np.nonzero(edges_bt == -1)
    return [
        (int(row), int(start), int(stop) + period)
        for row, start, stop in zip(rows, starts, stops, strict=True)
    ]


def _distinct(outputs: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams / n-grams; 1.0 when no output is n long."""
    grams = [tuple(o[i : i + n]) for o in outputs for i in range(len(o) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
