"""The ledger: for every matrix that was quantized, how, from what, and how well.

Covers the record and its JSON file. Does not cover solving (`calibration.solve`) or judging.
Invariant: codes exist only for matrices that have an entry here, and an entry's figures are those
of the solve that made the codes; a fallback is an entry with its reason, never an absence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from artifacts.errors import TrimtabError
from artifacts.files import atomic_write_json, read_json

METHODS = ("gptq", "rtn", "copied", "folded")


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One matrix W [n, k].

    name: module name, without `.weight`. method: "gptq" (error feedback against a Hessian), "rtn"
    (round-to-nearest, with its `reason`), "copied" (packed by somebody else, bytes unchanged) or
    "folded" (the same, with the signs of its scales folded into the codes).
    bits, group_size: the scheme; group_size -1 is one scale a row. shape: (n, k).
    rows: calibration rows in the Hessian. damping: relative to the mean of its diagonal;
    damping_tries: solves until one succeeded. dead_inputs: columns that no row ever touched.
    clip: mean chosen scale over amax scale. weight_error: ||W - Q||_F / ||W||_F.
    output_error: sqrt(tr(E H E^T) / tr(W H W^T)), E = W - Q; rtn_output_error: the same for
    round-to-nearest with scale amax/7 (amax/127 in int8). hessian_source: file or set of the rows.
    None stands where a figure was not measured.
    """

    name: str
    method: str
    reason: str = ""
    bits: int
    group_size: int
    shape: tuple[int, int]
    rows: int = 0
    damping: float | None = None
    damping_tries: int = 0
    dead_inputs: int = 0
    clip: float | None = None
    weight_error: float | None = None
    output_error: float | None = None
    rtn_output_error: float | None = None
    hessian_source: str = ""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise TrimtabError(
                f"ledger entry {self.name!r}: method {self.method!r} is not one of "
                f"{', '.join(METHODS)}"
            )
        object.__setattr__(self, "shape", (int(self.shape[0]), int(self.shape[1])))

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON values."""
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> LedgerEntry:
        """The inverse of `to_json`; TrimtabError for unknown or missing fields."""
        known = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or set(value) - known:
            raise TrimtabError(f"ledger entry with unknown fields {sorted(set(value) - known)}")
        try:
            return cls(**{**value, "shape": tuple(value["shape"])})
        except (KeyError, TypeError, IndexError) as error:
            raise TrimtabError(f"ledger entry {value.get('name')!r} is incomplete") from error


def to_json(entries: Iterable[LedgerEntry]) -> list[dict[str, Any]]:
    """The entries as a JSON list, sorted by name; a name that stands twice is refused."""
    result = sorted((entry.to_json() for entry in entries), key=lambda value: str(value["name"]))
    for left, right in pairwise(result):
        if left["name"] == right["name"]:
            raise TrimtabError(f"the ledger has two entries for {left['name']!r}")
    return result


def from_json(values: list[dict[str, Any]]) -> list[LedgerEntry]:
    """The inverse of `to_json`."""
    return [LedgerEntry.from_json(value) for value in values]


def write_ledger(path: Path | str, entries: Iterable[LedgerEntry]) -> None:
    """Writes `ledger.json` atomically, sorted by name."""
    atomic_write_json(Path(path), to_json(entries))


def read_ledger(path: Path | str) -> list[LedgerEntry]:
    """Reads a file of `write_ledger`; TrimtabError when it is missing or malformed."""
    values = read_json(Path(path))
    if not isinstance(values, list):
        raise TrimtabError(f"{path}: a ledger is a JSON list")
    return from_json(values)
