"""The solve of one matrix: from weights and a Hessian to a packed matrix and its ledger entry.

Axes: n output rows, k inputs, g groups of inputs.
The one adapter around llmcompressor's `quantize_weight`, with the contract that it lacks: inputs
are cloned (it overwrites them), weights are fp32, scales are fixed and rounded to bf16 beforehand,
the codes are read back exactly or the solve fails, NaN is refused before it starts, its silent
fallback to round-to-nearest is a failure, and damping rises step by step to a cap, counted.
Does not cover where Hessians come from (`hessian`, `capture`) or which matrices are solved.
In: w [n, k], `HessianSum`, `Scheme`. Out: `Solved`.
Invariant: the packed matrix is what the entry's figures were measured on, and scaling H changes
nothing.

Three choices, each measured against the plainer one on trained weights (a language model's head,
8,192 x 256, group 128; held-out KL against round-to-nearest with scale amax/7):
scales searched by plain MSE 0.087, by the error that GPTQ will count for each input 0.081; then two
sweeps of `refine` 0.072. On Gaussian weights with heavy tails: 0.445, 0.412, 0.400. Columns go in
order of falling activation ("static"), which needs no g_idx; without it 0.120 for 0.087.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from artifacts.errors import TrimtabError
from artifacts.ledger import LedgerEntry
from artifacts.packing import PackedMatrix, Scheme
from calibration.figures import Metric, measure, row_chunks
from calibration.grid import (
    amax_scales,
    dequantize,
    per_input,
    round_to_nearest,
    search_scales,
)
from calibration.hessian import HessianSum
from calibration.refine import sweep

SWEEPS = 2  # of refinement after GPTQ
DAMPING_FACTOR = 10.0  # from one try to the next
BLOCK = 128  # columns of `quantize_weight`'s lazy updates


@dataclass(frozen=True)
class Solved:
    """A quantized matrix and how it came to be."""

    matrix: PackedMatrix
    entry: LedgerEntry


def solve(
    name: str,
    w_nk: Tensor,
    hessian: HessianSum,
    scheme: Scheme,
    *,
    damping: float = 0.01,
    damping_cap: float = 1.0,
    scale_ng: Tensor | None = None,
    sweeps: int = SWEEPS,
    row_chunk: int | None = None,
    allow_fallback: bool = False,
) -> Solved:
    """GPTQ of a matrix against its Hessian.

    Args:
        w_nk: weights [n, k], any float dtype, on the device to solve on; never written to.
        damping: added to H's diagonal, relative to its mean; raised tenfold until H is positive
            definite, up to damping_cap. 0 stays 0.
        scale_ng: scales [n, g], exact in bf16, kept as they are (no search, no refitting); None
            searches them.
        sweeps: rounds of `refine.sweep` after GPTQ; only with searched scales.
        row_chunk: rows solved at once, by default what takes about 4 GiB.
        allow_fallback: round to nearest, with its reason in the entry, where GPTQ fails at the cap.

    Raises TrimtabError when weights or Hessian are not finite, the Hessian has no rows, shapes or
    group size do not fit, or H is not positive definite at the cap.
    Source: Frantar et al. 2022 (GPTQ, arXiv 2210.17323), as in llmcompressor's `quantize_weight`.
    """
    _check(name, w_nk, hessian, scheme)
    metric = Metric.of(name, hessian, w_nk.device)
    tried = _ladder(damping, damping_cap)
    for tries, value in enumerate(tried, 1):
        solved = _solve_at(name, w_nk, metric, scheme, value, scale_ng, sweeps, row_chunk)
        if solved is not None:
            entry = measure(
                name, w_nk, *solved, scheme, metric, hessian, damping=value, damping_tries=tries
            )
            return Solved(PackedMatrix.from_codes(*solved, scheme, name=name), entry)
    problem = (
        f"Hessian of {hessian.rows} rows for {hessian.k} inputs is not positive definite at "
        f"damping {tried[-1]:g} ({len(tried)} tries)"
    )
    if not allow_fallback:
        raise TrimtabError(
            f"{name}: {problem}",
            hint="calibrate on more rows, raise the damping cap, or allow the fallback",
        )
    rounded = solve_rtn(
        name, w_nk, scheme, hessian=hessian, scale_ng=scale_ng, reason=f"rtn-fallback: {problem}"
    )
    return replace(rounded, entry=replace(rounded.entry, damping_tries=len(tried)))


def solve_rtn(
    name: str,
    w_nk: Tensor,
    scheme: Scheme,
    *,
    reason: str,
    hessian: HessianSum | None = None,
    scale_ng: Tensor | None = None,
) -> Solved:
    """Round-to-nearest, only ever chosen by the caller, who says why.

    scale_ng as in `solve`; None searches for the smallest MSE (`grid.amax_scales` gives the plain
    baseline). With a Hessian the entry holds output errors.
    Raises TrimtabError as `solve` does, except for H's definiteness.
    """
    _check(name, w_nk, hessian, scheme)
    scale_ng = search_scales(w_nk, scheme) if scale_ng is None else scale_ng.float()
    codes_nk = round_to_nearest(w_nk, scale_ng, scheme)
    metric = None if hessian is None else Metric.of(name, hessian, w_nk.device)
    entry = measure(
        name, w_nk, codes_nk, scale_ng, scheme, metric, hessian, method="rtn", reason=reason
    )
    return Solved(PackedMatrix.from_codes(codes_nk, scale_ng, scheme, name=name), entry)


def plain_round_to_nearest(w_nk: Tensor, scheme: Scheme) -> PackedMatrix:
    """The baseline that results are compared with: scale amax/7 (amax/127 in int8), in bf16."""
    scale_ng = amax_scales(w_nk, scheme)
    return solve_rtn("baseline", w_nk, scheme, reason="baseline", scale_ng=scale_ng).matrix


def solve_groups(
    name: str,
    w_nk: Tensor,
    hessian: HessianSum,
    matrix: PackedMatrix,
    chosen_ng: Tensor,
    *,
    damping: float = 0.01,
    sweeps: int = SWEEPS,
) -> Solved:
    """New codes and scales for the chosen groups of a packed matrix, all others bit for bit.

    For groups that a sign fold had to saturate: `refine.sweep` starts from the folded codes, so
    that no row's output error grows. chosen_ng: bool [n, g]; their scales must be positive.
    The entry's method is "gptq".
    Raises TrimtabError as `solve` does.
    """
    _check(name, w_nk, hessian, matrix.scheme)
    scale_ng = matrix.scale.to(w_nk.device).float()
    chosen_ng = chosen_ng.to(w_nk.device)
    if chosen_ng.shape != scale_ng.shape or bool((scale_ng[chosen_ng] <= 0).any()):
        raise TrimtabError(
            f"{name}: chosen groups {list(chosen_ng.shape)} of scales {list(scale_ng.shape)} must "
            "have the same shape and positive scales",
            hint="fold the signs first",
        )
    metric = Metric.of(name, hessian, w_nk.device)
    codes_nk = matrix.codes().to(w_nk.device).float()
    for _ in range(sweeps):
        sweep(
            w_nk.float(),
            codes_nk,
            scale_ng,
            metric.damped(damping),
            matrix.scheme,
            chosen_ng=chosen_ng,
        )
    codes_nk = codes_nk.to(torch.int8)
    entry = measure(
        name, w_nk, codes_nk, scale_ng, matrix.scheme, metric, hessian,
        damping=damping, damping_tries=1,
    )  # fmt: skip
    packed = PackedMatrix.from_codes(codes_nk, scale_ng, matrix.scheme, name=name)
    return Solved(packed, entry)


def _check(name: str, w_nk: Tensor, hessian: HessianSum | None, scheme: Scheme) -> None:
    """Refuses what no solve can use."""
    if w_nk.ndim != 2:
        raise TrimtabError(f"{name}: weight {list(w_nk.shape)} is not a matrix")
    scheme.groups(w_nk.shape[1], name)
    if hessian is not None and hessian.k != w_nk.shape[1]:
        raise TrimtabError(f"{name}: Hessian of {hessian.k} inputs, weight of {w_nk.shape[1]}")
    if not bool(torch.isfinite(w_nk).all()):
        raise TrimtabError(
            f"{name}: a weight is not finite", hint="fetch the checkpoint again, or ignore it"
        )


def _ladder(damping: float, cap: float) -> list[float]:
    """The dampings to try, in order; the cap itself is the last."""
    tried = [damping]
    while 0 < tried[-1] < cap:
        tried.append(min(tried[-1] * DAMPING_FACTOR, cap))
    return tried


def column_weights(h_kk: Tensor) -> Tensor | None:
    """What one unit of squared rounding error at each input costs after error feedback, [k].

    GPTQ counts error^2 / d^2 for a column, d the diagonal of the upper Cholesky factor of H^-1 in
    solving order. 1 / d^2 is the squared diagonal of the lower factor of H with that order
    reversed (the variance of an input given all that are solved later), so no inverse is needed.
    None when H is not positive definite.
    """
    order_k = _order(h_kk).flip(0)
    factor_kk, info = torch.linalg.cholesky_ex(h_kk[order_k][:, order_k])
    if int(info):
        return None
    weight_k = torch.empty_like(h_kk.diagonal())
    weight_k[order_k] = factor_kk.diagonal().square()
    return weight_k


def _order(h_kk: Tensor) -> Tensor:
    """Inputs by falling activation, as `quantize_weight` takes them with actorder static."""
    return torch.argsort(h_kk.diagonal(), descending=True)


def _solve_at(
    name: str,
    w_nk: Tensor,
    metric: Metric,
    scheme: Scheme,
    damping: float,
    scale_ng: Tensor | None,
    sweeps: int,
    row_chunk: int | None,
) -> tuple[Tensor, Tensor] | None:
    """(codes int8 [n, k], scales [n, g]) at one damping, or None where H is not definite."""
    damped_kk = metric.damped(damping)
    weight_k = column_weights(damped_kk)
    if weight_k is None:
        return None
    codes_parts, scale_parts = [], []
    for rows in row_chunks(w_nk, row_chunk):
        chunk_nk = w_nk[rows].float()
        if scale_ng is None:
            scale = search_scales(chunk_nk, scheme, weight_k=weight_k)
        else:
            scale = scale_ng[rows].float()
        codes_nk = _gptq(name, chunk_nk, metric, scale, scheme, damping)
        if codes_nk is None:
            return None
        for _ in range(sweeps if scale_ng is None else 0):
            sweep(chunk_nk, codes_nk, scale, damped_kk, scheme)
        codes_parts.append(codes_nk.to(torch.int8))
        scale_parts.append(scale)
    return torch.cat(codes_parts), torch.cat(scale_parts)


def _gptq(
    name: str, w_nk: Tensor, metric: Metric, scale_ng: Tensor, scheme: Scheme, damping: float
) -> Tensor | None:
    """Codes as fp32 whole numbers [n, k] from `quantize_weight`; None where it fell back."""
    from compressed_tensors.quantization import QuantizationArgs

    from calibration.library import import_quietly

    gptq_quantize = import_quietly("llmcompressor.modifiers.gptq.gptq_quantize")
    channel = scheme.group_size == -1
    arguments = QuantizationArgs(
        num_bits=scheme.bits,
        type="int",
        symmetric=True,
        strategy="channel" if channel else "group",
        group_size=None if channel else scheme.group_size,
        actorder="static",
    )
    try:
        dense_bnk, _, fallback_b = gptq_quantize.quantize_weight(
            w_nk.clone()[None],
            metric.solve_kk.clone()[None],
            scale_ng.clone()[None],
            torch.zeros_like(scale_ng)[None],
            None,
            arguments,
            blocksize=BLOCK,
            percdamp=damping,
        )
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # H passed its Cholesky, its inverse did not
        return None
    dense_nk: Tensor = dense_bnk[0]
    if bool(fallback_b.any()) or not bool(torch.isfinite(dense_nk).all()):
        return None
    codes_nk = (dense_nk / per_input(scale_ng, dense_nk.shape[1])).round_()
    inside = (codes_nk >= scheme.code_min) & (codes_nk <= scheme.code_max)
    if not bool(inside.all()) or not torch.equal(dequantize(codes_nk, scale_ng), dense_nk):
        raise TrimtabError(
            f"{name}: quantize_weight's result is not codes times the given scales",
            hint="install the llmcompressor version of constraints.txt",
        )
    return codes_nk
