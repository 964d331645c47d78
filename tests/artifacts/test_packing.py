"""Packing: round trips over shapes and codes, the bit layout, dequantization, slicing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.checkpoint import load_single, write_single
from artifacts.errors import TrimtabError
from artifacts.packing import PackedMatrix, Scheme, is_packed, load_matrix, pack, unpack
from tests.oracles.packing import dequantize_slowly, pack_slowly


@st.composite
def matrices(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """(bits, group size, codes [n, k]) with every code of the scheme possible."""
    bits = draw(st.sampled_from((4, 8)))
    group = draw(st.sampled_from((8, 16, 32, -1)))
    n = draw(st.integers(1, 5))
    k = draw(st.integers(1, 4)) * (group if group > 0 else 8)
    code = st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    codes = draw(st.lists(st.lists(code, min_size=k, max_size=k), min_size=n, max_size=n))
    return bits, group, codes


@given(matrices(), st.integers(0, 2**31 - 1))
@settings(max_examples=60, deadline=None)
def test_c62_round_trip_layout_and_dense(case: tuple[int, int, list[list[int]]], seed: int) -> None:
    bits, group, rows = case
    codes = torch.tensor(rows, dtype=torch.int8)
    n, k = codes.shape
    scheme = Scheme(bits, group)
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn((n, scheme.groups(k)), generator=generator).bfloat16()
    matrix = PackedMatrix.from_codes(codes, scale, scheme)
    assert torch.equal(matrix.packed, pack_slowly(rows, bits))
    assert torch.equal(matrix.codes(), codes)
    size = k if group == -1 else group
    assert matrix.dense().tolist() == dequantize_slowly(rows, scale.tolist(), size)


@pytest.mark.parametrize("shape", [(1, 8), (3, 24), (256, 256)])
def test_c62_all_sixteen_codes_and_the_sign_bit_survive(shape: tuple[int, int]) -> None:
    n, k = shape
    codes = (7 - torch.arange(n * k).view(n, k) % 16).to(torch.int8)
    packed = pack(codes, 4)
    assert packed.shape == (n, k // 8)
    assert packed.dtype == torch.int32
    assert bool((packed < 0).any()), "a code >= 0 in the top nibble sets the sign bit"
    assert torch.equal(unpack(packed, 4, k), codes)


@pytest.mark.parametrize("shape", [(5, 12), (2, 4, 16), (4, 0)])
def test_c62_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    codes = torch.zeros(shape, dtype=torch.int8)
    with pytest.raises(TrimtabError, match=r"int32 words|int8 \[n, k\]"):
        pack(codes, 4)
    with pytest.raises(TrimtabError):
        PackedMatrix.from_codes(codes, torch.ones(shape[0], 1), Scheme(4, -1))


def test_empty_and_chunked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import artifacts.packing as packing

    codes = torch.randint(-8, 8, (37, 64), dtype=torch.int8)
    whole = pack(codes, 4)
    matrix = PackedMatrix(whole, torch.rand(37, 2).bfloat16(), (37, 64), 4, 32)
    dense = matrix.dense()
    monkeypatch.setattr(packing, "CHUNK_ELEMENTS", 200)
    assert torch.equal(pack(codes, 4), whole)
    assert torch.equal(unpack(whole, 4, 64), codes)
    assert torch.equal(matrix.dense(), dense)
    assert pack(codes[:0], 4).shape == (0, 8)
    assert unpack(whole[:0], 4, 64).shape == (0, 64)


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, -1), (8, 32), (8, -1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_is_what_compressed_tensors_decompresses(
    bits: int, group: int, dtype: torch.dtype
) -> None:
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    from artifacts.quant_config import build

    scheme = Scheme(bits, group)
    n, k = 24, 256
    generator = torch.Generator().manual_seed(bits + group)
    low, high = scheme.code_min, scheme.code_max + 1
    codes = torch.randint(low, high, (n, k), dtype=torch.int8, generator=generator)
    scale = (torch.randn((n, scheme.groups(k)), generator=generator) / 16).bfloat16()
    matrix = PackedMatrix.from_codes(codes, scale, scheme)
    state = {name.removeprefix("m."): tensor for name, tensor in matrix.tensors("m").items()}
    state["weight_scale"] = state["weight_scale"].to(dtype)
    declared = build({"g": (["Linear"], scheme)}, [])["config_groups"]["g"]
    theirs = PackedQuantizationCompressor.decompress(state, QuantizationScheme(**declared))
    assert theirs["weight"].dtype == dtype
    assert torch.equal(matrix.dense(dtype), theirs["weight"])


def test_rows_and_slices_are_exact() -> None:
    codes = torch.randint(-128, 128, (64, 32), dtype=torch.int8)
    matrix = PackedMatrix.from_codes(codes, torch.rand(64, 4).bfloat16(), Scheme(8, 8))
    ids = torch.tensor([[0, 63], [5, 5]])
    assert torch.equal(matrix.rows(ids), matrix.dense()[ids])
    part = matrix.slice_rows(torch.tensor([63, 1]))
    assert part.shape == (2, 32)
    assert torch.equal(part.packed, matrix.packed[[63, 1]])
    assert torch.equal(part.scale, matrix.scale[[63, 1]])
    for wrong in (64, -1):
        with pytest.raises(IndexError, match=r"outside 0\.\.63"):
            matrix.rows(torch.tensor([3, wrong]))


def test_from_codes_refuses_what_would_change_silently() -> None:
    codes = torch.zeros((2, 16), dtype=torch.int8)
    with pytest.raises(TrimtabError, match="rounded to bf16"):
        PackedMatrix.from_codes(codes, torch.full((2, 1), 0.1), Scheme(4, -1))
    with pytest.raises(TrimtabError, match="not finite"):
        PackedMatrix.from_codes(codes, torch.full((2, 1), float("nan")), Scheme(4, -1))
    with pytest.raises(TrimtabError, match="do not fit int4"):
        PackedMatrix.from_codes(codes + 8, torch.ones(2, 1), Scheme(4, -1))
    with pytest.raises(TrimtabError, match="scales \\[2, 2\\], wanted \\[2, 1\\]"):
        PackedMatrix.from_codes(codes, torch.ones(2, 2), Scheme(4, -1))


def test_c59_a_group_size_that_does_not_divide_is_named() -> None:
    with pytest.raises(TrimtabError, match="fc: group size 128 does not divide its 320 inputs"):
        Scheme(4, 128).groups(320, "fc")
    for wrong in (0, -2):
        with pytest.raises(TrimtabError, match="group size"):
            Scheme(4, wrong)
    with pytest.raises(TrimtabError, match="bits 3"):
        Scheme(3, 128)


def test_from_source_reads_and_checks(tmp_path) -> None:
    codes = torch.randint(-8, 8, (6, 256), dtype=torch.int8)
    matrix = PackedMatrix.from_codes(codes, torch.rand(6, 2).bfloat16(), Scheme(4, 128))
    good = matrix.tensors("a.q")
    write_single(tmp_path / "good.safetensors", {**good, "b.weight": torch.ones(3, 4)})
    source = load_single(tmp_path / "good.safetensors")
    read = PackedMatrix.from_source(source, "a.q")
    assert (read.bits, read.group_size, read.shape) == (4, 128, (6, 256))
    assert torch.equal(load_matrix(source, "a.q"), matrix.dense())
    assert torch.equal(load_matrix(source, "b", torch.bfloat16), torch.ones(3, 4).bfloat16())
    assert is_packed(source, "a.q") and not is_packed(source, "b")
    damages = {
        "its weight_scale is missing": {k: v for k, v in good.items() if "scale" not in k},
        "do not hold 250": {**good, "a.q.weight_shape": torch.tensor([6, 250])},
        "weight_shape says 7 rows": {**good, "a.q.weight_shape": torch.tensor([7, 256])},
        "3 scales a row": {**good, "a.q.weight_scale": torch.ones(6, 3).bfloat16()},
        "zero_point": {**good, "a.q.weight_zero_point": torch.zeros(6, 2, dtype=torch.int32)},
        "wanted I32": {**good, "a.q.weight_packed": good["a.q.weight_packed"].long()},
    }
    for expected, tensors in damages.items():
        write_single(tmp_path / "bad.safetensors", tensors)
        with pytest.raises(TrimtabError, match=expected) as caught:
            PackedMatrix.from_source(load_single(tmp_path / "bad.safetensors"), "a.q")
        assert "a.q" in str(caught.value)
