"""Sums of x x^T."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.checkpoint import sha256_file
from artifacts.errors import TrimtabError
from calibration import hessian
from calibration.hessian import HessianSum

K = 48


def rows(t: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(t, K, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def brute_force(x: torch.Tensor) -> np.ndarray:
    values = x.double().numpy()
    total = np.zeros((K, K))
    for row in values:
        total += np.outer(row, row)
    return total


def relative_error(total: HessianSum, x: torch.Tensor) -> float:
    wanted = brute_force(x)
    return float(np.linalg.norm(total.sum_kk.double().numpy() - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sum_equals_brute_force_in_float64(dtype: torch.dtype) -> None:
    x = rows(700).to(dtype)
    total = HessianSum("fc", K)
    for part in x.split(97):
        total.add(part)
    assert total.rows == 700
    assert relative_error(total, x) < 1e-5


def test_leading_axes_are_rows() -> None:
    total = HessianSum("fc", K)
    total.add(rows(60).reshape(3, 20, K))
    assert total.rows == 60
    assert relative_error(total, rows(60)) < 1e-5


@pytest.mark.parametrize("split", [1, 512, 1000])
def test_two_workers_add_up_to_one(split: int) -> None:
    x = rows(1000)
    x[512:] *= 5  # the workers' rows differ, so averaging means would show
    parts = (HessianSum("fc", K), HessianSum("fc", K))
    parts[0].add(x[:split])
    parts[1].add(x[split:])
    parts[0].merge(parts[1])
    assert parts[0].rows == 1000
    assert relative_error(parts[0], x) < 1e-5
    with pytest.raises(TrimtabError, match="Hessian of 8"):
        parts[0].merge(HessianSum("other", 8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_row_that_is_not_finite_is_refused_with_its_prompt(value: float) -> None:
    total = HessianSum("model.layers.3.mlp.down_proj", K)
    total.add(rows(10))
    before = total.sum_kk.clone()
    bad = rows(6)
    bad[4, 7] = value
    with pytest.raises(TrimtabError, match=r"model\.layers\.3\.mlp\.down_proj: prompt chat-9"):
        total.add(bad, ["chat-1", "chat-1", "chat-2", "chat-2", "chat-9", "chat-9"])
    assert total.rows == 10
    assert torch.equal(total.sum_kk, before)


def test_matrices_that_read_the_same_rows_share_one_product() -> None:
    x, q, k = rows(50), HessianSum("q_proj", K), HessianSum("k_proj", K)
    product = q.product(x)
    for total in (q, k):
        total.add_product(*product)
    assert torch.equal(q.sum_kk, k.sum_kk) and q.rows == k.rows == 50
    assert relative_error(q, x) < 1e-5


def test_large_activations_do_not_overflow() -> None:
    total = HessianSum("fc", K)
    total.add(torch.full((2000, K), 300.0, dtype=torch.float16))
    assert total.sum_kk.dtype is torch.float32
    assert float(total.sum_kk[0, 0]) == pytest.approx(2000 * 300.0**2)


def test_wrong_rows_are_refused() -> None:
    with pytest.raises(TrimtabError, match=r"wanted \[t, 48\]"):
        HessianSum("fc", K).add(torch.zeros(3, K + 1))
    with pytest.raises(TrimtabError, match="int64"):
        HessianSum("fc", K).add(torch.zeros(3, K, dtype=torch.int64))
    with pytest.raises(TrimtabError, match="2 prompt ids for 3 rows"):
        HessianSum("fc", K).add(torch.zeros(3, K), ["a", "b"])


def test_check_names_what_is_wrong() -> None:
    total = HessianSum("x", K)
    with pytest.raises(TrimtabError, match=r"o_proj: rows_seen=0"):
        total.check("o_proj")
    total.add(torch.zeros(5, K))
    with pytest.raises(TrimtabError, match="o_proj: its Hessian has trace 0 after 5 rows"):
        total.check("o_proj")
    total.add(rows(5))
    total.check()
    total.sum_kk[0, 1] += 1e3
    with pytest.raises(TrimtabError, match="not symmetric"):
        total.check()


def test_save_and_load_keep_bits_rows_source_and_sharing(tmp_path: Path) -> None:
    shared, own = HessianSum("attn", K, source="traffic"), HessianSum("fc", K, source="prompts")
    shared.add(rows(40))
    own.add(rows(9, 1))
    sums = {"q_proj": shared, "k_proj": shared, "fc": own}
    hessian.save(tmp_path / "a.safetensors", sums)
    hessian.save(tmp_path / "b.safetensors", dict(reversed(sums.items())))
    assert sha256_file(tmp_path / "a.safetensors") == sha256_file(tmp_path / "b.safetensors")
    loaded = hessian.load(tmp_path / "a.safetensors")
    assert sorted(loaded) == ["fc", "k_proj", "q_proj"]
    assert loaded["q_proj"] is loaded["k_proj"]
    assert torch.equal(loaded["q_proj"].sum_kk, shared.sum_kk)
    assert (loaded["q_proj"].rows, loaded["q_proj"].source) == (40, "traffic")
    assert (loaded["fc"].rows, loaded["fc"].source) == (9, "prompts")


def test_load_refuses_other_files(tmp_path: Path) -> None:
    from artifacts.checkpoint import write_single

    write_single(tmp_path / "x.safetensors", {"a": torch.zeros(2, 2)})
    with pytest.raises(TrimtabError, match="not a file of Hessians"):
        hessian.load(tmp_path / "x.safetensors")
