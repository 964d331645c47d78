"""The sign fold: C01 and C02, and M1's figures on Gaussian weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import TrimtabError
from artifacts.packing import PackedMatrix, Scheme
from artifacts.sign_fold import count_negative, fold, fold_matrix
from tests.oracles.sign_fold import fold_slowly


def signed_quantization(n: int, k: int, group: int, seed: int) -> tuple[torch.Tensor, PackedMatrix]:
    """Gaussian weights with the extremum of each group on code -8, as AutoRound exports them."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn((n, k), generator=generator)
    grouped = w.view(n, -1, group)
    place = grouped.abs().argmax(-1, keepdim=True)
    extremum = grouped.gather(-1, place)
    scale = (-extremum / 8).bfloat16().float()
    codes = (grouped / scale).round().clamp(-8, 7).scatter(-1, place, -8.0)
    matrix = PackedMatrix.from_codes(
        codes.view(n, k).to(torch.int8), scale.squeeze(-1), Scheme(4, group)
    )
    return w, matrix


def relative_error(matrix: torch.Tensor, w: torch.Tensor) -> float:
    return float(torch.linalg.norm(matrix - w) / torch.linalg.norm(w))


def read_by_kernel(matrix: PackedMatrix) -> torch.Tensor:
    """A stub of the int8-activation kernel: scales to int16 of 1/4096, read back unsigned."""
    scale = matrix.scale.float()
    steps = (scale / scale.max() * 4096).round().to(torch.int16)
    unsigned = torch.where(steps < 0, steps.to(torch.int32) + 65536, steps.to(torch.int32))
    seen = unsigned.float() * scale.max() / 4096
    n, k = matrix.shape
    codes = matrix.codes().float().view(n, seen.shape[1], -1)
    return (codes * seen.unsqueeze(-1)).view(n, k)


def test_c01_unsigned_readers_see_garbage_before_and_the_matrix_after() -> None:
    w, matrix = signed_quantization(256, 256, 128, seed=1)
    assert count_negative(matrix.scale) > 100
    assert 0.08 < relative_error(matrix.dense(), w) < 0.13
    assert relative_error(read_by_kernel(matrix), w) > 10
    folded, result = fold_matrix(matrix, weight=w)
    assert count_negative(folded.scale) == 0
    assert relative_error(read_by_kernel(folded), folded.dense()) < 1e-3
    assert result.flipped_groups == count_negative(matrix.scale)


def test_c02_the_hand_built_group() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(2).view(2, 16)
    scale = torch.tensor([[-0.5], [0.5]])
    result = fold(codes, scale)
    assert result.codes[0].tolist() == [7, 7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7]
    assert result.codes[1].tolist() == codes[1].tolist()
    assert result.scale.tolist() == [[0.5], [0.5]]
    assert (result.flipped_groups, result.saturated) == (1, 1)
    moved = (result.codes.float() * result.scale - codes.float() * scale).abs()
    assert moved.max() == 0.5
    assert moved.nonzero().tolist() == [[0, 0]]
    again = fold(result.codes, result.scale)
    assert torch.equal(again.codes, result.codes) and torch.equal(again.scale, result.scale)
    assert (again.flipped_groups, again.saturated, again.weight_error_after) == (0, 0, 0.0)


def test_m1_every_flipped_group_saturates_and_mse_grows_by_five_percent() -> None:
    w, matrix = signed_quantization(256, 1024, 128, seed=2)
    result = fold(matrix.codes(), matrix.scale, weight=w)
    assert result.saturated >= result.flipped_groups > 0.4 * matrix.scale.numel()
    growth = (result.weight_error_after / result.weight_error_before) ** 2
    assert 1.02 < growth < 1.09
    own = fold(matrix.codes(), matrix.scale)
    assert own.weight_error_before == 0
    dense = own.codes.float().view(256, 8, -1) * own.scale.float().unsqueeze(-1)
    measured = relative_error(dense.view(256, 1024), matrix.dense())
    assert own.weight_error_after == pytest.approx(measured, rel=1e-5)


@given(
    st.lists(st.integers(-8, 7), min_size=8, max_size=8),
    st.floats(-4, 4, width=16),
)
@settings(max_examples=80, deadline=None)
def test_fold_is_the_slow_fold(codes: list[int], scale: float) -> None:
    result = fold(torch.tensor([codes], dtype=torch.int8), torch.tensor([[scale]]))
    expected, positive, saturated = fold_slowly(codes, scale)
    assert result.codes[0].tolist() == expected
    assert result.scale.item() == positive
    assert not torch.signbit(result.scale).any()
    assert result.saturated == saturated


def test_positive_groups_keep_their_bytes_and_their_dtype() -> None:
    _, matrix = signed_quantization(32, 256, 128, seed=3)
    matrix = PackedMatrix(matrix.packed, matrix.scale.half(), matrix.shape, 4, 128)
    folded, _ = fold_matrix(matrix)
    assert folded.scale.dtype == torch.float16
    positive = matrix.scale > 0
    old = matrix.packed.view(32, 2, -1)[positive]
    assert torch.equal(folded.packed.view(32, 2, -1)[positive], old)
    assert torch.equal(folded.scale[positive], matrix.scale[positive])
    unchanged, result = fold_matrix(folded)
    assert unchanged is folded and result.flipped_groups == 0


def test_zeros_are_counted_and_nan_is_refused() -> None:
    codes = torch.full((1, 16), -8, dtype=torch.int8)
    result = fold(codes, torch.tensor([[-0.0, 0.0]]))
    assert result.zero_groups == 2 and result.flipped_groups == 0
    assert not torch.signbit(result.scale).any()
    assert torch.equal(result.codes, codes)
    assert count_negative(torch.tensor([[-0.0, 1.0]])) == 1
    for bad in (float("nan"), float("inf")):
        with pytest.raises(TrimtabError, match="1 group scales are NaN or infinite"):
            fold(codes, torch.tensor([[1.0, bad]]))
    with pytest.raises(TrimtabError, match="do not fit"):
        fold(codes, torch.ones(1, 3))


def test_coarse_groups_are_counted() -> None:
    codes = torch.zeros((1, 16), dtype=torch.int8)
    assert fold(codes, torch.tensor([[1.0, 0.5]])).coarse_groups == 0
    assert fold(codes, torch.tensor([[1.0, 0.01]])).coarse_groups == 1


def test_int8_codes_saturate_at_127() -> None:
    codes = torch.tensor([[-128, -1, 127, 0]], dtype=torch.int8)
    result = fold(codes, torch.tensor([[-1.0]]), bits=8)
    assert result.codes.tolist() == [[127, 1, -127, 0]]
