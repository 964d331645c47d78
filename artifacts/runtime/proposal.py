"""What a drafter hands to the verifier: the drafted tokens and the exact q each was drawn from.

Axes: b draws (requests), s draft positions, k candidates, v vocabulary.
Covers the object itself. Does not cover drafting or verifying. Invariant: `q_bsk` holds the very
numbers that the draw used, after all processing; nothing downstream computes a q of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens and their proposal law.

    tokens_bs: int64 target ids; -1 for a position that is not drafted, which always rejects.
    q_bsk: float64 probabilities of the conditional law each token was drawn from, given the drafted
        tokens before it; None: a point mass on the token at every position.
    cand_ids_bsk: int64 target ids of q's columns, None: column = target id. A padding column has
        id -1 and probability 0.
    temperature_applied: whether q is the law after temperature; the verifier takes no other.
    """

    tokens_bs: Tensor
    q_bsk: Tensor | None = None
    cand_ids_bsk: Tensor | None = None
    temperature_applied: bool = True

    @property
    def steps(self) -> int:
        """Draft positions."""
        return self.tokens_bs.shape[1]

    def to(self, device: torch.device | str) -> Proposal:
        """The same proposal on another device."""
        return replace(
            self,
            tokens_bs=self.tokens_bs.to(device),
            q_bsk=None if self.q_bsk is None else self.q_bsk.to(device),
            cand_ids_bsk=None if self.cand_ids_bsk is None else self.cand_ids_bsk.to(device),
        )


Draft = Proposal


def point_mass(tokens_bs: Tensor) -> Proposal:
    """A proposal drawn without noise: q is 1 at each token."""
    return Proposal(tokens_bs=tokens_bs)


def as_candidates(proposal: Proposal, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(cand_ids [b, s, k], q [b, s, k]) whatever the form: one column for a point mass."""
    if proposal.q_bsk is None:
        tokens = proposal.tokens_bs.unsqueeze(-1)
        return tokens, (tokens >= 0).to(torch.float64)
    if proposal.cand_ids_bsk is None:
        ids = torch.arange(vocab_size, device=proposal.q_bsk.device)
        return ids.expand(proposal.q_bsk.shape), proposal.q_bsk
    return proposal.cand_ids_bsk, proposal.q_bsk
