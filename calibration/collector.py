"""Summing the input rows of observed matrices, batch by batch.

Does: take rows from the runtime's observers, keep those that count, share one sum between matrices
that read one tensor, hand rows to `HessianSum` in batches worth a product. Does not: decide which
rows count (see `capture`).

Inputs: calls of the observer. Outputs: `HessianSum`s by module name.

Invariant: a row reaches its sum once, whatever the batching; an error names the row's prompt.

Axes: t row, k inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch

from artifacts.errors import TrimtabError
from calibration.hessian import HessianSum

FLUSH_ROWS = 8192
FLUSH_BYTES = 1 << 28


class RowPrompts(Sequence[str]):
    """The prompt of each row, looked up only when an error needs it."""

    def __init__(self, names: Sequence[str], sequence_t: torch.Tensor) -> None:
        self._names = names
        self._sequence_t = sequence_t

    def __len__(self) -> int:
        return len(self._sequence_t)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return RowPrompts(self._names, self._sequence_t[index])
        return self._names[int(self._sequence_t[index])]


@dataclass
class _Buffer:
    """Rows waiting to be summed: small products cost more than their rows."""

    total: HessianSum
    rows: list[torch.Tensor] = field(default_factory=list)
    sequences: list[torch.Tensor] = field(default_factory=list)
    waiting: int = 0
    seen: int = 0  # rows observed since `expect`

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in fp32."""
        return 4 * self.total.k


class Collector:
    """An observer of matrices that sums the rows it is told to keep.

    Call `expect` before observed calls, and `flush` before the prompts change.
    """

    def __init__(self, prefix: str, modules: Iterable[str], source: str) -> None:
        self._prefix = prefix
        self._modules: Collection[str] = frozenset(modules)
        self._source = source
        self._names: Sequence[str] = ()
        self._sequence_t = torch.empty(0, dtype=torch.int64)
        self._keep_t: torch.Tensor | None = None
        self._buffers: dict[str, _Buffer] = {}
        self._last: tuple[torch.Tensor, _Buffer] | None = None

    def expect(
        self, names: Sequence[str], sequence_t: torch.Tensor, keep_t: torch.Tensor | None = None
    ) -> None:
        """Announce the rows that each matrix is about to see, in one call or in several.

        Args:
            names: the prompt of each sequence.
            sequence_t: int64, the sequence of each row, in the order of observation.
            keep_t: bool, rows that count; None for all.
        """
        self._names, self._sequence_t, self._keep_t = names, sequence_t, keep_t
        self._last = None
        for buffer in self._buffers.values():
            buffer.seen = 0

    def __call__(self, name: str, rows_tk: torch.Tensor) -> None:
        """The observer: rows [t, k] of one call of the matrix `name`."""
        if name not in self._modules:
            return
        if self._last is not None and rows_tk is self._last[0]:  # a stack: one input, many parts
            if self._buffers.setdefault(name, self._last[1]) is not self._last[1]:
                raise AssertionError(f"{name} shares its input in one call and not in another")
            return
        buffer = self._buffers.get(name)
        if buffer is None:
            total = HessianSum(
                self._prefix + name,
                rows_tk.shape[-1],
                device=rows_tk.device,
                source=self._source,
            )
            buffer = self._buffers[name] = _Buffer(total)
        self._last = (rows_tk, buffer)
        start, buffer.seen = buffer.seen, buffer.seen + len(rows_tk)
        if buffer.seen > len(self._sequence_t):
            raise AssertionError(f"{name}: {buffer.seen} rows of {len(self._sequence_t)} expected")
        sequence_t = self._sequence_t[start : buffer.seen]
        if self._keep_t is None:
            kept_tk = rows_tk.clone()  # the runtime may write to its own tensor later
        else:
            keep_t = self._keep_t[start : buffer.seen]
            kept_tk, sequence_t = rows_tk[keep_t], sequence_t[keep_t]
        buffer.rows.append(kept_tk)
        buffer.sequences.append(sequence_t)
        buffer.waiting += len(kept_tk)
        if buffer.waiting >= FLUSH_ROWS or buffer.waiting * buffer.row_bytes >= FLUSH_BYTES:
            self._flush(buffer)

    def flush(self) -> None:
        """Sum all waiting rows; the names of this chunk's prompts are forgotten after it."""
        self._last = None
        for buffer in self._buffers.values():
            self._flush(buffer)

    def finish(self) -> dict[str, HessianSum]:
        """The sums by full module name; every asked module was seen, with rows and without NaN."""
        self.flush()
        unseen = sorted(set(self._modules) - set(self._buffers))
        if unseen:
            raise TrimtabError(
                f"capture: no row reached {self._prefix}{unseen[0]} "
                f"({len(unseen)} of {len(self._modules)} matrices)",
                hint="give traffic with outputs of at least two tokens",
            )
        found = {self._prefix + name: b.total for name, b in sorted(self._buffers.items())}
        for total in found.values():
            total.check()
        return found

    def _flush(self, buffer: _Buffer) -> None:
        if buffer.rows:
            prompts = RowPrompts(self._names, torch.cat(buffer.sequences))
            buffer.total.add(torch.cat(buffer.rows), prompts)
        buffer.rows, buffer.sequences, buffer.waiting = [], [], 0
