"""The integer weight schemes that we write. Needs no torch: the planner asks it, too.

Covers the pair (bits, group size), whether it fits a matrix, and which one a stored triple has.
Does not cover codes (`packing`).
Invariant: a scheme that fits here packs and loads everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from artifacts.checkpoint import TensorSource, small_ints
from artifacts.errors import TrimtabError

BITS = (4, 8)


@dataclass(frozen=True)
class Scheme:
    """A symmetric integer weight scheme: bits 4 or 8, group_size > 0, or -1 for one scale a row."""

    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise TrimtabError(f"bits {self.bits!r} is not 4 or 8", hint="change the recipe")
        if self.group_size != -1 and self.group_size <= 0:
            raise TrimtabError(
                f"group size {self.group_size!r} is neither positive nor -1 (one scale a row)",
                hint="change the recipe",
            )

    @property
    def code_min(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def code_max(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def groups(self, k: int, name: str = "matrix") -> int:
        """Scales a row of k inputs; TrimtabError when group size or packing do not fit."""
        if self.group_size != -1 and k % self.group_size:
            raise TrimtabError(
                f"{name}: group size {self.group_size} does not divide its {k} inputs",
                hint="choose a group size that divides them, or ignore this module",
            )
        if k == 0 or k % (32 // self.bits):
            raise TrimtabError(
                f"{name}: {k} inputs do not fill int32 words of {32 // self.bits} codes",
                hint="ignore this module",
            )
        return 1 if self.group_size == -1 else k // self.group_size

    def __str__(self) -> str:
        return f"int{self.bits} " + ("channel" if self.group_size == -1 else f"g{self.group_size}")


def is_packed(source: TensorSource, module: str) -> bool:
    """Whether the matrix is stored as a packed triple."""
    return f"{module}.weight_packed" in source


def packed_scheme(source: TensorSource, module: str) -> tuple[Scheme, tuple[int, int]]:
    """(scheme, (n, k)) of a stored triple, from its dtypes, shapes and `weight_shape`, all checked.

    Raises TrimtabError naming the module and what does not fit.
    """

    def bad(what: str) -> TrimtabError:
        return TrimtabError(f"{module}: {what}", hint="quantize or fetch this checkpoint again")

    for leaf in ("weight_packed", "weight_scale", "weight_shape"):
        if f"{module}.{leaf}" not in source:
            raise bad(f"its {leaf} is missing")
    for leaf in ("weight_zero_point", "weight_g_idx"):
        if f"{module}.{leaf}" in source:
            raise bad(f"has a {leaf}; only symmetric weights without act-order are supported")
    packed, scale, stored = (
        source.info(f"{module}.{leaf}")
        for leaf in ("weight_packed", "weight_scale", "weight_shape")
    )
    if packed.dtype != "I32" or len(packed.shape) != 2:
        raise bad(f"weight_packed is {packed.dtype}{list(packed.shape)}, wanted I32 [n, words]")
    if scale.dtype not in ("BF16", "F16", "F32") or len(scale.shape) != 2:
        raise bad(f"weight_scale is {scale.dtype}{list(scale.shape)}, wanted floats [n, groups]")
    if stored.dtype not in ("I64", "I32") or stored.shape != (2,):
        raise bad(f"weight_shape is {stored.dtype}{list(stored.shape)}, wanted I64 [2]")
    n, k = small_ints(source, f"{module}.weight_shape")
    words, groups = packed.shape[1], scale.shape[1]
    if packed.shape[0] != n or scale.shape[0] != n:
        raise bad(
            f"weight_shape says {n} rows, packed has {packed.shape[0]}, scale {scale.shape[0]}"
        )
    bits = words * 32 // k if k > 0 else 0
    if k <= 0 or words * 32 != bits * k or bits not in BITS:
        raise bad(f"{words} int32 words a row do not hold {k} codes of 4 or 8 bits")
    if groups < 1 or k % groups:
        raise bad(f"{groups} scales a row do not divide its {k} inputs")
    return Scheme(bits, -1 if groups == 1 else k // groups), (n, k)
