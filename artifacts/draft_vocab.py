"""The draft vocabulary: head rows for drafting, the ids they stand for, bound to the head by hash.

Axes: m draft rows, k inputs, v vocabulary.
Covers the two files of `draft_vocab/` and cutting the rows out of the quantized head, bit for bit.
Does not cover choosing the ids (`calibration.vocabulary`) or drafting (`runtime`).

`draft_head.safetensors` holds the rows as `mtp.draft_lm_head.weight`, or as its packed triple, and
the ids in each encoding that consumers read: `target_ids` int64 [m], absolute; `d2t` int64 [m],
offsets (target = draft + d2t; vLLM, speculators); `t2d` bool [v], membership. The header carries
the head's hash. `draft_vocab.json` repeats the hash and carries sizes and provenance. It is a file
of its own, outside the index: unknown keys in a checkpoint stop vLLM's loader.
Invariant: row i equals the head's row target_ids[i] bit for bit, and both files name that head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from artifacts.checkpoint import (
    TensorSource,
    atomic_write_json,
    load_single,
    read_json,
    sha256_tensor,
    write_single,
)
from artifacts.draft_hash import combine
from artifacts.errors import TrimtabError
from artifacts.names import head_module
from artifacts.packing import PackedMatrix, is_packed

HEAD_FILE = "draft_head.safetensors"
JSON_FILE = "draft_vocab.json"
MODULE = "mtp.draft_lm_head"
REMAKE = "run the draft-vocab stage again"


@dataclass(frozen=True)
class DraftVocab:
    """A draft vocabulary as read: ids int64 [m] (absolute), head rows [m, k], provenance.

    `meta` is what the writer gave; `head_sha256` is the hash of the full head that the rows were
    cut from (`head_digest`), `vocab_size` that head's rows.
    """

    target_ids: Tensor
    head: PackedMatrix | Tensor
    meta: dict[str, Any]
    head_sha256: str
    vocab_size: int


def head_of(source: TensorSource, module: str = "lm_head") -> PackedMatrix | Tensor:
    """The head of a target as stored: packed or plain [v, k]."""
    if is_packed(source, module):
        return PackedMatrix.from_source(source, module)
    return source.get(f"{module}.weight")


def head_digest(head: PackedMatrix | Tensor) -> str:
    """One hash of a head's stored tensors, whatever the files are called (see `draft_hash`)."""
    if isinstance(head, PackedMatrix):
        tensors = head.tensors("x")
        return combine({name.removeprefix("x."): sha256_tensor(t) for name, t in tensors.items()})
    return combine({"weight": sha256_tensor(head)})


def _rows(head: PackedMatrix | Tensor, ids: Tensor) -> PackedMatrix | Tensor:
    return head.slice_rows(ids) if isinstance(head, PackedMatrix) else head.index_select(0, ids)


def _checked_ids(ids: Sequence[int] | Tensor, vocab_size: int) -> Tensor:
    """int64 [m]; TrimtabError unless they are distinct ints in 0..v-1, at least one."""
    values = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    wrong = [value for value in values if type(value) is not int or not 0 <= value < vocab_size]
    if wrong:
        raise TrimtabError(
            f"draft vocabulary: id {wrong[0]!r} is not a whole number in 0..{vocab_size - 1}",
            hint=REMAKE,
        )
    if not values or len(set(values)) != len(values):
        raise TrimtabError(
            f"draft vocabulary: {len(values)} ids, {len(set(values))} distinct; "
            "at least one, and none twice",
            hint=REMAKE,
        )
    return torch.tensor(values, dtype=torch.int64)


def write(
    folder: Path | str,
    ids: Sequence[int] | Tensor,
    head: PackedMatrix | Tensor,
    head_sha256: str,
    meta: Mapping[str, Any],
) -> None:
    """Cuts rows `ids` out of the full `head` [v, k] and writes both files.

    `head_sha256` is the hash of the head that the target ships, by `head_digest` or from the
    manifest; it must be that of `head`. `meta` is JSON: counts' source, sizes, coverage.
    Raises TrimtabError for ids that are out of range or repeated, and for another head.
    """
    folder = Path(folder)
    vocab_size = int(head.shape[0])
    target_ids = _checked_ids(ids, vocab_size)
    actual = head_digest(head)
    if actual != head_sha256:
        raise TrimtabError(
            f"draft vocabulary: the head's hash is {actual}, {head_sha256} was expected",
            hint="cut the rows out of the head that is published",
        )
    rows = _rows(head, target_ids)
    named = rows.tensors(MODULE) if isinstance(rows, PackedMatrix) else {f"{MODULE}.weight": rows}
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[target_ids] = True
    tensors = {
        **named,
        "target_ids": target_ids,
        "d2t": target_ids - torch.arange(target_ids.numel()),
        "t2d": member,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_single(folder / HEAD_FILE, tensors, metadata={"head_sha256": head_sha256})
    atomic_write_json(
        folder / JSON_FILE,
        {
            "schema_version": 1,
            "rows": target_ids.numel(),
            "vocab_size": vocab_size,
            "head_sha256": head_sha256,
            "target_ids_sha256": sha256_tensor(target_ids),
            "meta": dict(meta),
        },
    )


def read(folder: Path | str) -> DraftVocab:
    """Reads a draft vocabulary and checks it in itself.

    Raises TrimtabError when a file or the id map is missing (ids are never taken to be 0..m-1),
    when ids and rows differ in number, when the encodings disagree, or when the two files name
    different heads.
    """
    folder = Path(folder)
    record = read_json(folder / JSON_FILE)
    source = load_single(folder / HEAD_FILE)

    def bad(what: str) -> TrimtabError:
        return TrimtabError(f"{folder / HEAD_FILE}: {what}", hint=REMAKE)

    for name in ("target_ids", "d2t", "t2d"):
        if name not in source:
            raise bad(f"{name} is missing; without it no draft id has a meaning")
    head_sha256 = source.metadata.get("head_sha256", "")
    if not head_sha256 or record.get("head_sha256") != head_sha256:
        raise bad(
            f"is cut from head {head_sha256!r}, {JSON_FILE} says {record.get('head_sha256')!r}"
        )
    target_ids, member = source.get("target_ids"), source.get("t2d")
    if target_ids.dtype != torch.int64 or target_ids.ndim != 1:
        raise bad(f"target_ids is {target_ids.dtype} {list(target_ids.shape)}, wanted int64 [m]")
    target_ids = _checked_ids(target_ids, member.numel())
    if sha256_tensor(target_ids) != record.get("target_ids_sha256"):
        raise bad(f"target_ids are not those of {JSON_FILE}")
    offsets = target_ids - torch.arange(target_ids.numel())
    expected = torch.zeros(member.numel(), dtype=torch.bool)
    expected[target_ids] = True
    if not torch.equal(source.get("d2t"), offsets) or not torch.equal(member, expected):
        raise bad("d2t or t2d say other ids than target_ids")
    head = head_of(source, MODULE)
    if head.shape[0] != target_ids.numel():
        raise bad(f"{head.shape[0]} rows for {target_ids.numel()} ids")
    return DraftVocab(target_ids, head, dict(record.get("meta", {})), head_sha256, member.numel())


def _form(head: PackedMatrix | Tensor) -> tuple[object, ...]:
    """What must be equal before rows can be compared bit for bit."""
    if isinstance(head, PackedMatrix):
        return ("packed", head.shape[1], head.bits, head.group_size, head.scale.dtype)
    return ("plain", head.shape[1], head.dtype)


def check_binding(vocab: DraftVocab, head: PackedMatrix | Tensor) -> list[str]:
    """Whether the rows are the shipped head's own: problems, one line each.

    Compares the head's hash with the recorded one, and every row bit for bit.
    """
    problems: list[str] = []
    actual = head_digest(head)
    if actual != vocab.head_sha256:
        problems.append(
            f"draft_vocab: cut from head {vocab.head_sha256[:12]}, the target's is {actual[:12]}"
        )
    if _form(head) != _form(vocab.head):
        return [*problems, "draft_vocab: its rows are stored in another form than the head"]
    if head.shape[0] != vocab.vocab_size:
        return [*problems, f"draft_vocab: made for {vocab.vocab_size} ids, not {head.shape[0]}"]
    wanted = _rows(head, vocab.target_ids)
    if isinstance(wanted, PackedMatrix) and isinstance(vocab.head, PackedMatrix):
        differ = (wanted.packed != vocab.head.packed).any(1)
        differ |= (wanted.scale.view(torch.uint8) != vocab.head.scale.view(torch.uint8)).any(1)
    elif isinstance(wanted, Tensor) and isinstance(vocab.head, Tensor):
        differ = (wanted.view(torch.uint8) != vocab.head.view(torch.uint8)).any(1)
    if bool(differ.any()):
        row = int(differ.nonzero()[0])
        problems.append(
            f"draft_vocab: {int(differ.sum())} rows differ from the head's, first row {row} "
            f"(id {int(vocab.target_ids[row])})"
        )
    return problems


def write_from_head(
    folder: Path | str, ids: Sequence[int] | Tensor, source: TensorSource, meta: Mapping[str, Any]
) -> None:
    """`write` with the head that `source` makes its logits with, tied or not."""
    head = head_of(source, head_module(source))
    write(folder, ids, head, head_digest(head), meta)
