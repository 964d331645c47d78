"""Decoding of one request: draft, verify in one target pass, roll back, repeat.

Axes: b = 1 request, s draft positions, v vocabulary.
Covers the methods none, mtp, dflash, dflash2, lookup and dflash2+lookup, greedy and sampled, stop
ids inside a block, exact limits, and the statistics. Does not cover batches (`batch`) or text.
In: a prompt's ids. Out: `Step` objects as they are committed.
Invariant: lossless. Greedy output equals plain greedy decoding token for token in fp32, sampled
output follows the target's own law.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from artifacts.errors import TrimtabError
from artifacts.runtime.dflash import Drafter
from artifacts.runtime.drafting import BlockDrafting, Drafting, LookupDrafting, MtpDrafting
from artifacts.runtime.lookup import LookupConfig
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.noise import Noise
from artifacts.runtime.proposal import Proposal, point_mass
from artifacts.runtime.sampling import SamplingParams, process
from artifacts.runtime.state import TargetState
from artifacts.runtime.stats import Stats, Step
from artifacts.runtime.target import Target, TargetOutput
from artifacts.runtime.threads import decode_threads, threads
from artifacts.runtime.verify import verify_batch

if TYPE_CHECKING:
    from artifacts.runtime.build import Build

__all__ = ["METHODS", "Decoder", "Stats", "Step"]

METHODS = ("none", "mtp", "dflash", "dflash2", "lookup", "dflash2+lookup")


class Decoder:
    """A target with one drafting method.

    Args:
        method: one of METHODS; it is never guessed.
        mtp, drafter: what the method needs.
        depth: MTP tokens per step.
        lookup: settings of the suffix match.
        draftable: bool [v], ids that may be drafted (leave out the mask id and padding rows).
        drafting: a ready drafting object instead of a method's, for experiments and tests.
    Raises: TrimtabError for an unknown method, or one whose part is missing or of another kind.
    """

    def __init__(
        self,
        target: Target,
        method: str = "none",
        *,
        mtp: MtpHead | None = None,
        drafter: Drafter | None = None,
        depth: int = 4,
        lookup: LookupConfig | None = None,
        draftable: Tensor | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.target = target
        self.method = method
        self.stats = Stats()
        self.drafting = drafting or _drafting(
            target, method, mtp, drafter, depth, lookup or LookupConfig(), draftable
        )
        self._taps = self.drafting.tap_ids if self.drafting else ()
        self._threads = decode_threads(target)

    @classmethod
    def of(cls, build: Build, method: str, *, depth: int = 4) -> Decoder:
        """A decoder over a loaded build's parts; drafts only the build's draftable ids."""
        return cls(
            build.target,
            method,
            mtp=build.mtp,
            drafter=build.drafter,
            depth=depth,
            draftable=build.draftable,
        )

    def complete(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        max_new_tokens: int,
        seed: int = 0,
        stop_ids: Iterable[int] = (),
    ) -> list[int]:
        """All tokens of `generate` at once."""
        steps = self.generate(prompt_ids, params, max_new_tokens, seed, stop_ids)
        return [token for step in steps for token in step.tokens]

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        max_new_tokens: int,
        seed: int = 0,
        stop_ids: Iterable[int] = (),
    ) -> Iterator[Step]:
        """Yield steps until a stop id (given out, what follows it is dropped) or the limit.

        Raises: TrimtabError for an empty prompt or ids outside the vocabulary.
        """
        prompt = [int(i) for i in prompt_ids]
        wrong = [i for i in prompt if not 0 <= i < self.target.config.vocab_size]
        if not prompt or wrong:
            raise TrimtabError(
                f"prompt: id {wrong[0]} is outside the vocabulary" if wrong else "prompt: no tokens"
            )
        if max_new_tokens < 1:
            return
        request = _Request(self, prompt, params, max_new_tokens, seed, frozenset(stop_ids))
        step = request.prefill()
        while True:
            yield step
            if request.finished:
                return
            step = request.step()


class _Request:
    """The state of one generation."""

    def __init__(
        self,
        decoder: Decoder,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        seed: int,
        stops: frozenset[int],
    ) -> None:
        self.decoder = decoder
        self.target = decoder.target
        self.drafting = decoder.drafting
        self.prompt = prompt
        self.params = params
        self.left = limit
        self.stops = stops
        self.finished = False
        self.anchor = prompt[-1]
        width = self.drafting.width if self.drafting else 0
        self.capacity = len(prompt) + limit + width + 1
        device = self.target.device
        self.draft_noise = None if params.greedy else Noise(seed, "draft", device)
        self.accept_noise = None if params.greedy else Noise(seed, "accept", device)
        self.final_noise = None if params.greedy else Noise(seed, "final", device)
        self.state: TargetState = self.target.new_state(1, self.capacity)

    def prefill(self) -> Step:
        """Run the prompt and draw the first token."""
        began = time.perf_counter()
        with torch.no_grad():
            out = self.target.forward(
                torch.tensor([self.prompt]), self.state, tap_ids=self.decoder._taps
            )
            _, token = self._verified(_nothing(), out.hidden_bth[:, -1:])
            if self.drafting:
                self.drafting.start(self.capacity)
                self.drafting.observe_rows(self.prompt, [*self.prompt[1:], token], out)
        stats = self.decoder.stats
        stats.requests += 1
        stats.prefill_seconds += time.perf_counter() - began
        step = Step(self._given([token]), 0, 0)
        stats.tokens += len(step.tokens)
        return step

    def step(self) -> Step:
        """Draft, verify, commit."""
        began = time.perf_counter()
        with threads(self.decoder._threads), torch.no_grad():
            proposal = self._proposal()
            drafted = proposal.tokens_bs[0].tolist()
            ids = [self.anchor, *drafted]
            out = self._forward(ids)
            accepted, token = self._verified(proposal, out.hidden_bth)
            if drafted:
                self.state.commit([accepted + 1])
            new = [*drafted[:accepted], token]
            if self.drafting:
                self.drafting.observe_rows(ids[: accepted + 1], new, out)
        self.decoder.stats.seconds += time.perf_counter() - began
        step = Step(self._given(new), len(drafted), accepted)
        self.decoder.stats.count(step)
        return step

    def _proposal(self) -> Proposal:
        if self.drafting is None:
            return _nothing()
        return _trimmed(self.drafting.propose(self.anchor, self.params, self.draft_noise))

    def _forward(self, ids: list[int]) -> TargetOutput:
        return self.target.forward(
            torch.tensor([ids]), self.state, tap_ids=self.decoder._taps, snapshots=len(ids) > 1
        )

    def _verified(self, proposal: Proposal, hidden_bsh: Tensor) -> tuple[int, int]:
        """(accepted count, emitted token) of the proposal under the target's law."""
        p = process(self.target.logits(hidden_bsh), self.params)
        s = proposal.steps
        if self.accept_noise is None or self.final_noise is None:
            accept, final = p.new_full((1, s), 0.5), p.new_full((1,), 0.5)
        else:
            accept, final = self.accept_noise.uniforms(1, s), self.final_noise.uniforms(1)
        verdict = verify_batch(proposal.to(p.device), p, accept, final)
        return int(verdict.accepted_b), int(verdict.token_b)

    def _given(self, tokens: list[int]) -> tuple[int, ...]:
        """Cut at the first stop id and at the limit; note whether the request is finished."""
        self.anchor = tokens[-1]
        kept = tokens[: self.left]
        for i, token in enumerate(kept):
            if token in self.stops:
                kept = kept[: i + 1]
                self.finished = True
                break
        self.left -= len(kept)
        self.finished = self.finished or self.left == 0
        return tuple(kept)


def _nothing() -> Proposal:
    return point_mass(torch.zeros(1, 0, dtype=torch.int64))


def _trimmed(proposal: Proposal) -> Proposal:
    """Without the positions from the first undrafted (-1) on: they would reject for certain."""
    missing = (proposal.tokens_bs[0] < 0).nonzero()
    if not len(missing):
        return proposal
    s = int(missing[0])
    return replace(
        proposal,
        tokens_bs=proposal.tokens_bs[:, :s],
        q_bsk=None if proposal.q_bsk is None else proposal.q_bsk[:, :s],
        cand_ids_bsk=None if proposal.cand_ids_bsk is None else proposal.cand_ids_bsk[:, :s],
    )


def _drafting(
    target: Target,
    method: str,
    mtp: MtpHead | None,
    drafter: Drafter | None,
    depth: int,
    lookup: LookupConfig,
    draftable: Tensor | None,
) -> Drafting | None:
    if method not in METHODS:
        raise TrimtabError(f"draft method {method!r} is not one of {', '.join(METHODS)}")
    vocab = target.config.vocab_size
    if method == "none":
        return None
    if method == "mtp":
        if mtp is None or depth < 1:
            raise TrimtabError(
                f"method mtp needs a head (got {mtp}) and a depth >= 1 (got {depth})"
            )
        return MtpDrafting(mtp, depth, draftable)
    if method == "lookup":
        return LookupDrafting(lookup, vocab)
    if drafter is None:
        raise TrimtabError(f"method {method} needs a drafter; this build holds none")
    if (drafter.selector is None) != (method == "dflash"):
        raise TrimtabError(
            f"method {method} does not fit the drafter, which is a {drafter.config.architecture}"
        )
    block = BlockDrafting(drafter, draftable)
    return LookupDrafting(lookup, vocab, block) if method == "dflash2+lookup" else block
