"""What a model remembers between calls: key/value caches, DeltaNet states, and where tokens go.

Axes: b batch rows, t tokens of a call, s cached tokens, m key/value heads, d head dimension,
h value heads, k key dimension, v value dimension, c convolution channels, j taps before the token.
Covers allocation, appending at each row's own length, truncation, exact rollback, selecting rows.
Does not cover arithmetic of layers. Invariant: everything at or beyond a row's length is garbage
that no query sees; commit(keep) leaves what keep tokens alone would have left, up to fp32 rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from artifacts.runtime.delta import DeltaRecord


@dataclass
class Placement:
    """Where the t tokens of a call stand.

    start: the rows' common length before the call, or None when they differ; positions [1 or b, t];
    limit: no position is as large; seen: bool [1 or b, t, limit] keys that each query may see, None
    for plain causal attention from position 0; valid: bool [b, t], None when no row is padded.
    """

    start: int | None
    positions_bt: Tensor
    limit: int
    seen_bts: Tensor | None
    valid_bt: Tensor | None
    cos: Tensor = field(init=False)
    sin: Tensor = field(init=False)


def place(
    starts: Sequence[int],
    t: int,
    *,
    counts: Sequence[int] | None,
    device: torch.device | str,
    always_mask: bool = False,
) -> Placement:
    """The placement of t tokens, `counts` of them valid, after `starts` (lengths by row)."""
    low, high = min(starts), max(starts)
    offsets = torch.arange(t, device=device)
    limit = high + t
    if low == high:
        positions = (offsets + low).unsqueeze(0)
    else:
        positions = torch.tensor(starts, device=device).unsqueeze(1) + offsets
    seen = None
    if high > 0 or always_mask:
        seen = torch.arange(limit, device=device) <= positions.unsqueeze(-1)
    valid = None
    if counts is not None and min(counts) < t:
        valid = offsets < torch.tensor(counts, device=device).unsqueeze(1)
    return Placement(low if low == high else None, positions, limit, seen, valid)


@dataclass
class KvCache:
    """Keys (after norm and rope) and values of one attention layer, [b, m, capacity, d]."""

    key_bmsd: Tensor
    value_bmsd: Tensor

    @classmethod
    def empty(
        cls,
        b: int,
        m: int,
        capacity: int,
        d: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KvCache:
        shape = (b, m, capacity, d)
        return cls(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )

    @property
    def capacity(self) -> int:
        return self.key_bmsd.shape[2]

    def append(self, key_bmtd: Tensor, value_bmtd: Tensor, place: Placement) -> None:
        """Write the call's keys and values at its positions. ValueError beyond the capacity."""
        t = key_bmtd.shape[2]
        if place.limit > self.capacity:
            raise ValueError(f"{place.limit} tokens in a cache of {self.capacity}")
        if place.start is not None:
            self.key_bmsd[:, :, place.start : place.start + t] = key_bmtd
            self.value_bmsd[:, :, place.start : place.start + t] = value_bmtd
            return
        rows = torch.arange(key_bmtd.shape[0], device=key_bmtd.device).unsqueeze(1)
        self.key_bmsd[rows, :, place.positions_bt] = key_bmtd.transpose(1, 2)
        self.value_bmsd[rows, :, place.positions_bt] = value_bmtd.transpose(1, 2)

    def up_to(self, limit: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of the first `limit` tokens, views [b, m, limit, d]."""
        return self.key_bmsd[:, :, :limit], self.value_bmsd[:, :, :limit]

    def rows(self, index: Tensor | slice) -> KvCache:
        """The given batch rows: a view for a slice, a copy for int64 indices."""
        return KvCache(self.key_bmsd[index], self.value_bmsd[index])


@dataclass
class DeltaState:
    """One DeltaNet layer: fp32 state [b, h, k, v] and the last K-1 convolution inputs [b, j, c].

    record, extended: of the last call with snapshots, until it is committed.
    """

    state_bhkv: Tensor
    tail_bjc: Tensor
    record: DeltaRecord | None = None
    extended: Tensor | None = None

    def commit(self, keep_b: Tensor) -> None:
        """Advance by the first keep[b] tokens of the recorded call."""
        if self.record is None or self.extended is None:
            raise ValueError("nothing to commit: the last call took no snapshots")
        self.record.commit(self.state_bhkv, keep_b)
        self.tail_bjc.copy_(tail_after(self.extended, self.tail_bjc.shape[1], keep_b))
        self.record = self.extended = None

    def rows(self, index: Tensor | slice) -> DeltaState:
        return DeltaState(self.state_bhkv[index], self.tail_bjc[index])


def tail_after(extended_btc: Tensor, taps: int, count_b: Tensor | None) -> Tensor:
    """The `taps` inputs before the next token, [b, taps, c].

    extended: `taps` earlier inputs, then the call's; count: valid tokens of the call per row, None
    for all.
    """
    if count_b is None:
        return extended_btc[:, extended_btc.shape[1] - taps :]
    index = count_b.unsqueeze(1) + torch.arange(taps, device=count_b.device)
    return extended_btc.gather(1, index.unsqueeze(-1).expand(-1, -1, extended_btc.shape[2]))


class TargetState:
    """The target's memory for a batch of rows, each with its own length."""

    def __init__(self, layers: list[KvCache | DeltaState], lengths: list[int]) -> None:
        self.layers = layers
        self.lengths = lengths
        self.pending: list[int] | None = None

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def length_b(self) -> Tensor:
        """int64 [b]: committed tokens of each row (CPU)."""
        return torch.tensor(self.lengths, dtype=torch.int64)

    def commit(self, keep_b: Sequence[int] | Tensor) -> None:
        """After forward(snapshots=True): keep the first keep[b] tokens of that call, exactly.

        Raises: ValueError without such a call, or when more is kept than was appended.
        """
        keep = [int(k) for k in keep_b]
        if self.pending is None or len(keep) != self.batch:
            raise ValueError("commit needs a forward with snapshots and one count per row")
        if any(not 0 <= k <= p for k, p in zip(keep, self.pending, strict=True)):
            raise ValueError(f"cannot keep {keep} of {self.pending} appended tokens")
        kept: Tensor | None = None
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                if kept is None:
                    kept = torch.tensor(keep, device=layer.state_bhkv.device)
                layer.commit(kept)
        self.lengths = [n + k for n, k in zip(self.lengths, keep, strict=True)]
        self.pending = None

    def rows(self, start: int, stop: int) -> TargetState:
        """Rows start..stop-1 as a state that shares memory; its lengths are a copy."""
        part = slice(start, stop)
        return TargetState([layer.rows(part) for layer in self.layers], self.lengths[part])

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keep only the given rows, in that order (drops what the others hold)."""
        if self.pending is not None:
            raise ValueError("commit before selecting rows")
        index = [int(r) for r in rows]
        for i, layer in enumerate(self.layers):
            device = (layer.key_bmsd if isinstance(layer, KvCache) else layer.state_bhkv).device
            self.layers[i] = layer.rows(torch.tensor(index, dtype=torch.int64, device=device))
        self.lengths = [self.lengths[r] for r in index]
