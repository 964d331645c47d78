"""The obvious packing: one code at a time, in Python integers.

Axes: n rows, k codes a row. Layout: value + 2^(bits-1), first code in the low bits, 32 / bits codes
an int32 word, along k.
"""

from __future__ import annotations

import torch


def pack_slowly(codes_nk: list[list[int]], bits: int) -> torch.Tensor:
    """int32 [n, k * bits / 32] from codes in -2^(bits-1) .. 2^(bits-1) - 1."""
    per_word = 32 // bits
    rows = []
    for row in codes_nk:
        words = []
        for start in range(0, len(row), per_word):
            word = 0
            for place, code in enumerate(row[start : start + per_word]):
                word |= (code + (1 << (bits - 1))) << (place * bits)
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def dequantize_slowly(
    codes_nk: list[list[int]], scale_ng: list[list[float]], group_size: int
) -> list[list[float]]:
    """code * scale of its group, in Python floats (exact for bf16 scales)."""
    return [
        [code * scale[i // group_size] for i, code in enumerate(row)]
        for row, scale in zip(codes_nk, scale_ng, strict=True)
    ]
