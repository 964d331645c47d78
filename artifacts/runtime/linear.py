"""Matrices of the runtime: `Linear` with observers, `Embedding` over dense or packed rows.

Axes: n outputs, k inputs, t rows (any leading dimensions flattened).
Covers y = x W^T for one matrix or for several that share their input (stacked along n), the capture
hook on inputs, and table lookup that dequantizes only the gathered rows. Does not cover reading
checkpoints (`loading`). Biases do not occur in the supported families.
Invariant: observing changes no result; an unobserved call costs one attribute test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from artifacts.packing import PackedMatrix

Observer = Callable[[str, Tensor], None]


class Linear:
    """y = x W^T for one matrix, or for several stacked along n that read the same input.

    Args:
        name: the module's name in the checkpoint; for a stack, that of its first part.
        weight: [n, k], dense, in the compute dtype.
        parts: (name, rows) of each stacked matrix in order; by default the one matrix.
    """

    __slots__ = ("name", "observer", "parts", "weight")

    def __init__(
        self, name: str, weight: Tensor, *, parts: Sequence[tuple[str, int]] | None = None
    ) -> None:
        self.name = name
        self.weight = weight
        self.parts = tuple(parts) if parts else ((name, weight.shape[0]),)
        self.observer: Observer | None = None

    def __call__(self, x: Tensor, *, observe: bool | Tensor = True) -> Tensor:
        """[..., k] to [..., n].

        observe: False hides this call from observers; a bool tensor of x's leading shape selects
        the rows that they see (padding is left out so).
        """
        if self.observer is not None and observe is not False:
            rows = x.reshape(-1, x.shape[-1])
            if isinstance(observe, Tensor):
                rows = rows[observe.reshape(-1)]
            for name, _ in self.parts:
                self.observer(name, rows)
        return F.linear(x, self.weight)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The stacked output [..., n] by parts (views)."""
        return tuple(torch.split_with_sizes(y, [n for _, n in self.parts], dim=-1))


@contextmanager
def observe(linears: Iterable[Linear], callback: Observer) -> Iterator[None]:
    """Within the block, `callback(name, x_tk)` gets the input rows of each observed call.

    A stack calls back once for each part, with the identical tensor object, so that a consumer can
    share the work between parts. The rows are in the compute dtype and must not be written to.
    """
    changed = [(linear, linear.observer) for linear in linears]
    for linear, _ in changed:
        linear.observer = callback
    try:
        yield
    finally:
        for linear, before in changed:
            linear.observer = before


class Embedding:
    """A lookup table [v, h], dense or packed; packed rows are dequantized when gathered."""

    def __init__(self, name: str, table: Tensor | PackedMatrix, dtype: torch.dtype) -> None:
        self.name = name
        self.table = table
        self.dtype = dtype

    @property
    def rows(self) -> int:
        """Number of ids, padding rows included."""
        return self.table.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes resident for the table."""
        return self.table.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 ids [...] to [..., h] in the compute dtype; IndexError outside 0..v-1 (CPU)."""
        if isinstance(self.table, PackedMatrix):
            return self.table.rows(ids, self.dtype)
        return F.embedding(ids, self.table)

    def dense(self) -> Tensor:
        """The whole table [v, h] in the compute dtype (a tied head uses it)."""
        if isinstance(self.table, PackedMatrix):
            return self.table.dense(self.dtype)
        return self.table
