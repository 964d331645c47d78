"""Integer matrices in the pack-quantized layout, and the one way to dequantize them.

Axes: n output rows, k inputs, g groups (k / group_size).
Covers packing codes, unpacking, dense rows, slicing rows, reading and writing the triple
`X.weight_packed` int32 [n, k * bits / 32], `X.weight_scale` [n, g], `X.weight_shape` int64 [2].
Does not cover choosing codes or scales (`calibration`), asymmetric or act-order layouts (refused),
or 3-D weights (refused). The bit layout is compressed-tensors': value + 2^(bits-1), first element
in the low bits; its functions do the packing.
Invariant: codes and scales survive pack, unpack and slice bit for bit, and `dense` equals
compressed-tensors' own dequantization bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from artifacts.checkpoint import TensorSource
from artifacts.errors import TrimtabError
from artifacts.scheme import Scheme, is_packed, packed_scheme

__all__ = [
    "PackedMatrix",
    "Scheme",
    "is_packed",
    "load_matrix",
    "pack",
    "packed_scheme",
    "unpack",
]

CHUNK_ELEMENTS = 1 << 24  # of int32 work space while packing or unpacking


@cache
def _library() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """compressed-tensors' (pack, unpack); the import path changed between 0.17 and 0.20."""
    import importlib

    for path in (
        "compressed_tensors.compressors.pack_quantized.helpers",
        "compressed_tensors.compressors.pack_quantized",
        "compressed_tensors.compressors.quantized_compressors.pack_quantized",
    ):
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "pack_to_int32") and hasattr(module, "unpack_from_int32"):
            return module.pack_to_int32, module.unpack_from_int32
    raise TrimtabError(
        "the installed compressed-tensors has no pack_to_int32 where 0.17 to 0.20 keep it",
        hint='pip install "compressed-tensors>=0.17,<0.21"',
    )


def pack(codes_nk: Tensor, bits: int) -> Tensor:
    """int8 codes [n, k] as int32 words [n, k * bits / 32], in row chunks of bounded work space."""
    if codes_nk.dtype is not torch.int8 or codes_nk.ndim != 2:
        raise TrimtabError(
            f"codes are int8 [n, k], not {codes_nk.dtype} {list(codes_nk.shape)}; "
            "pack a stack of matrices one by one"
        )
    Scheme(bits, -1).groups(codes_nk.shape[1])
    step = max(1, CHUNK_ELEMENTS // codes_nk.shape[1])
    starts = range(0, codes_nk.shape[0], step)
    parts = [_library()[0](codes_nk[start : start + step], bits) for start in starts]
    if not parts:
        return codes_nk.new_empty((0, codes_nk.shape[1] * bits // 32), dtype=torch.int32)
    return torch.cat(parts).contiguous()


def unpack(packed: Tensor, bits: int, k: int) -> Tensor:
    """The inverse of `pack`: int8 [n, k]."""
    step = max(1, CHUNK_ELEMENTS // max(k, 1))
    parts = []
    for start in range(0, packed.shape[0], step):
        part = packed[start : start + step]
        parts.append(_library()[1](part, bits, torch.Size((part.shape[0], k))))
    return torch.cat(parts) if parts else packed.new_empty((0, k), dtype=torch.int8)


@dataclass(frozen=True)
class PackedMatrix:
    """A quantized matrix [n, k] as stored.

    packed: int32 [n, k * bits / 32]; scale: [n, groups], bf16 in all we write (an imported body
    keeps its own float dtype); group_size -1: one scale a row.
    """

    packed: Tensor
    scale: Tensor
    shape: tuple[int, int]
    bits: int
    group_size: int

    @classmethod
    def from_codes(
        cls, codes_nk: Tensor, scale: Tensor, scheme: Scheme, *, name: str = "matrix"
    ) -> PackedMatrix:
        """Packs int8 codes [n, k] with scales [n, groups] that are bf16 or exact in bf16.

        Raises TrimtabError when a code is outside the scheme's range, when a scale is not finite or
        would change in bf16 (round it before the codes are computed), or when a shape is wrong.
        """
        if codes_nk.ndim != 2:
            raise TrimtabError(f"{name}: codes of {codes_nk.ndim} dimensions, 2 wanted")
        n, k = codes_nk.shape
        groups = scheme.groups(k, name)
        if tuple(scale.shape) != (n, groups):
            raise TrimtabError(f"{name}: scales {list(scale.shape)}, wanted {[n, groups]}")
        stored = scale.to(torch.bfloat16)
        if not bool(torch.isfinite(stored).all()):
            raise TrimtabError(f"{name}: a scale is not finite")
        if not torch.equal(stored.to(scale.dtype), scale):
            raise TrimtabError(f"{name}: scales must be rounded to bf16 before the codes are made")
        if n and (int(codes_nk.min()) < scheme.code_min or int(codes_nk.max()) > scheme.code_max):
            raise TrimtabError(
                f"{name}: codes from {int(codes_nk.min())} to {int(codes_nk.max())} do not fit "
                f"int{scheme.bits}"
            )
        packed = pack(codes_nk.to(torch.int8), scheme.bits)
        return cls(packed, stored.contiguous(), (n, k), scheme.bits, scheme.group_size)

    @classmethod
    def from_source(cls, source: TensorSource, module: str) -> PackedMatrix:
        """Reads a triple; bits and group size follow from the shapes, which must agree.

        Raises TrimtabError when a part is missing, of the wrong dtype or shape, or when the matrix
        is asymmetric or act-ordered.
        """
        scheme, shape = packed_scheme(source, module)
        return cls(
            source.get(f"{module}.weight_packed"),
            source.get(f"{module}.weight_scale"),
            shape,
            scheme.bits,
            scheme.group_size,
        )

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.bits, self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes that the codes and scales take."""
        return (
            self.packed.numel() * self.packed.element_size()
            + self.scale.numel() * self.scale.element_size()
        )

    def to(self, device: torch.device | str) -> PackedMatrix:
        """The same matrix on another device."""
        return PackedMatrix(
            self.packed.to(device), self.scale.to(device), self.shape, self.bits, self.group_size
        )

    def codes(self) -> Tensor:
        """int8 [n, k]."""
        return unpack(self.packed, self.bits, self.shape[1])

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[n, k] = code * scale, multiplied in fp32 (exact there for bf16 scales), then cast."""
        n, k = self.shape
        out = torch.empty((n, k), dtype=dtype, device=self.packed.device)
        step = max(1, CHUNK_ELEMENTS // k)
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            codes = unpack(self.packed[rows], self.bits, k).to(torch.float32)
            scale = self.scale[rows].to(torch.float32)
            grouped = codes.view(codes.shape[0], scale.shape[1], -1) * scale.unsqueeze(-1)
            out[rows] = grouped.view(codes.shape[0], k).to(dtype)
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dense rows of int64 ids of any shape: [*ids.shape, k]. Only these rows are unpacked."""
        return self.slice_rows(ids.reshape(-1)).dense(dtype).view(*ids.shape, self.shape[1])

    def slice_rows(self, ids: Tensor) -> PackedMatrix:
        """The matrix of the given rows (int64 [m], repeats allowed), codes and scales bit for bit.

        Raises IndexError for an id outside 0..n-1; a negative id never counts from the end.
        """
        n = self.shape[0]
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n):
            raise IndexError(f"row ids {int(ids.min())}..{int(ids.max())} outside 0..{n - 1}")
        ids = ids.to(self.packed.device)
        return PackedMatrix(
            self.packed.index_select(0, ids),
            self.scale.index_select(0, ids),
            (ids.numel(), self.shape[1]),
            self.bits,
            self.group_size,
        )

    def tensors(self, module: str) -> dict[str, Tensor]:
        """The triple under its names in a checkpoint."""
        return {
            f"{module}.weight_packed": self.packed,
            f"{module}.weight_scale": self.scale,
            f"{module}.weight_shape": torch.tensor(self.shape, dtype=torch.int64),
        }


def load_matrix(
    source: TensorSource,
    module: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The dense weight [n, k] of a module, dequantized if it is stored packed."""
    if is_packed(source, module):
        return PackedMatrix.from_source(source, module).to(device).dense(dtype)
    weight = source.get(f"{module}.weight")
    if weight.ndim != 2:
        raise TrimtabError(f"{module}: weight {list(weight.shape)} is not a matrix")
    return weight.to(device=device, dtype=dtype)
