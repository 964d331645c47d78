"""Is every source tensor accounted for? The inventory of an artifact against its source.

In: the artifact and its source as TensorSources, the ledger, and the names that were dropped on
purpose. Out: problems, one line each. Does not cover scales or config (`scales`, `agreement`).
Invariant: an empty list means that every source tensor is quantized with a ledger entry, kept byte
for byte, or dropped with a reason, and that nothing else is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from artifacts.checkpoint import (
    Checkpoint,
    Overlay,
    SingleFile,
    TensorSource,
    sha256_tensor,
    sha256_tensors,
)
from artifacts.errors import TrimtabError
from artifacts.ledger import LedgerEntry
from artifacts.names import packed_modules
from artifacts.scheme import is_packed, packed_scheme
from artifacts.shards import PACKED_SUFFIXES


class _Hashes:
    """sha256 of a source's tensors; files are read once, in pieces, when the source has files."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.files: dict[Path, dict[str, str]] = {}

    def __getitem__(self, name: str) -> str:
        source = self.source
        while isinstance(source, Overlay):
            source = source.origin(name)
        if not isinstance(source, (Checkpoint, SingleFile)):
            return sha256_tensor(source.get(name))
        path = source.file_of(name)
        if path not in self.files:
            self.files[path] = sha256_tensors(path)
        return self.files[path][name]


def check_inventory(
    made: TensorSource,
    source: TensorSource,
    ledger: Iterable[LedgerEntry],
    dropped: Mapping[str, str],
) -> list[str]:
    """Compares what was made with what it was made from; `dropped` maps a name to its reason."""
    entries = {entry.name: entry for entry in ledger}
    own, theirs = _Hashes(made), _Hashes(source)
    problems: list[str] = []
    for name in source.names():
        module, _, leaf = name.rpartition(".")
        if name in made:
            problems += _kept(name, made, source, own, theirs, entries)
        elif leaf == "weight" and is_packed(made, module):
            problems += _quantized(module, made, source.info(name).shape)
        elif not dropped.get(name):
            problems.append(f"{name}: is in the source, not here, and no reason is given")
    problems += [f"{name}: dropped, and yet here" for name in dropped if name in made]
    problems += _ledger(made, source, entries)
    for name in made.names():
        module, _, leaf = name.rpartition(".")
        made_of = (
            f"{module}.weight" if leaf in PACKED_SUFFIXES and is_packed(made, module) else name
        )
        if name not in source and made_of not in source:
            problems.append(f"{name}: comes from no tensor of the source")
    return problems


def _kept(
    name: str,
    made: TensorSource,
    source: TensorSource,
    own: _Hashes,
    theirs: _Hashes,
    entries: Mapping[str, LedgerEntry],
) -> list[str]:
    """A tensor of the same name: the same bytes, unless the ledger says it was solved again."""
    new, old = made.info(name), source.info(name)
    module, _, leaf = name.rpartition(".")
    entry = entries.get(module)
    solved = leaf in PACKED_SUFFIXES and entry is not None and entry.method != "copied"
    if (new.dtype, new.shape) != (old.dtype, old.shape):
        if solved and leaf == "weight_scale":
            return []
        return [
            f"{name}: {new.dtype}{list(new.shape)} here, {old.dtype}{list(old.shape)} in the source"
        ]
    if own[name] != theirs[name] and not solved:
        return [f"{name}: kept, and its bytes differ from the source's"]
    return []


def _quantized(module: str, made: TensorSource, shape: tuple[int, ...]) -> list[str]:
    try:
        _, stored = packed_scheme(made, module)
    except TrimtabError as error:
        return [error.message]
    if stored != shape:
        return [f"{module}: weight_shape says {list(stored)}, the source's weight is {list(shape)}"]
    return []


def _ledger(
    made: TensorSource, source: TensorSource, entries: Mapping[str, LedgerEntry]
) -> list[str]:
    """Codes only with a record, a record only with codes, and the record's scheme is the codes'."""
    problems: list[str] = []
    packed = packed_modules(made)
    for module in packed:
        entry = entries.get(module)
        if entry is None:
            problems.append(f"{module}: is packed, and the ledger has no entry for it")
            continue
        try:
            scheme, shape = packed_scheme(made, module)
        except TrimtabError:
            continue  # reported by _quantized or by the agreement
        size = -1 if entry.group_size == shape[1] else entry.group_size
        if (entry.bits, size, entry.shape) != (scheme.bits, scheme.group_size, shape):
            problems.append(
                f"{module}: stored as {scheme} {list(shape)}, the ledger says int{entry.bits} "
                f"g{entry.group_size} {list(entry.shape)}"
            )
        if entry.method == "rtn" and not entry.reason:
            problems.append(f"{module}: rounded to nearest, and the ledger gives no reason")
        if entry.method == "copied" and not is_packed(source, module):
            problems.append(f"{module}: copied, says the ledger, and the source is not packed")
    problems += [
        f"{name}: has a ledger entry and no codes" for name in sorted(set(entries) - set(packed))
    ]
    return problems
