"""GPTQ through the adapter, and its refinement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from artifacts.errors import TrimtabError
from artifacts.packing import PackedMatrix, Scheme
from calibration.grid import amax_scales, per_input, round_to_nearest, search_scales
from calibration.hessian import HessianSum
from calibration.solve import column_weights, solve, solve_groups, solve_rtn
from tests.oracles.gptq import output_energy, solve_columns

N, K = 48, 256
INT4 = Scheme(4, 128)


def inputs(t: int, seed: int = 0, k: int = K) -> torch.Tensor:
    """Correlated rows with a few loud inputs, like a layer's."""
    mix = torch.Generator().manual_seed(123)
    basis = torch.linalg.qr(torch.randn(k, k, generator=mix))[0]
    spectrum = torch.arange(1, k + 1).float() ** -0.4
    loud = torch.exp(0.4 * torch.randn(k, generator=mix))
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(t, k, generator=draw) @ (basis * spectrum) @ basis.T * loud


def weights(n: int = N, seed: int = 1, k: int = K) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.1


def hessian(x: torch.Tensor, name: str = "layer") -> HessianSum:
    total = HessianSum(name, x.shape[1], source="test rows")
    total.add(x)
    return total


def held_out_error(matrix: PackedMatrix, w: torch.Tensor) -> float:
    y = inputs(4096, seed=99, k=w.shape[1])
    return float(((matrix.dense() - w) @ y.T).norm() / (w @ y.T).norm())


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, 64), Scheme(8, 32), Scheme(4, -1)])
def test_codes_equal_the_slow_column_loop(scheme: Scheme) -> None:
    w, x = weights(12, k=64), inputs(600, k=64)
    scale = search_scales(w, scheme)
    solved = solve("layer", w, hessian(x), scheme, scale_ng=scale)
    h = (x.double().T @ x.double()).float()
    slow = solve_columns(
        w, h, per_input(scale, 64), damping=0.01,
        code_min=scheme.code_min, code_max=scheme.code_max,
    )  # fmt: skip
    codes = solved.matrix.codes()
    # a code that lies on the edge of two may differ between fp32 and float64
    assert float((codes != slow).float().mean()) <= 0.005
    dense = slow.double() * per_input(scale, 64).double()
    ours = output_energy(solved.matrix.dense() - w, h)
    assert ours == pytest.approx(output_energy(dense - w, h), rel=2e-3)
    assert torch.equal(solved.matrix.scale.float(), scale)
    assert not torch.equal(codes, round_to_nearest(w, scale, scheme))


def test_identity_hessian_gives_round_to_nearest() -> None:
    w = weights()
    total = HessianSum("layer", K)
    total.sum_kk, total.rows = torch.eye(K) * 5, 4 * K
    fixed = search_scales(w, INT4)
    assert torch.equal(
        solve("layer", w, total, INT4, scale_ng=fixed).matrix.codes(),
        round_to_nearest(w, fixed, INT4),
    )
    refined = solve("layer", w, total, INT4).matrix
    assert torch.equal(refined.codes(), round_to_nearest(w, refined.scale.float(), INT4))


@pytest.mark.parametrize("factor", [1 / 4096, 1000.0, 1e-9])
def test_scaling_the_hessian_changes_nothing(factor: float) -> None:
    w, total = weights(), hessian(inputs(4096))
    total.sum_kk[5] = 0  # a dead input must not bring the scale back in
    total.sum_kk[:, 5] = 0
    scaled = HessianSum("layer", K)
    scaled.sum_kk, scaled.rows = total.sum_kk * factor, total.rows
    one, other = solve("layer", w, total, INT4), solve("layer", w, scaled, INT4)
    assert float((one.matrix.codes() != other.matrix.codes()).float().mean()) < 1e-3
    assert one.entry.output_error == pytest.approx(other.entry.output_error, rel=1e-3)


def test_each_step_lowers_the_error_on_rows_it_has_not_seen() -> None:
    w, total = weights(256), hessian(inputs(8192))
    plain = solve_rtn("layer", w, INT4, reason="test", scale_ng=amax_scales(w, INT4))
    searched = solve_rtn("layer", w, INT4, reason="test")
    gptq_mse = solve("layer", w, total, INT4, scale_ng=search_scales(w, INT4))
    gptq = solve("layer", w, total, INT4, sweeps=0)
    refined = solve("layer", w, total, INT4)
    errors = [held_out_error(s.matrix, w) for s in (plain, searched, gptq_mse, gptq, refined)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.75 * errors[0]


def test_more_rows_give_a_smaller_error() -> None:
    w = weights(128)
    errors = [
        held_out_error(solve("layer", w, hessian(inputs(t, seed=t)), INT4).matrix, w)
        for t in (64, 512, 4096)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < held_out_error(solve_rtn("layer", w, INT4, reason="test").matrix, w)


def test_inputs_are_not_written_to_and_runs_repeat() -> None:
    w, total = weights(), hessian(inputs(2048))
    w_before, h_before = w.clone(), total.sum_kk.clone()
    first, second = solve("layer", w, total, INT4), solve("layer", w, total, INT4)
    assert torch.equal(w, w_before) and torch.equal(total.sum_kk, h_before)
    assert torch.equal(first.matrix.packed, second.matrix.packed)
    assert torch.equal(first.matrix.scale, second.matrix.scale)
    assert first.entry == second.entry


def test_row_chunks_give_the_same_codes() -> None:
    w, total = weights(), hessian(inputs(2048))
    whole = solve("layer", w, total, INT4).matrix.codes()
    parts = solve("layer", w, total, INT4, row_chunk=20).matrix.codes()
    assert float((whole != parts).float().mean()) < 2e-3  # summation order at the edge of two codes


def test_scales_are_positive_bf16_and_codes_survive_packing() -> None:
    matrix = solve("layer", weights(), hessian(inputs(2048)), INT4).matrix
    assert matrix.scale.dtype is torch.bfloat16 and bool((matrix.scale > 0).all())
    assert matrix.codes().min() >= -8 and matrix.codes().max() <= 7
    assert torch.equal(matrix.dense(), matrix.codes().float() * per_input(matrix.scale.float(), K))


def test_ledger_entry_holds_the_measured_figures() -> None:
    w, x = weights(), inputs(2048)
    x[:, 17] = 0
    solved = solve("layer", w, hessian(x), INT4)
    entry, error = solved.entry, solved.matrix.dense() - w
    h = x.double().T @ x.double()
    whole = output_energy(w, h)
    assert (entry.method, entry.reason, entry.rows, entry.dead_inputs) == ("gptq", "", 2048, 1)
    assert (entry.damping, entry.damping_tries, entry.hessian_source) == (0.01, 1, "test rows")
    assert entry.output_error == pytest.approx((output_energy(error, h) / whole) ** 0.5, rel=1e-3)
    assert entry.weight_error == pytest.approx(float(error.norm() / w.norm()), rel=1e-3)
    scale = amax_scales(w, INT4)
    plain = round_to_nearest(w, scale, INT4).float() * per_input(scale, K) - w
    assert entry.rtn_output_error == pytest.approx(
        (output_energy(plain, h) / whole) ** 0.5, rel=1e-3
    )
    assert entry.clip == pytest.approx(float((solved.matrix.scale.float() / scale).mean()))


def test_dead_inputs_are_rounded_not_dropped() -> None:
    w, x = weights(), inputs(2048)
    x[:, 40:60] = 0
    matrix = solve("layer", w, hessian(x), INT4).matrix
    rounded = round_to_nearest(w, matrix.scale.float(), INT4)
    assert torch.equal(matrix.codes()[:, 40:60], rounded[:, 40:60])
    assert bool(matrix.codes()[:, 40:60].any())


def test_three_rows_without_damping_fail_unless_the_fallback_is_allowed() -> None:
    w, total = weights(), hessian(inputs(3))
    with pytest.raises(TrimtabError, match="layer: Hessian of 3 rows for 256 inputs"):
        solve("layer", w, total, INT4, damping=0.0)
    solved = solve("layer", w, total, INT4, damping=0.0, allow_fallback=True)
    assert solved.entry.method == "rtn" and solved.entry.reason.startswith("rtn-fallback")
    assert torch.equal(
        solved.matrix.codes(), round_to_nearest(w, solved.matrix.scale.float(), INT4)
    )


def test_few_rows_pass_with_damping_and_are_said() -> None:
    entry = solve("layer", weights(), hessian(inputs(3).repeat(2, 1)), INT4).entry
    assert entry.method == "gptq" and entry.damping == 0.01
    assert entry.reason.startswith("few rows: 6 for 256 inputs")


def indefinite() -> HessianSum:
    """A symmetric matrix with one eigenvalue at -0.05 of the diagonal's mean."""
    total = HessianSum("layer", K)
    vector = torch.nn.functional.normalize(torch.ones(K), dim=0)
    total.sum_kk = torch.eye(K) - 1.05 * torch.outer(vector, vector)
    total.rows = 4 * K
    return total


def test_damping_rises_step_by_step_and_is_recorded() -> None:
    entry = solve("layer", weights(), indefinite(), INT4).entry
    assert (entry.damping, entry.damping_tries) == (pytest.approx(0.1), 2)
    with pytest.raises(TrimtabError, match=r"at damping 0\.02 \(2 tries\)"):
        solve("layer", weights(), indefinite(), INT4, damping_cap=0.02)


def test_the_librarys_fallback_flag_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column weights say definite, the library falls back: that is no result."""
    monkeypatch.setattr("calibration.solve.column_weights", lambda h: torch.ones(len(h)))
    with pytest.raises(TrimtabError, match="not positive definite"):
        solve("layer", weights(), indefinite(), INT4, damping_cap=0.01)


def test_a_result_off_the_grid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmcompressor.modifiers.gptq import gptq_quantize

    real = gptq_quantize.quantize_weight

    def off(*args: Any, **kwargs: Any) -> Any:
        dense, losses, flags = real(*args, **kwargs)
        return dense * 1.001, losses, flags

    monkeypatch.setattr(gptq_quantize, "quantize_weight", off)
    with pytest.raises(TrimtabError, match="not codes times the given scales"):
        solve("layer", weights(), hessian(inputs(2048)), INT4)


def test_bad_input_is_refused_before_anything_is_solved() -> None:
    w, total = weights(), hessian(inputs(512))
    bad = w.clone()
    bad[3, 4] = float("nan")
    with pytest.raises(TrimtabError, match="layer: a weight is not finite"):
        solve("layer", bad, total, INT4)
    with pytest.raises(TrimtabError, match="Hessian of 256 inputs, weight of 128"):
        solve("layer", w[:, :128], total, INT4)
    with pytest.raises(TrimtabError, match="group size 96 does not divide its 256 inputs"):
        solve("layer", w, total, Scheme(4, 96))
    with pytest.raises(TrimtabError, match="is not a matrix"):
        solve("layer", w[0], total, INT4)
    total.sum_kk[2, 2] = float("nan")
    with pytest.raises(TrimtabError, match="layer: its Hessian is not finite"):
        solve("layer", w, total, INT4)
    with pytest.raises(TrimtabError, match="layer: rows_seen=0"):
        solve("layer", w, HessianSum("layer", K), INT4)


def test_column_weights_are_the_conditional_variances() -> None:
    h = hessian(inputs(2048)).sum_kk / 2048
    weight_k = column_weights(h)
    assert weight_k is not None
    order = torch.argsort(h.diagonal(), descending=True)
    inverse = torch.linalg.inv(h[order][:, order].double())
    upper = torch.linalg.cholesky(inverse, upper=True)
    torch.testing.assert_close(
        weight_k[order].double(), upper.diagonal() ** -2, rtol=1e-2, atol=1e-6
    )
    assert column_weights(-h) is None


def test_refined_codes_cannot_be_improved_one_at_a_time() -> None:
    w, total = weights(4, k=64), hessian(inputs(600, k=64))
    scheme = Scheme(4, 32)
    matrix = solve("layer", w, total, scheme, sweeps=12).matrix
    h = total.sum_kk.double() / total.sum_kk.diagonal().double().mean()
    h += 0.01 * torch.eye(64, dtype=torch.float64)
    codes, scale = matrix.codes(), per_input(matrix.scale.float(), 64).double()
    for row in range(4):
        error = codes[row].double() * scale[row] - w[row].double()
        best = float(error @ h @ error)
        for column in range(64):
            for step in (-1, 1):
                code = int(codes[row, column]) + step
                if -8 <= code <= 7:
                    moved = error.clone()
                    moved[column] += step * scale[row, column]
                    assert float(moved @ h @ moved) >= best * (1 - 1e-6)


def test_chosen_groups_are_solved_again_and_all_others_stay() -> None:
    w, total = weights(), hessian(inputs(2048))
    start = solve_rtn("layer", w, INT4, reason="test", hessian=total)
    chosen = torch.zeros(N, 2, dtype=torch.bool)
    chosen[::2, 1] = True
    chosen[1, 0] = True
    solved = solve_groups("layer", w, total, start.matrix, chosen)
    kept = ~per_input(chosen.float(), K).bool()
    assert torch.equal(solved.matrix.codes()[kept], start.matrix.codes()[kept])
    assert torch.equal(solved.matrix.scale[~chosen], start.matrix.scale[~chosen])
    assert not torch.equal(solved.matrix.codes(), start.matrix.codes())
    h = total.sum_kk / total.sum_kk.diagonal().mean() + 0.01 * torch.eye(K)
    for row in range(N):
        before, after = (
            output_energy((s.matrix.dense() - w)[row : row + 1], h) for s in (start, solved)
        )
        assert after <= before * (1 + 1e-6)
    assert solved.entry.method == "gptq"
    assert solved.entry.output_error is not None and start.entry.output_error is not None
    assert solved.entry.output_error < start.entry.output_error


def test_chosen_groups_need_positive_scales() -> None:
    w, total = weights(), hessian(inputs(512))
    matrix = solve_rtn("layer", w, INT4, reason="test").matrix
    signed = replace(matrix, scale=-matrix.scale)
    with pytest.raises(TrimtabError, match="positive scales"):
        solve_groups("layer", w, total, signed, torch.ones(N, 2, dtype=torch.bool))
