"""Scales and plain rounding."""

from __future__ import annotations

import pytest
import torch

from artifacts.errors import TrimtabError
from artifacts.packing import Scheme
from calibration.grid import (
    amax_scales,
    dequantize,
    round_to_nearest,
    search_scales,
    to_stored,
)

INT4 = Scheme(4, 128)


def weights(n: int = 32, k: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def relative_mse(w: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> float:
    q = dequantize(round_to_nearest(w, scale, scheme), scale)
    return float((q - w).square().sum() / w.square().sum())


def test_search_reaches_the_published_error_on_gaussian_weights() -> None:
    w = weights(512, 1024)
    assert relative_mse(w, amax_scales(w, INT4), INT4) == pytest.approx(0.01374, rel=0.03)
    assert relative_mse(w, search_scales(w, INT4), INT4) == pytest.approx(0.01020, rel=0.03)


@pytest.mark.parametrize("scheme", [INT4, Scheme(4, 32), Scheme(8, 128), Scheme(4, -1)])
def test_search_finds_the_best_candidate_of_a_slow_loop(scheme: Scheme) -> None:
    w = weights(4)
    found = search_scales(w, scheme, points=6, low=0.5)
    size = w.shape[1] // found.shape[1]
    for row in range(4):
        for group in range(found.shape[1]):
            part = w[row, group * size : (group + 1) * size]
            top = part.abs().max() / scheme.code_max
            errors = {}
            for ratio in torch.linspace(1.0, 0.5, 6).tolist():
                scale = float((top * ratio).to(torch.bfloat16))
                codes = (part / scale).round().clamp(scheme.code_min, scheme.code_max)
                errors[scale] = float((codes * scale - part).square().sum())
            assert float(found[row, group]) == min(errors, key=errors.__getitem__)


def test_weighted_search_protects_the_inputs_that_count() -> None:
    w = weights()
    weight_k = torch.ones(256)
    weight_k[:16] = 1e4
    error_plain = dequantize(round_to_nearest(w, s := search_scales(w, INT4), INT4), s) - w
    s = search_scales(w, INT4, weight_k=weight_k)
    error = dequantize(round_to_nearest(w, s, INT4), s) - w
    assert error[:, :16].square().sum() < error_plain[:, :16].square().sum()
    uniform = search_scales(w, INT4, weight_k=torch.full((256,), 7.0))
    assert torch.equal(uniform, search_scales(w, INT4))


def test_scales_are_positive_bf16_whatever_the_weights() -> None:
    w = weights()
    w[3] = 0
    w[4, :128] = 0
    w[5] *= 1e-38
    for scale in (amax_scales(w, INT4), search_scales(w, INT4)):
        assert bool((scale > 0).all()) and bool(torch.isfinite(scale).all())
        assert torch.equal(scale.to(torch.bfloat16).float(), scale)
    assert bool((to_stored(torch.zeros(2, 2)) == 1).all())


def test_chunks_do_not_change_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights()
    whole = search_scales(w, INT4)
    monkeypatch.setattr("calibration.grid.CHUNK_ELEMENTS", 3 * 256)
    assert torch.equal(search_scales(w, INT4), whole)


def test_codes_stay_in_range_and_use_minus_eight() -> None:
    w = torch.tensor([[-1.0, 1.0, 0.5, -0.5] * 8])
    codes = round_to_nearest(w, torch.tensor([[0.1]]), Scheme(4, 32))
    assert codes.dtype is torch.int8
    assert codes[0, :4].tolist() == [-8, 7, 5, -5]


def test_group_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(TrimtabError, match="does not divide"):
        amax_scales(torch.ones(2, 320), INT4)
