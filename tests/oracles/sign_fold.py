"""The obvious sign fold: one code at a time."""

from __future__ import annotations


def fold_slowly(
    codes: list[int], scale: float, *, lowest: int = -8, highest: int = 7
) -> tuple[list[int], float, int]:
    """(codes, scale, saturated) of one group."""
    if scale >= 0:
        return list(codes), abs(scale), 0
    turned = [-code for code in codes]
    saturated = sum(code > highest for code in turned)
    assert all(lowest < code for code in turned)
    return [min(code, highest) for code in turned], -scale, saturated
