"""Teacher-forced passes over traffic: final hidden states and taps of every position, by chunks.

Does: sort sequences by length, cut them into padded chunks of bounded size, run the target over
each, keep the result in memory when it fits, so that several drafters share one pass. Does not:
draft (see `replay`) or sum (see `capture`).

Inputs: a target, a `Traffic`. Outputs: `Chunk`s.

Invariant: a row's states are those of its sequence alone (right padding is never seen); which
chunks there are depends on the traffic and `chunk_tokens` only.

Axes: b sequence of a chunk, t position, h hidden, g taps concatenated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from artifacts.errors import TrimtabError
from calibration.traffic import Progress, Traffic

if TYPE_CHECKING:
    from artifacts.runtime.target import Target

CHUNK_TOKENS = 16384
KEEP_BYTES = 400_000_000


@dataclass(frozen=True)
class Chunk:
    """Some sequences (prompt and output, end to end), padded on the right with id 0.

    Attributes:
        rows: index of each sequence in the traffic.
        ids_bt: int64.
        lengths_b: int64, tokens of each sequence.
        prompts_b: int64, tokens of each prompt; the first output token stands at that position.
        hidden_bth: the target's states after the final norm.
        taps_btg: block outputs at the tap ids, ascending, end to end; None without tap ids.
    """

    rows: list[int]
    ids_bt: torch.Tensor
    lengths_b: torch.Tensor
    prompts_b: torch.Tensor
    hidden_bth: torch.Tensor
    taps_btg: torch.Tensor | None

    def positions_t(self) -> torch.Tensor:
        """int64 0..t-1."""
        return torch.arange(self.ids_bt.shape[1], device=self.ids_bt.device)

    def valid_bt(self) -> torch.Tensor:
        """bool [b, t]: positions that hold a token."""
        return self.positions_t() < self.lengths_b[:, None]

    def processed_bt(self) -> torch.Tensor:
        """bool [b, t]: positions that serving has processed when it stops: all but the last."""
        return self.positions_t() < self.lengths_b[:, None] - 1

    def answering_bt(self) -> torch.Tensor:
        """bool [b, t]: positions whose next token is an output token."""
        return self.processed_bt() & (self.positions_t() >= self.prompts_b[:, None] - 1)


class TeacherForced:
    """The target's states over a traffic, computed once and shared.

    Args:
        target: with dtype float32 for acceptance; bf16 states tie and differ.
        traffic: at least one sequence; each prompt has at least one token.
        tap_ids: ascending 0-based layer outputs to keep beside the hidden states.
        chunk_tokens: padded tokens of a chunk at most (a longer sequence is a chunk of its own).
        keep_bytes: keep all chunks when they fit into this, else compute them at each iteration.
        progress: called with sequences done and in all, at each computed chunk.
    """

    def __init__(
        self,
        target: Target,
        traffic: Traffic,
        *,
        tap_ids: tuple[int, ...] = (),
        chunk_tokens: int = CHUNK_TOKENS,
        keep_bytes: int = KEEP_BYTES,
        progress: Progress | None = None,
    ) -> None:
        if not len(traffic):
            raise TrimtabError(f"traffic of {traffic.prompts.name!r} holds no sequences")
        empty = [
            e.id
            for e, p, o in zip(
                traffic.prompts.entries, traffic.prompts.ids, traffic.outputs, strict=True
            )
            if not p or not o
        ]
        if empty:
            raise TrimtabError(f"traffic: prompt {empty[0]!r} has no prompt or no output tokens")
        self.target = target
        self.traffic = traffic
        self.tap_ids = tap_ids
        pairs = zip(traffic.prompts.ids, traffic.outputs, strict=True)
        self.plan = _plan([len(p) + len(o) for p, o in pairs], chunk_tokens)
        self._progress = progress
        width = target.config.hidden_size * (1 + len(tap_ids))
        padded = sum(len(rows) * longest for rows, longest in self.plan)
        itemsize = torch.empty(0, dtype=target.dtype).element_size()
        self.kept = padded * width * itemsize <= keep_bytes
        self._chunks: list[Chunk] = []

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks of growing length; computed at the first pass, kept if they fit."""
        if len(self._chunks) == len(self.plan):
            yield from self._chunks
            return
        self._chunks = []
        done = 0
        for rows, longest in self.plan:
            chunk = self._compute(rows, longest)
            if self.kept:
                self._chunks.append(chunk)
            done += len(rows)
            if self._progress is not None:
                self._progress(done, len(self.traffic))
            yield chunk

    @torch.no_grad()
    def _compute(self, rows: list[int], longest: int) -> Chunk:
        prompts, outputs = self.traffic.prompts.ids, self.traffic.outputs
        ids_bt = torch.zeros(len(rows), longest, dtype=torch.int64)
        for b, row in enumerate(rows):
            sequence = prompts[row] + outputs[row]
            ids_bt[b, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        lengths = [len(prompts[r]) + len(outputs[r]) for r in rows]
        device = self.target.device
        ids_bt = ids_bt.to(device)
        out = self.target.forward(ids_bt, lengths_b=lengths, tap_ids=self.tap_ids)
        return Chunk(
            rows=rows,
            ids_bt=ids_bt,
            lengths_b=torch.tensor(lengths, device=device),
            prompts_b=torch.tensor([len(prompts[r]) for r in rows], device=device),
            hidden_bth=out.hidden_bth,
            taps_btg=out.taps_bth,
        )


def _plan(sizes: list[int], chunk_tokens: int) -> list[tuple[list[int], int]]:
    """Rows and longest length of each chunk, sequences sorted by length, then by row."""
    order = sorted(range(len(sizes)), key=lambda r: (sizes[r], r))
    plan: list[tuple[list[int], int]] = []
    current: list[int] = []
    for row in order:
        if current and (len(current) + 1) * sizes[row] > chunk_tokens:
            plan.append((current, sizes[current[-1]]))
            current = []
        current.append(row)
    plan.append((current, sizes[current[-1]]))
    return plan
