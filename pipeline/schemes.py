"""What becomes of every tensor of the base and the drafter: its scheme, or why it stays.

Does: apply the recipe's sections to the names and shapes of a checkpoint; find group sizes that do
not fit, fused members that disagree and patterns that match nothing. Does not: compute anything.

Inputs: a TensorSource (headers suffice) and the recipe. Output: one `Planned` a tensor.

Invariant: every tensor of the source is in the list exactly once; none is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from artifacts.checkpoint import PACKED_SUFFIXES, TensorSource
from artifacts.errors import TrimtabError
from artifacts.names import (
    fused_groups,
    is_embedding,
    linear_modules,
    matches_any,
    role,
    strip_prefix,
)
from artifacts.scheme import Scheme, is_packed, packed_scheme

if TYPE_CHECKING:
    from pipeline.problems import Problems
    from pipeline.recipe import Recipe

BODY = re.compile(r"model\.layers\.\d+\.")
DRAFTER_MATRICES = re.compile(r"(fc|layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj)$")
SPLIT_INPUT = frozenset({"o_proj", "down_proj", "out_proj"})  # row parallel: K is divided


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A tensor (or the packed triple of a matrix) and what becomes of it.

    Attributes:
        name: of the matrix's module, or of the tensor.
        section: the recipe's section that decides: target, lm_head, embedding, mtp, drafter, or "".
        shape: logical shape.
        before, after: bytes on disk.
        scheme: what it is quantized to, None if it stays.
        reason: why it stays, or by what method it is quantized.
    """

    name: str
    section: str
    shape: tuple[int, ...]
    before: int
    after: int
    scheme: Scheme | None
    reason: str


def packed_bytes(n: int, k: int, scheme: Scheme) -> int:
    """Bytes of a packed triple: codes, bf16 scales, int64 shape."""
    groups = 1 if scheme.group_size == -1 else -(-k // scheme.group_size)
    return n * k * scheme.bits // 8 + 2 * n * groups + 16


def base_section(module: str) -> str:
    """The recipe's section that decides on a matrix of the base; "" for none."""
    if module == "lm_head":
        return "lm_head"
    if module.startswith("mtp."):
        return "mtp"
    if is_embedding(module) and strip_prefix(module).startswith("model."):
        return "embedding"
    return "target" if BODY.match(strip_prefix(module)) else ""


def base_scheme(module: str, recipe: Recipe) -> tuple[Scheme | None, str]:
    """(scheme, method) of a matrix of the base, or (None, why it stays in 16 bits)."""
    section = base_section(module)
    if section == "target":
        if any(matches_any(recipe.target.ignore, m) for m in (module, strip_prefix(module))):
            return None, "target.ignore"
        return Scheme(recipe.target.bits, recipe.target.group_size), "gptq"
    if section == "lm_head":
        return _of(recipe.lm_head.bits, recipe.lm_head.group_size, "lm_head.bits is 16")
    if section == "mtp":
        if recipe.mtp is None:
            return None, "mtp is null"
        return _of(recipe.mtp.bits, recipe.mtp.group_size, "mtp.bits is 16")
    if section == "embedding":
        if recipe.embedding.format == "keep":
            return None, "embedding.format is keep"
        return Scheme(8, recipe.embedding.group_size), "rtn"
    return None, "outside the decoder layers"


def _of(bits: int, group_size: int, why: str) -> tuple[Scheme | None, str]:
    return (None, why) if bits == 16 else (Scheme(bits, group_size), "gptq")


def plan_base(source: TensorSource, recipe: Recipe) -> list[Planned]:
    """What becomes of every tensor of the base, by name."""
    tables = {
        name.removesuffix(".weight")
        for name in source.names()
        if name.endswith(".weight") and is_embedding(name.removesuffix(".weight"))
    }
    matrices = {
        module: base_scheme(module, recipe) for module in {*linear_modules(source), *tables}
    }
    sections = {module: base_section(module) for module in matrices}
    return _plan(source, matrices, sections)


def plan_drafter(source: TensorSource, recipe: Recipe) -> list[Planned]:
    """What becomes of every tensor of the drafter: its layers' matrices and fc are quantized."""
    matrices: dict[str, tuple[Scheme | None, str]] = {}
    for module in linear_modules(source):
        if recipe.drafter is None or not DRAFTER_MATRICES.search(module):
            matrices[module] = None, "convolution or selector"
        else:
            section = recipe.drafter
            matrices[module] = _of(section.bits, section.group_size, "drafter.bits is 16")
    return _plan(source, matrices, dict.fromkeys(matrices, "drafter"))


def _plan(
    source: TensorSource,
    matrices: dict[str, tuple[Scheme | None, str]],
    sections: dict[str, str],
) -> list[Planned]:
    planned: list[Planned] = []
    for module, (scheme, reason) in matrices.items():
        section = sections[module]
        if is_packed(source, module):
            planned.append(_imported(source, module, section))
            continue
        info = source.info(f"{module}.weight")
        n, k = info.shape
        after = info.nbytes if scheme is None else packed_bytes(n, k, scheme)
        planned.append(
            Planned(
                name=module,
                section=section,
                shape=info.shape,
                before=info.nbytes,
                after=after,
                scheme=scheme,
                reason=reason,
            )
        )
    taken = {f"{module}.{leaf}" for module in matrices for leaf in ("weight", *PACKED_SUFFIXES)}
    for name in source.names():
        if name not in taken:
            info = source.info(name)
            planned.append(
                Planned(
                    name=name,
                    section="",
                    shape=info.shape,
                    before=info.nbytes,
                    after=info.nbytes,
                    scheme=None,
                    reason="not a matrix" if len(info.shape) != 2 else "not the weight of a Linear",
                )
            )
    return sorted(planned, key=lambda item: item.name)


def _imported(source: TensorSource, module: str, section: str) -> Planned:
    size = sum(
        source.info(f"{module}.{leaf}").nbytes
        for leaf in PACKED_SUFFIXES
        if f"{module}.{leaf}" in source
    )
    scheme, shape = packed_scheme(source, module)
    return Planned(
        name=module,
        section=section,
        shape=shape,
        before=size,
        after=size,
        scheme=scheme,
        reason="imported",
    )


def like(name: str) -> str:
    """A name with every number replaced by *, to group layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def check_fit(planned: Iterable[Planned], tensor_parallel: int, problems: Problems) -> None:
    """Problems for matrices their scheme does not fit, one line for all layers alike."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for item in planned:
        if item.scheme is None or len(item.shape) != 2:
            continue
        where, text = _misfit(item, item.scheme, tensor_parallel)
        if text:
            key = (item.section, like(item.name), where, text)
            groups.setdefault(key, []).append(item.name)
    for (section, _, where, text), names in sorted(groups.items()):
        more = f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""
        problems.add(
            f"{section}.{where}" if where != "tensor_parallel" else where,
            f"{names[0]}{more}: {text}",
            "choose a group size that divides it, or keep the matrix in 16 bits",
        )


def _misfit(item: Planned, scheme: Scheme, tensor_parallel: int) -> tuple[str, str]:
    """(key, text) of what does not fit, ("", "") if all does."""
    n, k = item.shape
    if scheme.group_size != -1 and k % scheme.group_size:
        return "group_size", f"K {k}, group size {scheme.group_size} does not divide it"
    try:
        scheme.groups(k, item.name)
    except TrimtabError as error:
        return "bits", error.message.removeprefix(f"{item.name}: ")
    if tensor_parallel > 1 and role(item.name) in SPLIT_INPUT:
        part = k / tensor_parallel
        if part % 1 or (scheme.group_size != -1 and part % scheme.group_size):
            return "tensor_parallel", (
                f"K {k} over {tensor_parallel} cards is {part:g}, "
                f"group size {scheme.group_size} does not divide it"
            )
    elif tensor_parallel > 1 and n % tensor_parallel and role(item.name) != "fc":
        return "tensor_parallel", f"N {n} is not divisible by {tensor_parallel} cards"
    return "", ""


def check_fused(planned: Iterable[Planned], problems: Problems) -> None:
    """Problems for members of one fused module that do not share one scheme."""
    schemes = {item.name: item for item in planned if len(item.shape) == 2}
    seen: set[str] = set()
    for group in fused_groups(schemes):
        found = [str(schemes[name].scheme or "16 bits") for name in group]
        if len(set(found)) > 1 and like(group[0]) not in seen:
            seen.add(like(group[0]))
            section = schemes[group[0]].section
            pairs = ", ".join(f"{name} {scheme}" for name, scheme in zip(group, found, strict=True))
            problems.add(
                f"{section}.ignore" if section == "target" else section,
                f"members of one fused module differ in scheme: {pairs}",
                "consumers load them as one matrix: give all of them one scheme",
            )


def check_ignore(source: TensorSource, recipe: Recipe, problems: Problems) -> None:
    """Problems for ignore patterns the user wrote that match no matrix of the body."""
    if "ignore" not in recipe.target.model_fields_set:
        return
    body = [m for m in linear_modules(source) if base_section(m) == "target"]
    for pattern in recipe.target.ignore:
        if not any(matches_any([pattern], m) for x in body for m in (x, strip_prefix(x))):
            problems.add(
                "target.ignore",
                f"{pattern!r} matches no matrix of the decoder layers",
                f"the names look like {body[0] if body else 'none'}",
            )
