"""Draft vocabulary: which target ids a reduced draft head keeps.

Does: rank ids by own counts, text counts and own counts with text as a prior at several sample
sizes, choose the ranking and the size on one half of held-out own output, report coverage by domain
on the other half. Does not: build a list from scores (see `id_lists`), slice the head or write the
files (see `artifacts.draft_vocab`), or gate (a coverage below the floor is reported, the gate is
`validate`'s).

Inputs: output token ids (never prompts: a prompt's ids are not drafted), token counts by id.
Output: a `Choice` with ascending target ids.

Invariant: the result depends on the multiset of the counted tokens only; equal scores are ordered
by id, so the same corpus in another order gives the same bytes.

Axes: v target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from artifacts.errors import TrimtabError
from calibration.id_lists import (
    Counts,
    Outputs,
    Scores,
    assemble,
    count,
    coverage,
    coverage_by_domain,
    special_ids,
)
from calibration.tokensets import stable_unit

__all__ = [
    "Candidate",
    "Choice",
    "Outputs",
    "assemble",
    "choose",
    "count",
    "coverage",
    "coverage_by_domain",
    "special_ids",
]

PRIOR_TOKENS = tuple(4**e for e in range(2, 13))  # 16 to 16.8 million tokens of text as a prior
SAMPLE_SHARES = (0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Candidate:
    """One way to rank ids, with its coverage of the development half at each size."""

    name: str
    kind: str  # "own" | "text" | "own+text"
    own_tokens: int
    text_tokens: int
    prior_tokens: int
    coverage: dict[int, float]  # size -> share of the development half's tokens


@dataclass(frozen=True)
class Choice:
    """The chosen ids and how they were chosen.

    Attributes:
        ids: ascending target ids, a multiple of the rounding long.
        size: len(ids).
        candidate: name of the chosen ranking.
        coverage: share of the report half's tokens that are in `ids`.
        coverage_by_domain: the same for each domain.
        floor: the coverage that was asked for.
        forced_added: forced ids that the ranking alone would have left out.
        unseen: ids in the list that no counted token supports.
        table: every candidate compared, at every size, on the development half.
        tokens: held-out tokens of the development and of the report half.
        reason: one sentence for people: which ranking and size, and why.
    """

    ids: list[int]
    size: int
    candidate: str
    coverage: float
    coverage_by_domain: dict[str, float]
    floor: float
    forced_added: list[int]
    unseen: int
    table: list[Candidate]
    tokens: dict[str, int]
    reason: str

    @property
    def meets_floor(self) -> bool:
        """Whether the reported coverage reaches the floor."""
        return self.coverage >= self.floor

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {**asdict(self), "meets_floor": self.meets_floor}


def choose(
    *,
    own: Outputs,
    heldout: Outputs,
    vocab_size: int,
    forced: Sequence[int],
    banned: Sequence[int] = (),
    size: int | None,
    sizes: Sequence[int] = (),
    floor: float,
    own_counts_v: Counts | None = None,
    text_counts_v: Counts | None = None,
    multiple: int = 64,
    strict: bool = False,
    seed: int = 0,
) -> Choice:
    """Compare rankings on the development half of held-out own output and take the best.

    Rankings: own counts at `SAMPLE_SHARES` of the own tokens; text counts; own counts plus
    lambda times the text's distribution, lambda in `PRIOR_TOKENS` tokens, at the same shares. On
    equal coverage the simpler one wins (own, text, mixed), then the larger sample, then the
    smaller lambda.

    Args:
        own: the target's own outputs (calibration side).
        heldout: own outputs on other documents; halved by document, one half chooses, the other
            half reports.
        size: rows of the draft head; None takes the smallest of `sizes` whose coverage of the
            development half reaches `floor`, or the largest if none does.
        sizes: further sizes shown in the table.
        own_counts_v: counts of more own outputs, shipped with the model, added to `own`.
        text_counts_v: counts of plain text.
        forced, banned, multiple, strict: as in `assemble`.

    Raises:
        TrimtabError: sizes that do not fit, no own tokens, or held-out output that cannot be
            halved by document.
    """
    development, report = _halves(heldout, seed)
    wanted = sorted({*sizes, *([size] if size is not None else [])})
    if not wanted:
        raise TrimtabError("draft vocabulary: neither a size nor sizes to choose from were given")
    listed = partial(assemble, forced=forced, banned=banned, multiple=multiple, strict=strict)
    rankings = _rankings(own, own_counts_v, text_counts_v, vocab_size, seed)
    development_v = count(development.ids, vocab_size)
    table = []
    for label, scores_v in rankings:
        lists = {n: listed(scores_v, n) for n in wanted}
        covers = {n: coverage(development_v, ids) for n, ids in lists.items()}
        table.append(Candidate(**label, coverage=covers))
    at = size if size is not None else _smallest_size(table, wanted, floor)
    best = max(range(len(table)), key=lambda i: (table[i].coverage[at], _preference(table[i])))
    scores_v = rankings[best][1]
    ids = listed(scores_v, at)
    unforced = assemble(scores_v, at, forced=(), banned=banned, multiple=multiple)
    covered = coverage(count(report.ids, vocab_size), ids)
    return Choice(
        ids=ids,
        size=len(ids),
        candidate=table[best].name,
        coverage=covered,
        coverage_by_domain=coverage_by_domain(report, ids, vocab_size),
        floor=floor,
        forced_added=sorted(set(ids) - set(unforced)),
        unseen=int((scores_v[ids] == 0).sum()),
        table=table,
        tokens={
            "own": table[best].own_tokens,
            "development": int(development_v.sum()),
            "report": sum(map(len, report.ids)),
        },
        reason=_reason(table, best, at, len(ids), covered, floor, size is not None),
    )


def _halves(heldout: Outputs, seed: int) -> tuple[Outputs, Outputs]:
    """Development and report half, split by document."""
    first = [
        r
        for r, document in enumerate(heldout.documents)
        if stable_unit(seed, f"vocabulary:{document}") < 0.5
    ]
    second = sorted(set(range(len(heldout.ids))) - set(first))
    halves = heldout.select(first), heldout.select(second)
    if not all(any(len(r) for r in half.ids) for half in halves):
        raise TrimtabError(
            f"held-out own output of {len(heldout.ids)} rows from {len(set(heldout.documents))} "
            "documents cannot be halved by document, one half to choose and one to report",
            hint="give more held-out prompts from more documents",
        )
    return halves


def _rankings(
    own: Outputs,
    own_counts_v: Counts | None,
    text_counts_v: Counts | None,
    vocab_size: int,
    seed: int,
) -> list[tuple[dict[str, Any], Scores]]:
    """Every ranking to compare: its label and its scores [v]."""
    for name, counts_v in (("own", own_counts_v), ("text", text_counts_v)):
        if counts_v is not None and len(counts_v) != vocab_size:
            raise TrimtabError(
                f"{name} counts have {len(counts_v)} entries, the vocabulary {vocab_size}"
            )
    text_tokens = 0 if text_counts_v is None else int(text_counts_v.sum())
    found: list[tuple[dict[str, Any], Scores]] = []
    for own_v in _samples(own, own_counts_v, vocab_size, seed):
        tokens = int(own_v.sum())
        label = {"own_tokens": tokens, "text_tokens": 0, "prior_tokens": 0}
        found.append(
            (
                {"name": f"own counts of {tokens:,}", "kind": "own", **label},
                own_v.astype(np.float64),
            )
        )
        if text_counts_v is None or not text_tokens:
            continue
        for prior in PRIOR_TOKENS:
            label = {"own_tokens": tokens, "text_tokens": text_tokens, "prior_tokens": prior}
            name = f"own counts of {tokens:,} with {prior:,} tokens of text as a prior"
            scores_v = own_v + text_counts_v * (prior / text_tokens)
            found.append(({"name": name, "kind": "own+text", **label}, scores_v))
    if text_counts_v is not None and text_tokens:
        label = {"own_tokens": 0, "text_tokens": text_tokens, "prior_tokens": 0}
        name = f"text counts of {text_tokens:,}"
        found.append(({"name": name, "kind": "text", **label}, text_counts_v.astype(np.float64)))
    return found


def _samples(own: Outputs, own_counts_v: Counts | None, vocab_size: int, seed: int) -> list[Counts]:
    """Counts of growing shares of the own outputs, whole rows, then with the shipped counts."""
    order = sorted(
        range(len(own.ids)),
        key=lambda r: (stable_unit(seed, f"sample:{own.documents[r]}"), list(own.ids[r])),
    )
    found: list[Counts] = []
    for share in SAMPLE_SHARES:
        counts_v = count([own.ids[r] for r in order[: round(share * len(order))]], vocab_size)
        if counts_v.sum() and not (found and counts_v.sum() == found[-1].sum()):
            found.append(counts_v)
    if own_counts_v is not None and own_counts_v.sum():
        found.append(own_counts_v + (found[-1] if found else 0))
    if not found:
        raise TrimtabError("draft vocabulary: no own output tokens to count")
    return found


def _smallest_size(table: Sequence[Candidate], sizes: Sequence[int], floor: float) -> int:
    reached = [n for n in sizes if max(c.coverage[n] for c in table) >= floor]
    return min(reached) if reached else max(sizes)


def _preference(candidate: Candidate) -> tuple[int, int, int]:
    simple = {"own": 2, "text": 1, "own+text": 0}[candidate.kind]
    return simple, candidate.own_tokens, -candidate.prior_tokens


def _reason(
    table: Sequence[Candidate],
    best: int,
    size: int,
    rows: int,
    covered: float,
    floor: float,
    given: bool,
) -> str:
    """One sentence: what was taken, against what, and what it covers."""
    others = []
    for kind in ("own", "text", "own+text"):
        rivals = [c for c in table if c.kind == kind and c.kind != table[best].kind]
        if rivals:
            rival = max(rivals, key=lambda c: (c.coverage[size], _preference(c)))
            others.append(f"{rival.name} {100 * rival.coverage[size]:.2f} %")
    against = f" against {', '.join(others)}" if others else ""
    why = "the recipe's size" if given else f"the smallest size that reaches {100 * floor:.1f} %"
    if not given and table[best].coverage[size] < floor:
        why = f"the largest size offered, none reaches {100 * floor:.1f} %"
    return (
        f"{table[best].name}: {100 * table[best].coverage[size]:.2f} % of the development half"
        f"{against}; {rows:,} ids ({why}); {100 * covered:.2f} % of the report half"
    )
