"""How drafters choose tokens: the selector's walk, independent rows, a chain; and DFlash2's conv.

Axes: b requests, s draft positions, k candidates, r selector rank, v vocabulary, i block rows,
h hidden, g convolution groups, x side (0 before the sublayer, 1 after), j taps.
Covers the grouped dynamic convolution, the walk over candidates, and its counterparts for DFlash
v1, whose positions are independent, and for MTP, whose next logits need the token just drafted.
Does not cover layers or heads (`dflash`, `mtp`).
Source: vLLM 0.33 `qwen3_dflash2.py` and its speculator. Invariant: the tokens handed out were drawn
from the q handed out, by the uniforms handed in and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts.runtime.linear import Linear
from artifacts.runtime.proposal import Proposal
from artifacts.runtime.sampling import SamplingParams, draw, process


@dataclass
class DynamicConv:
    """Grouped dynamic depthwise convolution along a block, both sides of one sublayer.

    base_xjh: fp32 [2, taps, h]; projection: the Linear from the sublayer's normed input to the
    coefficients, rows ordered side, tap, group.
    """

    base_xjh: Tensor
    projection: Linear
    group: int

    def coefficients(self, x_bih: Tensor) -> Tensor:
        """[2, b, i, taps, h/group, group] from the sublayer's layernormed input; base included."""
        taps, h = self.base_xjh.shape[1:]
        groups = h // self.group
        b, i = x_bih.shape[:2]
        d = self.projection(x_bih).view(b, i, 2, taps, groups, 1).movedim(2, 0)
        return d + self.base_xjh.to(d.dtype).view(2, 1, 1, taps, groups, self.group)

    @staticmethod
    def apply(u_bih: Tensor, kernel: Tensor) -> Tensor:
        """sum_j kernel[j] * u[row - j], rows before the block's first being zero.

        kernel: one side's [b, i, taps, h/group, group].
        """
        b, i, h = u_bih.shape
        grouped = u_bih.view(b, i, kernel.shape[3], kernel.shape[4])
        out = kernel[:, :, 0] * grouped
        for j in range(1, min(kernel.shape[2], i)):
            out[:, j:] += kernel[:, j:, j] * grouped[:, :-j]
        return out.view(b, i, h)


def selector_walk(
    anchor_b: Tensor,
    cand_ids_bsk: Tensor,
    unary_bsk: Tensor,
    gate_bsr: Tensor,
    predecessor_vr: Tensor,
    successor_vr: Tensor,
    *,
    temperature: float = 0.0,
    uniforms_bs: Tensor | None = None,
) -> Proposal:
    """Walk over the candidates of each position, each choice conditioned on the one before.

    score_l(c) = unary_l[c] + sum_r predecessor[prev, r] gate_l[r] successor[c, r], prev being the
    anchor at l = 0, in fp32. Temperature 0: argmax at each step (the first of equals) and a point
    mass; else the token is drawn by uniforms_bs (float64 in [0, 1)) from softmax(score / T).
    A candidate of unary -inf is never chosen. Returns tokens, candidate ids and q.
    """
    previous = anchor_b
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    for step in range(cand_ids_bsk.shape[1]):
        cand = cand_ids_bsk[:, step]
        left = predecessor_vr[previous].float() * gate_bsr[:, step].float()
        edge = torch.matmul(successor_vr[cand].float(), left.unsqueeze(-1)).squeeze(-1)
        scores = unary_bsk[:, step].float() + edge
        if temperature > 0:
            if uniforms_bs is None:
                raise ValueError("a sampled walk needs uniforms")
            law = (scores.double() / temperature).softmax(dim=-1)
            chosen = draw(law, uniforms_bs[:, step])
            laws.append(law)
        else:
            chosen = scores.argmax(dim=-1)
        previous = cand.gather(1, chosen.unsqueeze(1)).squeeze(1)
        tokens.append(previous)
    return Proposal(
        tokens_bs=torch.stack(tokens, dim=1),
        q_bsk=torch.stack(laws, dim=1) if laws else None,
        cand_ids_bsk=cand_ids_bsk,
    )


def independent_rows(
    logits_bsn: Tensor,
    target_ids_n: Tensor | None,
    *,
    temperature: float = 0.0,
    uniforms_bs: Tensor | None = None,
) -> Proposal:
    """Each position by itself: argmax, or a draw from softmax(logits / T) over the draft rows.

    target_ids_n: target id of each column, None: column = id.
    """
    if temperature > 0:
        if uniforms_bs is None:
            raise ValueError("sampled rows need uniforms")
        law = (logits_bsn.double() / temperature).softmax(dim=-1)
        chosen = draw(law, uniforms_bs)
    else:
        law, chosen = None, logits_bsn.argmax(dim=-1)
    if target_ids_n is None:
        return Proposal(tokens_bs=chosen, q_bsk=law)
    ids = None if law is None else target_ids_n.expand(law.shape)
    return Proposal(tokens_bs=target_ids_n[chosen], q_bsk=law, cand_ids_bsk=ids)


def chained_rows(
    logits_bn: Tensor,
    advance: Callable[[Tensor], Tensor],
    steps: int,
    target_ids_n: Tensor | None,
    params: SamplingParams,
    uniforms_bs: Tensor | None,
) -> Proposal:
    """A chain of `steps` tokens, each from logits that follow the one before.

    Args:
        logits_bn: logits over the draft rows for the first token.
        advance: from the tokens just drafted (target ids [b]) to the next logits [b, n].
        target_ids_n: target id of each column, None: column = id.
        params: what each row is processed with before the draw; greedy when `uniforms_bs` is None.
    """
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    for step in range(steps):
        if uniforms_bs is None:
            chosen = logits_bn.argmax(dim=-1)
        else:
            law = process(logits_bn, params)
            chosen = draw(law, uniforms_bs[:, step])
            laws.append(law)
        tokens.append(chosen if target_ids_n is None else target_ids_n[chosen])
        if step + 1 < steps:
            logits_bn = advance(tokens[-1])
    if not laws:
        return Proposal(tokens_bs=torch.stack(tokens, dim=1))
    q = torch.stack(laws, dim=1)
    ids = None if target_ids_n is None else target_ids_n.expand(q.shape)
    return Proposal(tokens_bs=torch.stack(tokens, dim=1), q_bsk=q, cand_ids_bsk=ids)
