"""What a quantized matrix costs, in the metric of its own inputs, as a ledger entry.

Axes: n output rows, k inputs, g groups of inputs.
Covers the Hessian made comparable (`Metric`) and the figures of a result. Does not cover making
codes (`solve`, `refine`, `grid`) or the entry's file (`artifacts.ledger`).
In: weights, codes, scales, `HessianSum`. Out: `LedgerEntry`.
Invariant: figures depend on the codes and scales alone, not on how they came to be, and not on the
Hessian's scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts.ledger import LedgerEntry
from artifacts.packing import Scheme
from calibration.grid import amax_scales, dequantize, round_to_nearest
from calibration.hessian import HessianSum

ROWS_PER_INPUT = 4  # calibration rows below this times k are called few in the ledger
CHUNK_ELEMENTS = 1 << 27  # weights worked on at once, 512 MiB; the work space is six times that


@dataclass(frozen=True)
class Metric:
    """A Hessian ready to solve with and to measure in.

    h_kk: raw sum over the mean of its live diagonal, dead inputs' rows and columns zero.
    solve_kk: the same with 1 on a dead input's diagonal: nothing else reads it, so it is rounded.
    """

    h_kk: Tensor
    solve_kk: Tensor
    dead: int

    @classmethod
    def of(cls, name: str, hessian: HessianSum, device: torch.device) -> Metric:
        """Checks the Hessian (TrimtabError naming `name`) and scales it."""
        hessian.check(name)
        h_kk = hessian.sum_kk.to(device=device, dtype=torch.float32)
        diagonal_k = h_kk.diagonal()
        live_k = diagonal_k > 0
        h_kk = h_kk / diagonal_k[live_k].double().mean().float()
        h_kk = h_kk * (live_k.unsqueeze(0) & live_k.unsqueeze(1))
        solve_kk = h_kk + torch.diag((~live_k).float())
        return cls(h_kk, solve_kk, int((~live_k).sum()))

    def damped(self, damping: float) -> Tensor:
        """With `damping` times the mean of the diagonal added to it, as GPTQ does."""
        mean = self.solve_kk.diagonal().mean()
        return self.solve_kk + torch.eye(len(self.solve_kk), device=mean.device) * mean * damping


def row_chunks(w_nk: Tensor, step: int | None = None) -> Iterator[slice]:
    """Slices of rows, which are independent of each other, that bound the work space."""
    step = step or max(1, CHUNK_ELEMENTS // w_nk.shape[1])
    for start in range(0, w_nk.shape[0], step):
        yield slice(start, start + step)


def measure(
    name: str,
    w_nk: Tensor,
    codes_nk: Tensor,
    scale_ng: Tensor,
    scheme: Scheme,
    metric: Metric | None,
    hessian: HessianSum | None,
    *,
    method: str = "gptq",
    reason: str = "",
    damping: float | None = None,
    damping_tries: int = 0,
) -> LedgerEntry:
    """The ledger entry of a result: codes int8 [n, k] with scales [n, g] for weights [n, k].

    Figures as in `LedgerEntry`, in the undamped metric, a chunk of rows at a time, sums in fp64.
    A Hessian of few rows is said in `reason` when that is free.
    """
    keys = ("weight", "weight_error", "output", "output_error", "rtn", "clip")
    sums = dict.fromkeys(keys, 0.0)
    for rows in row_chunks(w_nk):
        chunk_nk = w_nk[rows].float()
        error_nk = dequantize(codes_nk[rows], scale_ng[rows]) - chunk_nk
        plain_ng = amax_scales(chunk_nk, scheme)
        sums["clip"] += float((scale_ng[rows] / plain_ng).double().sum())
        sums["weight"] += float(chunk_nk.double().square().sum())
        sums["weight_error"] += float(error_nk.double().square().sum())
        if metric is not None:
            rtn_nk = dequantize(round_to_nearest(chunk_nk, plain_ng, scheme), plain_ng) - chunk_nk
            sums["output"] += _energy(chunk_nk, metric.h_kk)
            sums["output_error"] += _energy(error_nk, metric.h_kk)
            sums["rtn"] += _energy(rtn_nk, metric.h_kk)
    rows_seen = 0 if hessian is None else hessian.rows
    if hessian is not None and not reason and rows_seen < ROWS_PER_INPUT * hessian.k:
        reason = f"few rows: {rows_seen} for {hessian.k} inputs, {ROWS_PER_INPUT} an input are safe"
    return LedgerEntry(
        name=name,
        method=method,
        reason=reason,
        bits=scheme.bits,
        group_size=scheme.group_size,
        shape=(w_nk.shape[0], w_nk.shape[1]),
        rows=rows_seen,
        damping=damping,
        damping_tries=damping_tries,
        dead_inputs=0 if metric is None else metric.dead,
        clip=sums["clip"] / scale_ng.numel(),
        weight_error=_relative(sums["weight_error"], sums["weight"]),
        output_error=None if metric is None else _relative(sums["output_error"], sums["output"]),
        rtn_output_error=None if metric is None else _relative(sums["rtn"], sums["output"]),
        hessian_source="" if hessian is None else hessian.source,
    )


def _energy(x_nk: Tensor, h_kk: Tensor) -> float:
    """tr(X H X^T)."""
    return float(((x_nk @ h_kk) * x_nk).double().sum())


def _relative(error: float, whole: float) -> float:
    """sqrt(error / whole); of nothing, nothing is lost."""
    return (max(error, 0.0) / whole) ** 0.5 if whole > 0 else 0.0
