"""Drafting from the request's own history by suffix match, alone or joined with a drafter.

Axes: b requests, s the drafter's positions, m looked-up tokens, k candidates.
Covers the match, its continuation, and `fuse`, which decides by request whether looked-up tokens
replace the drafter's (head) or follow them (tail). Does not cover verification.
Invariant (what keeps sampling lossless): a looked-up token is a point mass, and no decision about
what is stored as q at a position looks at the token drawn there or later. The head is decided by
the match length alone; the tail by whether all of the drafter's tokens agree with the match, whose
rows keep the drafter's q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts.errors import TrimtabError
from artifacts.runtime.proposal import Proposal, as_candidates


@dataclass(frozen=True, kw_only=True)
class LookupConfig:
    """Lengths in tokens. `strong_match`: the shortest match that replaces the drafter (or drafts,
    when there is none); `tail_match`: the shortest that may follow it; `longest_match`: where
    comparing stops; `tokens`: looked-up tokens per step, the head included."""

    strong_match: int = 6
    tail_match: int = 4
    longest_match: int = 12
    tokens: int = 15

    def __post_init__(self) -> None:
        if not 1 <= self.tail_match <= self.strong_match <= self.longest_match or self.tokens < 1:
            raise TrimtabError(
                "lookup: 1 <= tail_match <= strong_match <= longest_match and tokens >= 1 "
                f"must hold, got {self}"
            )


@dataclass(frozen=True)
class Match:
    """length: matching suffix tokens (0: none); tokens: what followed the earlier occurrence."""

    length: int
    tokens: tuple[int, ...]


class SuffixLookup:
    """One request's history with an index of its n-grams of the shortest usable length."""

    def __init__(self, config: LookupConfig) -> None:
        self.config = config
        self.history: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        n = self.config.tail_match
        for token in tokens:
            self.history.append(token)
            if len(self.history) >= n:
                key = tuple(self.history[-n:])
                self._ends.setdefault(key, []).append(len(self.history))

    def match(self) -> Match:
        """The most recent earlier occurrence of the longest suffix, and what followed it.

        A continuation that reaches the end of the history goes on with its own tokens, so that
        periodic text is continued periodically.
        """
        config, history = self.config, self.history
        if len(history) <= config.tail_match:
            return Match(0, ())
        ends = self._ends.get(tuple(history[-config.tail_match :]), [])
        best, where = 0, 0
        for end in reversed(ends[:-1]):
            length = config.tail_match
            while (
                length < min(config.longest_match, end)
                and history[end - 1 - length] == history[-1 - length]
            ):
                length += 1
            if length > best:
                best, where = length, end
            if best == config.longest_match:
                break
        if not best:
            return Match(0, ())
        copied = history[where : where + config.tokens]
        while len(copied) < config.tokens:
            copied.append(copied[len(copied) - (len(history) - where)])
        return Match(best, tuple(copied))


def fuse(
    draft: Proposal, match_b: Tensor, looked_up_bm: Tensor, config: LookupConfig, vocab_size: int
) -> Proposal:
    """Join a drafter's proposal of s tokens with m looked-up tokens per request.

    Args:
        draft: tokens [b, s] and their q.
        match_b: int64 match lengths, 0 for none.
        looked_up_bm: int64 continuations, -1 where there is none.

    Returns: a proposal of max(s, m) positions. Match >= strong_match: looked-up tokens everywhere,
    as point masses. Else the drafter's rows with their q, followed by looked-up tokens if match >=
    tail_match and all s drafted tokens equal the looked-up ones. Other positions are -1.
    """
    b, s = draft.tokens_bs.shape
    m = looked_up_bm.shape[1]
    width = max(s, m)
    looked = torch.full((b, width), -1, dtype=torch.int64, device=looked_up_bm.device)
    looked[:, :m] = looked_up_bm
    drafted = torch.full_like(looked, -1)
    drafted[:, :s] = draft.tokens_bs
    head_b = match_b >= config.strong_match
    agrees_b = (drafted[:, :s] == looked[:, :s]).all(1) & (match_b >= config.tail_match)
    position = torch.arange(width, device=looked.device)
    use = head_b.unsqueeze(1) | (agrees_b.unsqueeze(1) & (position >= s))
    tokens = torch.where(use, looked, drafted)
    if draft.q_bsk is None:
        return Proposal(tokens_bs=tokens)
    ids, q = as_candidates(draft, vocab_size)
    all_ids = torch.full((b, width, ids.shape[2]), -1, dtype=torch.int64, device=ids.device)
    all_q = torch.zeros(b, width, ids.shape[2], dtype=q.dtype, device=q.device)
    all_ids[:, :s], all_q[:, :s] = ids, q
    point = torch.zeros_like(all_q)
    point[..., 0] = (looked >= 0).to(q.dtype)
    single = torch.full_like(all_ids, -1)
    single[..., 0] = looked
    return Proposal(
        tokens_bs=tokens,
        q_bsk=torch.where(use.unsqueeze(-1), point, all_q),
        cand_ids_bsk=torch.where(use.unsqueeze(-1), single, all_ids),
        temperature_applied=draft.temperature_applied,
    )
