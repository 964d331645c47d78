"""Folding negative group scales into the codes, and what that costs.

Axes: n output rows, k inputs, g groups (k / group_size).
Covers s < 0: s -> -s, q -> -q, in one matrix. Kernels with int8 activations read scales unsigned,
so a negative one turns into garbage there; published AutoRound bodies have them in half of their
groups. Not lossless: the most negative code (-8 in int4) has no positive twin and saturates to +7.
Does not cover solving flipped groups again from the original weights (`calibration`).
Invariant: groups with a positive scale keep codes and scale bit for bit; no other value moves by
more than one step, and only where the code was the most negative one; a second fold does nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from artifacts.errors import TrimtabError
from artifacts.packing import PackedMatrix, pack

# Kernels with int8 activations store round(s / max(s) * 4096): below this share of the largest
# scale of a tensor the rounding alone is more than 1 % of the scale.
COARSE_SHARE = 50 / 4096


@dataclass(frozen=True, kw_only=True)
class FoldResult:
    """A folded matrix.

    codes int8 [n, k]; scale [n, g], nowhere negative (-0.0 became +0.0), dtype as given.
    flipped_groups: groups whose scale was negative. saturated: codes that moved by one step.
    zero_groups: groups whose scale is 0 (left as they are; the structure gate refuses them).
    coarse_groups: groups whose scale is so small beside the tensor's largest that int16 kernels
    round it by more than 1 %. weight_error_before, weight_error_after: relative Frobenius error to
    `weight` if it was given, else to the matrix before the fold (so before is 0).
    """

    codes: Tensor
    scale: Tensor
    flipped_groups: int
    saturated: int
    zero_groups: int
    coarse_groups: int
    weight_error_before: float
    weight_error_after: float


def fold(
    codes: Tensor, scale: Tensor, *, bits: int = 4, weight: Tensor | None = None
) -> FoldResult:
    """Folds the signs of `scale` [n, g] into `codes` int8 [n, k].

    `weight` [n, k] is the original matrix, if it is at hand, for the errors.
    Raises TrimtabError for a scale that is NaN or infinite, or shapes that do not fit.
    """
    n, k = codes.shape
    if scale.ndim != 2 or scale.shape[0] != n or scale.shape[1] < 1 or k % scale.shape[1]:
        raise TrimtabError(f"scales {list(scale.shape)} do not fit codes {[n, k]}")
    if not bool(torch.isfinite(scale).all()):
        bad = int((~torch.isfinite(scale)).sum())
        raise TrimtabError(
            f"{bad} group scales are NaN or infinite; a fold cannot mend them",
            hint="fetch the checkpoint again, or quantize the body from its original weights",
        )
    lowest, highest = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    grouped = codes.view(n, scale.shape[1], -1)
    flipped = scale < 0
    turned = (-grouped.to(torch.int16)).clamp(max=highest).to(torch.int8)
    folded = torch.where(flipped.unsqueeze(-1), turned, grouped).view(n, k)
    saturated = (grouped == lowest) & flipped.unsqueeze(-1)
    positive = torch.where(scale == 0, torch.zeros_like(scale), scale.abs())
    if weight is None:
        before = 0.0
        after = _own_error(grouped, scale, saturated)
    else:
        before = _error(codes, scale, weight)
        after = _error(folded, positive, weight)
    coarse = (positive > 0) & (positive.float() < COARSE_SHARE * positive.float().max())
    return FoldResult(
        codes=folded,
        scale=positive,
        flipped_groups=int(flipped.sum()),
        saturated=int(saturated.sum()),
        zero_groups=int((scale == 0).sum()),
        coarse_groups=int(coarse.sum()),
        weight_error_before=before,
        weight_error_after=after,
    )


def fold_matrix(
    matrix: PackedMatrix, *, weight: Tensor | None = None
) -> tuple[PackedMatrix, FoldResult]:
    """`fold` of a packed matrix, packed again, scales in their dtype; itself if nothing changes."""
    result = fold(matrix.codes(), matrix.scale, bits=matrix.bits, weight=weight)
    if result.flipped_groups == 0 and torch.equal(
        matrix.scale.view(torch.uint8), result.scale.view(torch.uint8)
    ):
        return matrix, result
    packed = pack(result.codes, matrix.bits)
    return replace(matrix, packed=packed, scale=result.scale), result


def count_negative(scale: Tensor) -> int:
    """Groups with a negative scale; -0.0 counts too, since unsigned readers see its sign bit."""
    return int(torch.signbit(scale).sum())


def _own_error(grouped: Tensor, scale: Tensor, saturated: Tensor) -> float:
    """||folded - before|| / ||before||: a saturated code moved its weight by exactly |s|."""
    s2 = scale.double().square()
    moved = (saturated.sum(-1) * s2).sum()
    whole = (grouped.double().square().sum(-1) * s2).sum()
    return math.sqrt(float(moved / whole)) if float(whole) else 0.0


def _error(codes: Tensor, scale: Tensor, weight: Tensor) -> float:
    n, k = codes.shape
    dense = (codes.view(n, scale.shape[1], -1).float() * scale.float().unsqueeze(-1)).view(n, k)
    weight = weight.to(torch.float32)
    return float(torch.linalg.norm(dense - weight) / torch.linalg.norm(weight))
