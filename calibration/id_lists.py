"""Lists of target ids for a reduced head: counting, completing, coverage.

Does: count ids, find the ids that must be in, turn scores into a list of the right size, tell what
a list covers. Does not: decide which scores are best (see `vocabulary`).

Inputs: token ids, scores by id. Outputs: int64 counts [v], ascending id lists.

Invariant: a list depends on the scores only; equal scores are ordered by id.

Axes: v target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from artifacts.errors import TrimtabError

Counts = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outputs:
    """The target's own outputs: token ids of the answers only, a domain and a document a row."""

    ids: Sequence[Sequence[int]]
    domains: Sequence[str]
    documents: Sequence[str]

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.domains) == len(self.documents):
            raise ValueError("outputs: ids, domains and documents differ in length")

    def select(self, rows: Sequence[int]) -> Outputs:
        """The given rows."""
        return Outputs(
            [self.ids[r] for r in rows],
            [self.domains[r] for r in rows],
            [self.documents[r] for r in rows],
        )


def count(rows: Sequence[Sequence[int]], vocab_size: int) -> Counts:
    """How often each id occurs; int64 [v].

    Raises:
        TrimtabError: an id is negative or not below `vocab_size`.
    """
    ids = np.fromiter((i for row in rows for i in row), dtype=np.int64)
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = ids.max() if ids.max() >= vocab_size else ids.min()
        raise TrimtabError(f"token id {wrong} is outside the vocabulary of {vocab_size}")
    return np.bincount(ids, minlength=vocab_size).astype(np.int64)


def special_ids(folder: Path) -> list[int]:
    """Ids that every draft vocabulary of this model must hold, ascending.

    All added tokens of tokenizer.json (specials, think and tool markers) and every eos id of
    generation_config.json and config.json.

    Raises:
        TrimtabError: the folder has no tokenizer.json.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TrimtabError(
            f"{folder}: no tokenizer.json", hint="fetch the model again with its tokenizer"
        )
    record = json.loads(file.read_text(encoding="utf-8"))
    found = {int(token["id"]) for token in record.get("added_tokens") or []}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for part in (config, config.get("text_config") or {}):
            eos = part.get("eos_token_id")
            found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return sorted(found)


def check_size(size: object, vocab_size: int, forced: int, *, multiple: int, usable: int) -> int:
    """The size rounded up to `multiple`.

    Raises:
        TrimtabError: not an integer, not positive, above the vocabulary, below the number of
            forced ids, or above the number of ids that can be drafted once rounded.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TrimtabError(f"draft vocabulary size {size!r} is not an integer")
    if not 0 < size <= vocab_size:
        raise TrimtabError(
            f"draft vocabulary size {size} is not between 1 and the vocabulary of {vocab_size}"
        )
    rounded = -(-size // multiple) * multiple
    if rounded < forced:
        raise TrimtabError(
            f"draft vocabulary size {size} is smaller than the {forced} special and stop ids "
            "that must be in it",
            hint=f"ask for at least {-(-forced // multiple) * multiple}",
        )
    if rounded > usable:
        raise TrimtabError(
            f"draft vocabulary size {size} (rounded to {rounded}) is above the {usable} ids that "
            "can be drafted",
            hint=f"ask for at most {usable // multiple * multiple}",
        )
    return rounded


def assemble(
    scores_v: Scores,
    size: int,
    *,
    forced: Sequence[int],
    banned: Sequence[int],
    multiple: int = 64,
    strict: bool = False,
) -> list[int]:
    """The `size` best ids with the forced ones in and the banned ones out, ascending.

    A forced id displaces the lowest-ranked id that is not forced. Equal scores are ordered by id.

    Args:
        scores_v: higher is better, one a target id.
        size: rounded up to `multiple`.
        forced: ids that must be in; an id that is banned too stays out.
        banned: the mask id, and rows that no tokenizer id reaches.
        strict: refuse instead of displacing.

    Raises:
        TrimtabError: the size does not fit (see `check_size`), an id is outside the vocabulary, or
            `strict` and a forced id is not among the best.
    """
    vocab_size = len(scores_v)
    outside = [i for i in (*forced, *banned) if not 0 <= i < vocab_size]
    if outside:
        raise TrimtabError(f"id {outside[0]} is outside the vocabulary of {vocab_size}")
    out_v = np.zeros(vocab_size, dtype=bool)
    out_v[list(banned)] = True
    must = sorted({i for i in forced if not out_v[i]})
    usable = vocab_size - int(out_v.sum())
    rows = check_size(size, vocab_size, len(must), multiple=multiple, usable=usable)
    order = np.lexsort((np.arange(vocab_size), -scores_v))
    order = order[~out_v[order]]
    missing = sorted(set(must) - set(order[:rows].tolist()))
    if strict and missing:
        raise TrimtabError(
            f"the {rows} best ids leave out {len(missing)} special or stop ids, for instance "
            f"{missing[0]}; a chain would end at each of them",
            hint="raise the size, or let special ids displace the rarest (not strict)",
        )
    forced_v = np.zeros(vocab_size, dtype=bool)
    forced_v[must] = True
    free = order[~forced_v[order]][: rows - len(must)]
    return sorted([*must, *(int(i) for i in free)])


def coverage(counts_v: Counts, ids: Sequence[int]) -> float:
    """Share of the counted tokens that are in `ids`; 0 for no tokens."""
    return float(counts_v[list(ids)].sum() / max(int(counts_v.sum()), 1))


def coverage_by_domain(outputs: Outputs, ids: Sequence[int], vocab_size: int) -> dict[str, float]:
    """`coverage` of each domain's rows."""
    found = {}
    for domain in sorted(set(outputs.domains)):
        rows = [r for r, d in zip(outputs.ids, outputs.domains, strict=True) if d == domain]
        found[domain] = coverage(count(rows, vocab_size), ids)
    return found
