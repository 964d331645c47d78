"""The drafting methods as step-by-step state machines for one request.

Axes: b = 1 request, t tokens, s draft positions, h hidden, v vocabulary.
Covers what each method keeps between steps, how it proposes, and how it takes in what was
committed. Does not cover verification or the loop (`decode`). In: the target's hidden states and
taps of committed rows. Out: `Proposal`.
Invariant: `observe_rows` is called once for every committed row, also when another method's tokens
won, so a drafter's cache is never stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from artifacts.runtime.dflash import Drafter
from artifacts.runtime.lookup import LookupConfig, SuffixLookup, fuse
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.noise import Noise
from artifacts.runtime.proposal import Proposal, point_mass
from artifacts.runtime.sampling import SamplingParams
from artifacts.runtime.selector import chained_rows
from artifacts.runtime.target import TargetOutput


class Drafting(Protocol):
    """One request's drafter. `tap_ids`: target layers it reads; `width`: most tokens it drafts."""

    tap_ids: tuple[int, ...]
    width: int

    def start(self, capacity: int) -> None:
        """Forget everything; at most `capacity` tokens follow."""
        ...

    def observe_rows(self, ids: Sequence[int], next_ids: Sequence[int], out: TargetOutput) -> None:
        """Take in committed rows: their tokens, the token after each, and the target's output.

        out holds at least len(ids) rows; only the first ones count.
        """
        ...

    def propose(self, anchor: int, params: SamplingParams, noise: Noise | None) -> Proposal:
        """Draft what follows the last committed token. noise None: greedy."""
        ...


class MtpDrafting:
    """Chained MTP: depth 1 from the refreshed rows, then the head's own z, depth tokens in all."""

    def __init__(self, mtp: MtpHead, depth: int, allowed_v: Tensor | None = None) -> None:
        self.mtp = mtp
        self.width = depth
        self.tap_ids: tuple[int, ...] = ()
        self.allowed_v = allowed_v
        self.start(1)

    def start(self, capacity: int) -> None:
        self.state = self.mtp.new_state(1, capacity + self.width)
        self.z: Tensor | None = None

    def observe_rows(self, ids: Sequence[int], next_ids: Sequence[int], out: TargetOutput) -> None:
        following = torch.tensor([list(next_ids)], dtype=torch.int64)
        z = self.mtp.forward(following, out.hidden_bth[:, : len(next_ids)], self.state)
        self.z = z[:, -1:]

    def propose(self, anchor: int, params: SamplingParams, noise: Noise | None) -> Proposal:
        if self.z is None:
            raise ValueError("propose before any committed row")
        rows = list(self.state.lengths)
        z = self.z

        def logits() -> Tensor:
            return self.mtp.head.allowed(self.mtp.head.logits(z[:, 0]), self.allowed_v)

        def advance(tokens_b: Tensor) -> Tensor:
            nonlocal z
            z = self.mtp.forward(tokens_b.unsqueeze(1), z, self.state)
            return logits()

        uniforms = None if noise is None else noise.uniforms(1, self.width)
        proposal = chained_rows(
            logits(), advance, self.width, self.mtp.head.all_ids(), params, uniforms
        )
        self.state.truncate(rows)
        return proposal


class BlockDrafting:
    """DFlash or DFlash2: one block per step from the context of committed tokens."""

    def __init__(self, drafter: Drafter, allowed_v: Tensor | None = None) -> None:
        self.drafter = drafter
        self.width = drafter.block_size - 1
        self.tap_ids = drafter.tap_ids
        self.allowed_v = allowed_v
        self.start(1)

    def start(self, capacity: int) -> None:
        self.context = self.drafter.new_context(1, capacity)

    def observe_rows(self, ids: Sequence[int], next_ids: Sequence[int], out: TargetOutput) -> None:
        if out.taps_bth is None:
            raise ValueError("a block drafter needs the target's taps")
        self.drafter.extend(self.context, self.drafter.fuse(out.taps_bth[:, : len(ids)]))

    def propose(self, anchor: int, params: SamplingParams, noise: Noise | None) -> Proposal:
        anchor_b = torch.tensor([anchor], dtype=torch.int64)
        hidden = self.drafter.block(anchor_b, list(self.context.lengths), self.context)
        if noise is None:
            return self.drafter.walk(anchor_b, hidden, allowed_ids=self.allowed_v)
        return self.drafter.walk(
            anchor_b,
            hidden,
            params.temperature,
            noise.uniforms(1, self.width),
            self.allowed_v,
        )


class LookupDrafting:
    """Suffix match in the request's own history, alone (`inner` None) or joined with a drafter."""

    def __init__(
        self, config: LookupConfig, vocab_size: int, inner: Drafting | None = None
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.inner = inner
        self.tap_ids = inner.tap_ids if inner else ()
        self.width = max(config.tokens, inner.width if inner else 0)
        self.start(1)

    def start(self, capacity: int) -> None:
        self.lookup = SuffixLookup(self.config)
        if self.inner:
            self.inner.start(capacity)

    def observe_rows(self, ids: Sequence[int], next_ids: Sequence[int], out: TargetOutput) -> None:
        if not self.lookup.history:
            self.lookup.extend(ids[:1])
        self.lookup.extend(next_ids)
        if self.inner:
            self.inner.observe_rows(ids, next_ids, out)

    def propose(self, anchor: int, params: SamplingParams, noise: Noise | None) -> Proposal:
        match = self.lookup.match()
        if self.inner is None:
            strong = match.length >= self.config.strong_match
            return point_mass(torch.tensor([match.tokens if strong else ()], dtype=torch.int64))
        draft = self.inner.propose(anchor, params, noise)
        device = draft.tokens_bs.device
        tokens = match.tokens or (-1,) * self.config.tokens
        return fuse(
            draft,
            torch.tensor([match.length], device=device),
            torch.tensor([tokens], device=device),
            self.config,
            self.vocab_size,
        )
