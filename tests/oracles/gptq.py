"""GPTQ as its paper writes it: one row and one column at a time, in float64.

The slow and obvious implementation that `calibration.solve` is compared with. Columns are taken by
falling diagonal of H, scales are given, nothing is lazy or blocked, and the inverse Hessian is
updated column by column (no Cholesky factor of it).
"""

from __future__ import annotations

import torch


def solve_columns(
    w_nk: torch.Tensor,
    h_kk: torch.Tensor,
    scale_nk: torch.Tensor,
    *,
    damping: float,
    code_min: int,
    code_max: int,
) -> torch.Tensor:
    """int8 codes [n, k]; scale_nk holds one scale a weight."""
    k = w_nk.shape[1]
    w, scale, h = w_nk.double().clone(), scale_nk.double(), h_kk.double().clone()
    codes = torch.zeros(w.shape, dtype=torch.int8)
    h += torch.eye(k, dtype=torch.float64) * damping * h.diagonal().mean()
    left = sorted(range(k), key=lambda column: -float(h_kk[column, column]))
    while left:
        inverse = torch.linalg.inv(h[left][:, left])
        column, others = left[0], left[1:]
        for row in range(len(w)):
            code = round(float(w[row, column] / scale[row, column]))
            code = min(max(code, code_min), code_max)
            codes[row, column] = code
            error = w[row, column] - code * scale[row, column]
            w[row, others] -= error / inverse[0, 0] * inverse[0, 1:]
        left = others
    return codes


def output_energy(x_nk: torch.Tensor, h_kk: torch.Tensor) -> float:
    """tr(X H X^T), row by row, in float64."""
    total = 0.0
    for row in x_nk.double():
        total += float(row @ h_kk.double() @ row)
    return total
