"""The head that a drafter proposes with: all rows of lm_head, or a draft vocabulary's.

Axes: v target vocabulary, n draft vocabulary rows, h hidden; leading axes are free.
Covers logits over draft rows and the one conversion from draft ids to target ids. Does not cover
choosing the vocabulary (`calibration`). Invariant: only target ids leave this module; a draft id is
wrapped in `DraftIds` until `target_ids` converts it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts.errors import TrimtabError
from artifacts.packing import PackedMatrix
from artifacts.runtime.linear import Linear
from artifacts.runtime.target import Target


@dataclass(frozen=True)
class DraftIds:
    """Row numbers of a draft head, int64; not target ids."""

    value: Tensor


class DraftHead:
    """A Linear over draft rows, and the target id of each row (None: row = id)."""

    def __init__(self, linear: Linear, map_n: Tensor | None, vocab_size: int) -> None:
        rows = linear.weight.shape[0]
        if map_n is None and rows != vocab_size:
            raise TrimtabError(
                f"draft head: {rows} rows for a vocabulary of {vocab_size} and no map of their ids",
                hint="ship target_ids beside the head",
            )
        if map_n is not None:
            _check_map(map_n, rows, vocab_size)
        self.linear = linear
        self.map_n = map_n
        self.vocab_size = vocab_size

    @classmethod
    def full(cls, target: Target) -> DraftHead:
        """The target's own head, shared."""
        return cls(target.lm_head, None, target.config.vocab_size)

    @classmethod
    def reduced(cls, target: Target, rows: PackedMatrix | Tensor, target_ids: Tensor) -> DraftHead:
        """A draft vocabulary's rows [n, h], packed or dense, and their target ids int64 [n]."""
        dense = rows.dense(target.dtype) if isinstance(rows, PackedMatrix) else rows
        weight = dense.to(device=target.device, dtype=target.dtype)
        if weight.shape[1] != target.config.hidden_size:
            raise TrimtabError(
                f"draft head: {weight.shape[1]} columns, hidden size {target.config.hidden_size}"
            )
        head = Linear("draft_lm_head", weight)
        return cls(head, target_ids.to(target.device), target.config.vocab_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., n] over draft rows."""
        return self.linear(hidden).float()

    def target_ids(self, ids: DraftIds) -> Tensor:
        """The target ids of draft ids, same shape."""
        return ids.value if self.map_n is None else self.map_n[ids.value]

    def argmax(self, hidden: Tensor, allowed_v: Tensor | None = None) -> Tensor:
        """Greedy target ids [...]."""
        return self.target_ids(DraftIds(self.allowed(self.logits(hidden), allowed_v).argmax(-1)))

    def allowed(self, logits: Tensor, allowed_v: Tensor | None) -> Tensor:
        """Logits over draft rows with -inf where the target id is not allowed (bool [v])."""
        if allowed_v is None:
            return logits
        keep = allowed_v if self.map_n is None else allowed_v[self.map_n]
        return logits.masked_fill(~keep, float("-inf"))

    def all_ids(self) -> Tensor | None:
        """Target ids by draft row, or None when the rows are the target ids."""
        return self.map_n


def _check_map(map_n: Tensor, rows: int, vocab_size: int) -> None:
    if map_n.dtype != torch.int64 or map_n.shape != (rows,):
        raise TrimtabError(
            f"draft head: {rows} rows, but a map of {map_n.dtype} {list(map_n.shape)}; "
            "they must have equal counts"
        )
    if rows == 0 or int(map_n.min()) < 0 or int(map_n.max()) >= vocab_size:
        raise TrimtabError(f"draft head: its map leaves the target ids 0..{vocab_size - 1}")
    if bool((map_n.sort().values.diff() == 0).any()):
        raise TrimtabError("draft head: its map names a target id twice")
