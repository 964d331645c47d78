"""Are the group scales fit for every consumer? Finite, positive, in the dtype's normal range.

In: a TensorSource with packed matrices. Out: problems, one line each. Does not cover whether the
codes are good (the numeric gates).
Invariant: an empty list means that reading scales unsigned, in bf16 or flushed of subnormals gives
the same matrix.
"""

from __future__ import annotations

from artifacts.checkpoint import TensorSource
from artifacts.errors import TrimtabError
from artifacts.names import packed_modules
from artifacts.scheme import packed_scheme


def check_scales(made: TensorSource, source: TensorSource | None) -> list[str]:
    """Problems of the scales of every packed matrix.

    Scales are bf16, or in the source's own dtype where the source was packed already. Counts, in
    this order: NaN or infinite, negative (-0.0 too, its sign bit is set), zero, subnormal. Where
    the source's weights are at hand, a group whose codes are all 0 while its weights are not is a
    problem too: one scale was shared by inputs of very different size.
    """
    problems: list[str] = []
    for module in packed_modules(made):
        name = f"{module}.weight_scale"
        if name not in made:
            continue  # the agreement reports it
        problems += _dtype(made, source, name) + _values(made, name)
        if source is not None and f"{module}.weight" in source:
            problems += _empty_groups(made, source, module)
    return problems


def _dtype(made: TensorSource, source: TensorSource | None, name: str) -> list[str]:
    dtype = made.info(name).dtype
    imported = source is not None and name in source and source.info(name).dtype == dtype
    return [] if dtype == "BF16" or imported else [f"{name}: {dtype}, wanted BF16"]


def _values(made: TensorSource, name: str) -> list[str]:
    import torch

    scale = made.get(name)
    if not scale.is_floating_point():
        return []
    tiny = torch.finfo(scale.dtype).tiny
    finite = torch.isfinite(scale)
    faults = {
        "NaN or infinite": ~finite,
        "negative": finite & torch.signbit(scale),
        "zero": scale == 0,
        "subnormal": finite & (scale != 0) & (scale.abs().float() < tiny),
    }
    problems = []
    for fault, mask in faults.items():
        count = int(mask.sum())
        if count:
            row, group = (int(value) for value in mask.nonzero()[0])
            problems.append(
                f"{name}: {count} of {scale.numel()} scales {fault}, first at [{row}, {group}]"
            )
    return problems


def _empty_groups(made: TensorSource, source: TensorSource, module: str) -> list[str]:
    """Groups whose packed words all hold code 0, though the source's weights there are not 0."""
    import torch

    try:
        scheme, (n, k) = packed_scheme(made, module)
    except TrimtabError:
        return []
    zero = {4: -2004318072, 8: -2139062144}[scheme.bits]  # 0x88888888, 0x80808080 as int32
    groups = scheme.groups(k)
    packed = made.get(f"{module}.weight_packed")
    empty = (packed.view(n, groups, -1) == zero).all(-1)
    if not bool(empty.any()):
        return []
    weight = source.get(f"{module}.weight")
    if tuple(weight.shape) != (n, k):
        return []
    lost = empty & (weight.view(n, groups, -1) != 0).any(-1)
    count = int(lost.sum())
    if not count:
        return []
    row, group = (int(value) for value in torch.nonzero(lost)[0])
    return [
        f"{module}: {count} groups are all zero and their weights are not, first [{row}, {group}]"
    ]
