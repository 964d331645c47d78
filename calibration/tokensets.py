"""Ragged sets of token ids with one record a row: the container of prompts and of plain texts.

Does: hold, save, load, summarise, split by document, refuse overlap. Does not: read source files or
call a tokenizer (see `prompts`), or hold outputs (see `traffic`).

Inputs and outputs: `NAME.safetensors` (`ids` int32, all rows end to end; `offsets` int64, rows + 1)
and `NAME.json` beside it (header, one entry a row, the hash of the ids).

Invariant: whatever selects or splits rows depends on the rows' ids and contents and a seed only,
never on file order, on Python's salted hash or on a random generator.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from artifacts.errors import TrimtabError
from artifacts.files import atomic_write_bytes, atomic_write_json

HEADER_KEY = "trimtab"  # one metadata key: safetensors writes several in no fixed order


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of one row.

    Attributes:
        id: unique in its set; seeds and splits hang on it.
        domain: free label by which figures are broken down.
        language: free label, for instance "en".
        thinking: whether the row was rendered with thinking on; False for plain text.
        document: the source document; rows of one document are never split.
    """

    id: str
    domain: str
    language: str
    thinking: bool
    document: str


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Token rows with their entries.

    Attributes:
        name: what errors call the set.
        kind: "prompts" (rendered by the chat template) or "texts" (plain).
        ids: one list of token ids a row.
        entries: one a row, in the same order.
        header: source, tokenizer and template hashes, requested and obtained counts.
    """

    name: str
    kind: str
    ids: list[list[int]]
    entries: list[Entry]
    header: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.entries):
            raise ValueError(f"{self.name}: {len(self.ids)} rows, {len(self.entries)} entries")
        twice = [key for key, n in Counter(e.id for e in self.entries).items() if n > 1]
        if twice:
            raise TrimtabError(
                f"set {self.name!r}: id {twice[0]!r} stands on more than one row "
                f"({len(twice)} such ids); ids seed the sampling and must be unique",
                hint="give each row its own id, or leave the id column out to have it derived",
            )

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: Sequence[int], name: str | None = None) -> PromptSet:
        """The given rows in the given order, with the same header."""
        return replace(
            self,
            name=name or self.name,
            ids=[self.ids[r] for r in rows],
            entries=[self.entries[r] for r in rows],
        )

    def summary(self) -> dict[str, Any]:
        """Counts, lengths in tokens, mix by label, content hash: what the manifest states."""
        return {
            "rows": len(self),
            "documents": len({e.document for e in self.entries}),
            **lengths(self.ids),
            "domains": _shares(e.domain for e in self.entries),
            "languages": _shares(e.language for e in self.entries),
            "thinking_share": round(sum(e.thinking for e in self.entries) / max(len(self), 1), 4),
            "content_sha256": ids_sha256(self.ids),
        }

    def save(self, path: Path) -> None:
        """Write `path` (.safetensors) and the .json beside it, each atomically, the JSON last."""
        write_ragged(path, {"": self.ids}, {})
        atomic_write_json(
            path.with_suffix(".json"),
            {
                "name": self.name,
                "kind": self.kind,
                "header": self.header,
                "summary": self.summary(),
                "entries": [asdict(e) for e in self.entries],
            },
        )

    @classmethod
    def load(cls, path: Path) -> PromptSet:
        """Read a saved set; raises `TrimtabError` when ids and JSON do not belong together."""
        lists, _ = read_ragged(path)
        record_path = path.with_suffix(".json")
        try:
            record = json.loads(record_path.read_text(encoding="utf-8"))
            name, kind, header = record["name"], record["kind"], record["header"]
            entries = [Entry(**e) for e in record["entries"]]
            content = record["summary"]["content_sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrimtabError(
                f"{record_path}: cannot be read ({error}); a token set needs its JSON beside it",
                hint="run the stage prompts again",
            ) from error
        if content != ids_sha256(lists[""]) or len(entries) != len(lists[""]):
            raise TrimtabError(
                f"{path}: the token ids are not those that {record_path.name} describes",
                hint="run the stage prompts again",
            )
        return cls(name=name, kind=kind, ids=lists[""], entries=entries, header=header)


def stable_unit(seed: int, key: str) -> float:
    """A number in [0, 1) from sha256 of seed and key: the same on every machine and run."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def stable_seed(seed: int, key: str) -> int:
    """A 63-bit generator seed from sha256 of seed and key."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8], "big") >> 1


def ids_sha256(rows: Iterable[Sequence[int]]) -> str:
    """sha256 over the rows' ids as little-endian int32, each row preceded by its length."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(np.asarray(row, dtype="<i4").tobytes())
    return digest.hexdigest()


def lengths(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Total, shortest, median and longest row in tokens (zeros for no rows)."""
    sizes = [len(row) for row in rows] or [0]
    return {
        "tokens": sum(sizes),
        "min_tokens": min(sizes),
        "median_tokens": statistics.median(sizes),
        "max_tokens": max(sizes),
    }


def split_by_document(
    source: PromptSet, shares: Mapping[str, float], *, seed: int
) -> dict[str, PromptSet]:
    """Split into named parts so that all rows of a document fall into one part.

    Args:
        source: the set to split.
        shares: name of each part and its share of the documents; they sum to 1.
        seed: of the stable hash that places each document.

    Raises:
        TrimtabError: the shares do not sum to 1, or a part would be empty.
    """
    if any(share <= 0 for share in shares.values()) or abs(sum(shares.values()) - 1) > 1e-9:
        raise TrimtabError(f"split {dict(shares)}: shares must be positive and sum to 1")
    edges = list(zip(shares, accumulate(shares.values()), strict=True))
    rows: dict[str, list[int]] = {name: [] for name in shares}
    for row, entry in enumerate(source.entries):
        unit = stable_unit(seed, entry.document)
        part = next((name for name, edge in edges if unit < edge), edges[-1][0])
        rows[part].append(row)
    empty = [name for name, part_rows in rows.items() if not part_rows]
    if empty:
        raise TrimtabError(
            f"set {source.name!r}: its {len({e.document for e in source.entries})} documents leave "
            f"the part {empty[0]!r} empty",
            hint="use more documents, or give each part its own file",
        )
    return {name: source.select(part_rows, name) for name, part_rows in rows.items()}


def refuse_overlap(sets: Sequence[PromptSet], *, window: int | None = None) -> None:
    """Refuse sets that share a document or a whole row; with `window`, a run of that many tokens.

    The window is meant for plain texts: prompts share their template's tokens rightly.

    Raises:
        TrimtabError: naming the two sets, how many rows they share, and one of them.
    """
    for a, b in combinations(sets, 2):
        kinds: list[tuple[str, list[str]]] = [
            ("document", _shared((e.document for e in a.entries), (e.document for e in b.entries))),
            ("text", _rows_shared(a, b)),
        ]
        if window is not None:
            kinds.append((f"{window}-token window", _windows_shared(a, b, window)))
        for what, shared in kinds:
            if shared:
                raise TrimtabError(
                    f"sets {a.name!r} and {b.name!r} share {len(shared)} times the same {what}, "
                    f"for instance {shared[0]!r}; figures on seen text read far too well",
                    hint="take the shared rows out of one of the two sets",
                )


def write_ragged(
    path: Path, lists: Mapping[str, Sequence[Sequence[int]]], header: Mapping[str, Any]
) -> None:
    """Write named ragged lists of ids atomically: `[NAME_]ids` int32 and `[NAME_]offsets` int64."""
    from safetensors.numpy import save

    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, rows in lists.items():
        prefix = f"{name}_" if name else ""
        sizes = np.fromiter((len(r) for r in rows), dtype=np.int64, count=len(rows))
        flat = [np.asarray(r, dtype=np.int32) for r in rows]
        tensors[f"{prefix}ids"] = np.concatenate(flat) if flat else np.empty(0, dtype=np.int32)
        tensors[f"{prefix}offsets"] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    metadata = {HEADER_KEY: json.dumps(header, sort_keys=True, separators=(",", ":"))}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(path, save(tensors, metadata))


def read_ragged(path: Path) -> tuple[dict[str, list[list[int]]], dict[str, Any]]:
    """Read what `write_ragged` wrote; raises `TrimtabError` naming a damaged or missing file."""
    from safetensors import SafetensorError, safe_open

    lists: dict[str, list[list[int]]] = {}
    try:
        with safe_open(str(path), framework="np") as file:
            header = json.loads((file.metadata() or {})[HEADER_KEY])
            for key in sorted(file.keys()):
                if not key.endswith("offsets"):
                    continue
                prefix = key.removesuffix("offsets")
                flat, offsets = file.get_tensor(f"{prefix}ids"), file.get_tensor(key)
                if offsets[0] != 0 or offsets[-1] != len(flat) or (np.diff(offsets) < 0).any():
                    raise ValueError("offsets do not cover the ids")
                bounds = offsets.tolist()
                values = flat.tolist()
                lists[prefix.removesuffix("_")] = [
                    values[start:end] for start, end in pairwise(bounds)
                ]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise TrimtabError(f"{path}: not a readable token file ({error})") from error
    return lists, dict(header)


def _shares(labels: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(labels).items()))


def _shared(a: Iterable[str], b: Iterable[str]) -> list[str]:
    return sorted(set(a) & set(b))


def _rows_shared(a: PromptSet, b: PromptSet) -> list[str]:
    seen = {tuple(row) for row in a.ids}
    return sorted(e.id for row, e in zip(b.ids, b.entries, strict=True) if tuple(row) in seen)


def _windows_shared(a: PromptSet, b: PromptSet, window: int) -> list[str]:
    seen = {tuple(row[i : i + window]) for row in a.ids for i in range(len(row) - window + 1)}
    return sorted(
        entry.id
        for row, entry in zip(b.ids, b.entries, strict=True)
        if any(tuple(row[i : i + window]) in seen for i in range(len(row) - window + 1))
    )
