"""About how much disk and memory each stage will need, from shapes alone.

Does: sum bytes by simple rules, which the functions state. Does not: measure (telemetry does), or
estimate time.

Symbols: n and k are a matrix's rows and columns; a Hessian takes k * k fp32 numbers.
Invariant: estimates are printed as such; they decide nothing but whether there is room at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.recipe import Recipe
from pipeline.schemes import Planned, like, packed_bytes
from pipeline.stage import Environment

WORD = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Need:
    """Bytes that a stage writes, and its peak resident memory in bytes."""

    disk: int = 0
    memory: int = 0


def _numbers(planned: Iterable[Planned]) -> int:
    total = 0
    for item in planned:
        count = 1
        for length in item.shape:
            count *= length
        total += count
    return total


def _after(planned: Iterable[Planned], section: str) -> int:
    return sum(p.after for p in planned if p.section == section and p.scheme is not None)


def _hessians(planned: Iterable[Planned], sections: Sequence[str]) -> int:
    """fp32 Hessians of all quantized matrices of the sections, those that share inputs once."""
    shared: dict[tuple[str, int], int] = {}
    for item in planned:
        if item.section in sections and item.scheme is not None and len(item.shape) == 2:
            k = item.shape[1]
            shared[item.name.rpartition(".")[0], k] = 4 * k * k
    return sum(shared.values())


def _largest_solve(planned: Iterable[Planned], section: str) -> int:
    """Weights, codes and result in fp32 beside Hessian, factor and a copy of it."""
    return max(
        (
            12 * p.shape[0] * p.shape[1] + 12 * p.shape[1] ** 2
            for p in planned
            if p.section == section and p.scheme is not None and len(p.shape) == 2
        ),
        default=0,
    )


def _layer_hessians(planned: Iterable[Planned]) -> int:
    """Hessians of one layer of the body, each matrix with its own."""
    layer = {like(p.name): 4 * p.shape[1] ** 2 for p in planned if _of_body(p)}
    return sum(layer.values())


def _of_body(item: Planned) -> bool:
    return item.section == "target" and item.scheme is not None and len(item.shape) == 2


def needs(
    recipe: Recipe,
    environment: Environment,
    base: list[Planned],
    drafter: list[Planned],
    fetched: int,
    draft_rows: int,
) -> dict[str, Need]:
    """Need by stage. `fetched`: bytes that `fetch` must copy or download (not link)."""
    word = WORD[environment.dtype]
    target = [p for p in base if not p.name.startswith("mtp.")]
    weights, mtp = word * _numbers(target), word * _numbers(base) - word * _numbers(target)
    draft = word * _numbers(drafter)
    hidden = next((p.shape[1] for p in base if p.section == "embedding"), 0)
    rows = recipe.target.samples * recipe.target.sequence_length
    states = word * recipe.capture.heldout_rows * hidden
    head = _after(base, "lm_head")
    shipped = sum(p.after for p in [*base, *drafter])
    slices = [p for p in base if p.section == "lm_head" and len(p.shape) == 2 and p.scheme]
    draft_head = sum(packed_bytes(draft_rows, p.shape[1], p.scheme) for p in slices if p.scheme)
    captured = _hessians([*base, *drafter], ("lm_head", "mtp", "drafter"))
    return {
        "fetch": Need(disk=fetched),
        "target": Need(
            disk=_after(base, "target") if recipe.target.source == "quantize" else 0,
            memory=weights + _layer_hessians(base) + 2 * word * rows * hidden,
        ),
        "signs": Need(disk=_after(base, "target"), memory=weights + _layer_hessians(base)),
        "traffic": Need(memory=weights),
        "capture": Need(
            disk=captured + states, memory=weights + mtp + draft + captured + 2 * states
        ),
        "lm-head": Need(disk=head, memory=_largest_solve(base, "lm_head")),
        "embedding": Need(disk=_after(base, "embedding")),
        "mtp": Need(disk=_after(base, "mtp"), memory=_largest_solve(base, "mtp")),
        "draft-vocab": Need(disk=draft_head, memory=head),
        "drafter": Need(disk=_after(drafter, "drafter"), memory=_largest_solve(drafter, "drafter")),
        "assemble": Need(disk=shipped + draft_head, memory=min(shipped, 8 << 30)),
        "validate": Need(memory=2 * weights + mtp + draft + 2 * states),
        "publish": Need(disk=shipped + draft_head),
    }
