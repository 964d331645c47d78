"""Group scales and plain rounding: the grid on which codes live.

Axes: n output rows, k inputs, g groups of inputs (one group spans the row when group_size is -1).
Covers the amax scale, the clip search (plain or weighted by input), and round-to-nearest. Does not
cover error feedback (`solve`, `refine`) or packing (`artifacts.packing`).
In: weights [n, k] of any float dtype. Out: fp32 scales [n, g], int8 codes [n, k].
Invariant: every scale is positive, finite, and exactly a bf16 number, before any code is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from artifacts.packing import Scheme

POINTS = 26  # clip ratios tried, evenly spaced
LOW = 0.5  # smallest of them; the largest is 1, no clipping
CHUNK_ELEMENTS = 1 << 24  # weights searched at once


def grouped(x_nk: Tensor, scheme: Scheme) -> Tensor:
    """[n, k] viewed as [n, g, k / g]."""
    n, k = x_nk.shape
    return x_nk.reshape(n, scheme.groups(k), -1)


def per_input(scale_ng: Tensor, k: int) -> Tensor:
    """Scales [n, g] as one a weight, [n, k]."""
    return scale_ng.repeat_interleave(k // scale_ng.shape[1], dim=1)


def dequantize(codes_nk: Tensor, scale_ng: Tensor) -> Tensor:
    """codes * scale in fp32, [n, k]."""
    return codes_nk.float() * per_input(scale_ng, codes_nk.shape[1])


def to_stored(scale_ng: Tensor) -> Tensor:
    """Scales rounded to bf16, as fp32, made positive.

    A group of zeros has no scale of its own: it gets the matrix's smallest positive one (1 if there
    is none), so that no consumer divides by zero.
    """
    stored_ng = scale_ng.to(torch.bfloat16).float()
    fine_ng = stored_ng >= torch.finfo(torch.bfloat16).tiny
    if not bool(fine_ng.all()):
        rest = float(stored_ng[fine_ng].min()) if bool(fine_ng.any()) else 1.0
        stored_ng = torch.where(fine_ng, stored_ng, rest)
    return stored_ng


def amax_scales(w_nk: Tensor, scheme: Scheme) -> Tensor:
    """Largest absolute weight of the group over code_max (7 or 127): plain round-to-nearest's."""
    return to_stored(grouped(w_nk.float(), scheme).abs().amax(dim=-1) / scheme.code_max)


def search_scales(
    w_nk: Tensor,
    scheme: Scheme,
    *,
    weight_k: Tensor | None = None,
    points: int = POINTS,
    low: float = LOW,
) -> Tensor:
    """The scale of each group, of `points` ratios from 1 to `low` of the amax scale, whose
    round-to-nearest error sum of weight * (w - code * scale)^2 is smallest. fp32 [n, g].

    weight_k: how much an input's error counts, [k]; None counts all alike (plain MSE clip search).
    The candidates are rounded to bf16 first, so that what is compared is what is stored.
    """
    step = max(1, CHUNK_ELEMENTS // w_nk.shape[1])
    parts = [
        _search(w_nk[start : start + step].float(), scheme, weight_k, points, low)
        for start in range(0, w_nk.shape[0], step)
    ]
    return to_stored(torch.cat(parts)) if parts else w_nk.new_zeros((0, 1)).float()


def _search(
    w_nk: Tensor, scheme: Scheme, weight_k: Tensor | None, points: int, low: float
) -> Tensor:
    """The search of one chunk of rows; a group of zeros keeps scale 0."""
    w_ngi = grouped(w_nk, scheme)
    amax_ng = w_ngi.abs().amax(dim=-1) / scheme.code_max
    weight_gi = None if weight_k is None else grouped(weight_k.float()[None], scheme)[0]
    best_ng = torch.full_like(amax_ng, torch.inf)
    scale_ng = amax_ng
    for ratio in torch.linspace(1.0, low, points).tolist():
        tried_ng = (amax_ng * ratio).to(torch.bfloat16).float()
        step_ngi = tried_ng.clamp_min(torch.finfo(torch.bfloat16).tiny).unsqueeze(-1)
        error_ngi = (w_ngi / step_ngi).round_().clamp_(scheme.code_min, scheme.code_max)
        error_ngi.mul_(step_ngi).sub_(w_ngi).square_()
        if weight_gi is not None:
            error_ngi.mul_(weight_gi)
        error_ng = error_ngi.sum(dim=-1)
        better_ng = error_ng < best_ng
        best_ng = torch.where(better_ng, error_ng, best_ng)
        scale_ng = torch.where(better_ng, tried_ng, scale_ng)
    return scale_ng


def round_to_nearest(w_nk: Tensor, scale_ng: Tensor, scheme: Scheme) -> Tensor:
    """int8 codes [n, k]: w / scale rounded half to even, clamped to the scheme's range."""
    codes_nk = (w_nk.float() / per_input(scale_ng, w_nk.shape[1])).round_()
    return codes_nk.clamp_(scheme.code_min, scheme.code_max).to(torch.int8)
