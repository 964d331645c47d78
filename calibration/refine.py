"""Refinement of a solved matrix: scales and codes in turn, each at its best given all the others.

Axes: n output rows, k inputs, g groups of inputs.
Covers coordinate descent on tr(E H E^T), E = Q - W, for all rows or for chosen groups. Does not
cover the first solution (`solve`, `grid`): descent from round-to-nearest ends in a much worse
minimum than descent from GPTQ's.
In: weights, codes, scales, a damped Hessian. Out: new codes and scales.
Invariant: no row's error grows, groups that were not chosen keep scale and codes bit for bit, and
every scale stays a positive bf16 number.

GPTQ fixes each column once, looking only at the columns after it, with scales chosen beforehand.
A sweep visits every group: its scale moves to the least-squares optimum in the metric of H (rounded
to bf16, taken only if that is better), then each of its columns to the nearest code to its own
optimum. With H diagonal, a sweep's codes are round-to-nearest's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from artifacts.packing import Scheme

BLOCK = 128  # columns whose gradient is kept up to date together


@torch.no_grad()
def sweep(
    w_nk: Tensor,
    codes_nk: Tensor,
    scale_ng: Tensor,
    h_kk: Tensor,
    scheme: Scheme,
    *,
    chosen_ng: Tensor | None = None,
) -> None:
    """One pass over all groups, in place.

    w_nk fp32; codes_nk fp32 whole numbers; scale_ng fp32, exact in bf16; h_kk fp32, its diagonal
    positive; chosen_ng: the groups that may change, None for all.
    """
    k = w_nk.shape[1]
    width = k // scale_ng.shape[1]
    error_nk = codes_nk * scale_ng.repeat_interleave(width, dim=1) - w_nk
    for group in range(scale_ng.shape[1]):
        start, stop = group * width, (group + 1) * width
        chosen_n = None if chosen_ng is None else chosen_ng[:, group]
        if chosen_n is not None and not bool(chosen_n.any()):
            continue
        scale_n = _refit(
            codes_nk[:, start:stop],
            scale_ng[:, group],
            error_nk @ h_kk[:, start:stop],
            h_kk[start:stop, start:stop],
            chosen_n,
        )
        scale_ng[:, group] = scale_n
        for first in range(start, stop, BLOCK):
            # the scale moved every column of the group, so all of it is renewed before each block
            rest = slice(first, stop)
            error_nk[:, rest] = codes_nk[:, rest] * scale_n.unsqueeze(1) - w_nk[:, rest]
            block = slice(first, min(first + BLOCK, stop))
            codes_nk[:, block] = _descend(
                codes_nk[:, block],
                scale_n,
                error_nk @ h_kk[:, block],
                h_kk[block, block],
                scheme,
                chosen_n,
            )
            error_nk[:, block] = codes_nk[:, block] * scale_n.unsqueeze(1) - w_nk[:, block]


def _refit(
    codes_ni: Tensor, scale_n: Tensor, gradient_ni: Tensor, h_ii: Tensor, chosen_n: Tensor | None
) -> Tensor:
    """The group's scales moved to where the row's error is smallest, if bf16 has a better one."""
    slope_n = (codes_ni * gradient_ni).sum(dim=1)
    curvature_n = ((codes_ni @ h_ii) * codes_ni).sum(dim=1)
    tiny = torch.finfo(torch.float32).tiny
    wanted_n = scale_n - slope_n / curvature_n.clamp_min(tiny)
    tried_n = wanted_n.to(torch.bfloat16).float()
    move_n = tried_n - scale_n
    better_n = (2 * slope_n + curvature_n * move_n) * move_n < 0
    better_n &= (tried_n >= torch.finfo(torch.bfloat16).tiny) & torch.isfinite(tried_n)
    if chosen_n is not None:
        better_n &= chosen_n
    return torch.where(better_n, tried_n, scale_n)


def _descend(
    codes_ni: Tensor,
    scale_n: Tensor,
    gradient_ni: Tensor,
    h_ii: Tensor,
    scheme: Scheme,
    chosen_n: Tensor | None,
) -> Tensor:
    """The block's codes after each column, in order, moved to its best one; [n, i]."""
    codes_in = codes_ni.T.contiguous()
    gradient_in = gradient_ni.T.contiguous()
    for column in range(len(codes_in)):
        codes_n = codes_in[column]
        best_n = codes_n - gradient_in[column] / (h_ii[column, column] * scale_n)
        best_n = best_n.round_().clamp_(scheme.code_min, scheme.code_max)
        if chosen_n is not None:
            best_n = torch.where(chosen_n, best_n, codes_n)
        # only the columns still to come read the gradient
        gradient_in[column:].addr_(h_ii[column, column:], (best_n - codes_n) * scale_n)
        codes_in[column] = best_n
    return codes_in.T
