"""Lossless verification of a drafted chain: rejection sampling with the exact q.

Axes: b independent draws (requests), s draft positions, v vocabulary, k candidates.
Covers one vectorized implementation, `verify_batch`, which decoding calls with b = 1 and the law
tests with b = 200,000. Does not cover drafting, nor where p comes from.
Rule (Leviathan et al. 2023; chain form): accept token d with probability min(1, p(d) / q(d)); at
the first rejection emit one token from max(p - q, 0), renormalised, and stop; after s acceptances
emit one from the last row. A point mass accepts with p(d) and its residual is p without d; greedy
is p = one-hot, where d is accepted exactly if it is the argmax.
Invariant: whatever q is, the output law is p's, provided that accept and residual noise is
independent of the draft noise and that q did not depend on the token drawn from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts.errors import TrimtabError
from artifacts.runtime.proposal import Proposal, as_candidates, point_mass
from artifacts.runtime.sampling import draw

__all__ = ["Proposal", "Verdict", "point_mass", "verify_batch"]


@dataclass(frozen=True)
class Verdict:
    """int64 [b] each: accepted draft tokens, and the one token emitted after them."""

    accepted_b: Tensor
    token_b: Tensor


def verify_batch(
    proposal: Proposal, p_bsv: Tensor, accept_u_bs: Tensor, final_u_b: Tensor
) -> Verdict:
    """Verify b chains of s drafted tokens.

    Args:
        proposal: tokens [b, s] and their q; a token of -1 always rejects and leaves the residual p.
        p_bsv: float64 target probabilities [b, s + 1, v] after all processing; row i is the law of
            the token at draft position i given the drafted tokens before it.
        accept_u_bs, final_u_b: float64 uniforms in [0, 1), independent of the draft's.

    Raises: TrimtabError for a q that is not the one the tokens were drawn from (temperature not
        applied, or no probability at a drafted token).
    """
    if not proposal.temperature_applied:
        raise TrimtabError(
            "verify: the proposal's q is from before temperature; the output law would be wrong",
            hint="hand over the probabilities that the draft was drawn from",
        )
    tokens = proposal.tokens_bs
    s = tokens.shape[1]
    if s == 0:
        return Verdict(torch.zeros_like(final_u_b, dtype=torch.int64), draw(p_bsv[:, 0], final_u_b))
    ids, q = as_candidates(proposal, p_bsv.shape[-1])
    drafted = tokens >= 0
    q_d = torch.where(ids == tokens.unsqueeze(-1), q, 0.0).sum(-1)
    if bool((drafted & (q_d <= 0)).any()):
        raise TrimtabError("verify: a drafted token has no probability in the q it came with")
    p_d = p_bsv[:, :s].gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    accept = drafted & (accept_u_bs * q_d < p_d)
    accepted = accept.long().cumprod(dim=1).sum(dim=1)
    return Verdict(accepted, draw(_residual(p_bsv, ids, q, accepted), final_u_b))


def _residual(p_bsv: Tensor, ids_bsk: Tensor, q_bsk: Tensor, accepted_b: Tensor) -> Tensor:
    """max(p - q, 0) at the first rejected position, p itself after the last; not normalised.

    `draw` scales by the total. Where p and q agree to rounding nothing is left; a rejection there
    has a probability of rounding, too, and falls back to p.
    """
    b, s = ids_bsk.shape[:2]
    row = torch.arange(b, device=p_bsv.device)
    at = accepted_b.clamp(max=s - 1)
    q = torch.where((accepted_b < s).unsqueeze(1), q_bsk[row, at], 0.0)
    ids = ids_bsk[row, at]
    q = torch.where(ids >= 0, q, 0.0)
    p = p_bsv[row, accepted_b]
    left = p.scatter_add(1, ids.clamp(min=0), -q).clamp_(min=0.0)
    return torch.where(left.sum(1, keepdim=True) > 0, left, p)
