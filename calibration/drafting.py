"""Drafts at many anchors at once, judged against known continuations.

Does: for the sequences of one chunk, place anchors where greedy draft-and-verify would, draft at
all current anchors in one batch, count how many drafts equal the continuation, move on. Does not:
aggregate (see `replay`), sum Hessians (see `capture`), or decode for real (`artifacts.runtime`).

Inputs: a teacher-forced `Chunk`, a drafter or an MTP head. Output: `Step`s.

Invariant: an anchor's drafts depend on its sequence up to the anchor only, exactly as in decoding:
context rows before the anchor, MTP rows up to the anchor's own.

Positions: a sequence is x_0 .. x_{n-1}. The anchor at position p is the last committed token; its
drafts 1..s are for positions p+1..p+s. Accepting a of them commits those and the target's own token
after them, which is the next anchor: p + a + 1. The first output token is the first anchor.

Axes: b sequence of the chunk, a anchor, s draft, t position, h hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from calibration.teacher_forced import Chunk

if TYPE_CHECKING:
    from artifacts.runtime.dflash import Drafter
    from artifacts.runtime.draft_head import DraftHead
    from artifacts.runtime.mtp import MtpHead

NO_TOKEN = -1  # stands where a sequence has ended; equal to no draft


@dataclass(frozen=True)
class Step:
    """One round of drafting, at one anchor of each sequence that goes on.

    Attributes:
        rows_a: int64, the anchor's sequence in the chunk.
        positions_a: int64, the anchor's position.
        accepted_a: int64, leading drafts that equal the continuation.
        known_a: int64, drafts that the continuation is long enough to judge.
    """

    rows_a: torch.Tensor
    positions_a: torch.Tensor
    accepted_a: torch.Tensor
    known_a: torch.Tensor


class Drafts(Protocol):
    """What drafts at anchors of one chunk."""

    size: int

    def accept(
        self, rows_a: torch.Tensor, positions_a: torch.Tensor, truth_as: torch.Tensor
    ) -> torch.Tensor:
        """How many leading drafts of each anchor equal `truth_as` (`NO_TOKEN` after the end)."""
        ...


@torch.no_grad()
def walk(chunk: Chunk, drafts: Drafts, *, limit: int | None = None) -> Iterator[Step]:
    """Draft and verify along the chunk's continuations, all sequences side by side.

    Args:
        limit: start no step once this many output tokens are committed; None goes to the end. With
            continuations longer than that by `drafts.size`, the last step is judged in full.
    """
    position_b = chunk.prompts_b.clone()
    end_b = chunk.lengths_b - 1  # an anchor needs a token after it
    if limit is not None:
        end_b = torch.minimum(end_b, chunk.prompts_b + limit - 1)
    ahead_s = torch.arange(1, drafts.size + 1, device=position_b.device)
    while True:
        rows_a = (position_b < end_b).nonzero().squeeze(1)
        if not len(rows_a):
            return
        positions_a = position_b[rows_a]
        at_as = positions_a[:, None] + ahead_s
        known_as = at_as < chunk.lengths_b[rows_a, None]
        last = chunk.ids_bt.shape[1] - 1
        truth_as = chunk.ids_bt[rows_a[:, None], at_as.clamp(max=last)]
        truth_as = truth_as.masked_fill(~known_as, NO_TOKEN)
        accepted_a = drafts.accept(rows_a, positions_a, truth_as)
        yield Step(rows_a, positions_a, accepted_a, known_as.sum(1))
        position_b[rows_a] = positions_a + accepted_a + 1


def leading_matches(tokens_as: torch.Tensor, truth_as: torch.Tensor) -> torch.Tensor:
    """How many leading entries of each row agree; int64 [a]."""
    return (tokens_as == truth_as).long().cumprod(dim=1).sum(dim=1)


class DFlashDrafts:
    """Greedy blocks of a DFlash or DFlash2 drafter.

    Args:
        drafter: the runtime's drafter.
        chunk: with taps at the drafter's tap ids.
        mode: "walk" for the drafter's own greedy choice (DFlash2: along the selector), "argmax" for
            the best token of each row by itself.
        draftable_v: bool [v], ids that may be drafted; None for all.
    """

    def __init__(
        self,
        drafter: Drafter,
        chunk: Chunk,
        mode: str = "walk",
        draftable_v: torch.Tensor | None = None,
    ) -> None:
        if mode not in ("walk", "argmax"):
            raise ValueError(f"mode {mode!r} is neither 'walk' nor 'argmax'")
        if chunk.taps_btg is None:
            raise ValueError("this teacher-forced pass kept no taps")
        self.size = drafter.block_size - 1
        self._drafter = drafter
        self._ids_bt = chunk.ids_bt
        self._mode = mode
        self._draftable_v = draftable_v
        features_bth = drafter.fuse(chunk.taps_btg)
        self._context = drafter.context(features_bth, chunk.lengths_b)

    def accept(
        self, rows_a: torch.Tensor, positions_a: torch.Tensor, truth_as: torch.Tensor
    ) -> torch.Tensor:
        anchors_a = self._ids_bt[rows_a, positions_a]
        hidden_ash = self._drafter.block(anchors_a, positions_a, self._context, rows=rows_a)
        if self._mode == "argmax":
            tokens_as = self._drafter.head.argmax(hidden_ash, self._draftable_v)
        else:
            draft = self._drafter.walk(anchors_a, hidden_ash, allowed_ids=self._draftable_v)
            tokens_as = draft.tokens_bs
        return leading_matches(tokens_as, truth_as)


class MtpDrafts:
    """Greedy chains of the MTP head.

    Row t of the head reads token x_{t+1} and the target's state h_t; the anchor at p drafts from
    row p - 1. Rows up to there come from one teacher-forced pass of the head over the chunk.

    Args:
        depth: drafts a chain, 1 or more.
        draft_head: a reduced head; None for the full one.
        draftable_v: bool [v], ids that may be drafted; None for all.
        every_row: go on with chains that have left the continuation, as serving does; otherwise
            they are dropped, which changes no count and saves time.
    """

    def __init__(
        self,
        mtp: MtpHead,
        chunk: Chunk,
        depth: int,
        draft_head: DraftHead | None = None,
        *,
        draftable_v: torch.Tensor | None = None,
        every_row: bool = False,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth {depth} is below 1")
        self.size = depth
        self._mtp = mtp
        self._head = draft_head or mtp.head
        self._draftable_v = draftable_v
        self._every_row = every_row
        self._z_bth, self._kv = mtp.teacher_forced(chunk.ids_bt, chunk.hidden_bth, chunk.lengths_b)

    def accept(
        self, rows_a: torch.Tensor, positions_a: torch.Tensor, truth_as: torch.Tensor
    ) -> torch.Tensor:
        accepted_a = torch.zeros_like(rows_a)
        alive_a = torch.arange(len(rows_a), device=rows_a.device)
        on_track_a = torch.ones_like(rows_a, dtype=torch.bool)
        z_ah = self._z_bth[rows_a, positions_a - 1]
        tokens_a = self._head.argmax(z_ah, self._draftable_v)
        entries: list[tuple[torch.Tensor, torch.Tensor]] = []
        for s in range(self.size):
            on_track_a &= tokens_a == truth_as[alive_a, s]
            accepted_a[alive_a] += on_track_a
            if s + 1 == self.size or not (self._every_row or bool(on_track_a.any())):
                break
            if not self._every_row:
                alive_a, z_ah, tokens_a = (x[on_track_a] for x in (alive_a, z_ah, tokens_a))
                entries = [(key[on_track_a], value[on_track_a]) for key, value in entries]
                on_track_a = on_track_a[on_track_a]
            z_ah = self._mtp.chain(
                self._kv, rows_a[alive_a], positions_a[alive_a] - 1, z_ah, tokens_a, entries
            )
            tokens_a = self._head.argmax(z_ah, self._draftable_v)
        return accepted_a
