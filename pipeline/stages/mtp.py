"""mtp: the eight matrices of the MTP head to int4 or int8, each from its own inputs.

Leaves packed.safetensors and ledger.json. Norms stay as they are.
"""

from __future__ import annotations

from typing import Any

from artifacts.errors import TrimtabError
from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import (
    BASE,
    HESSIANS,
    error_summary,
    solve_matrices,
    tensors_at,
    write_solved,
)


class MtpStage(BaseStage):
    """One solve a matrix."""

    name = "mtp"

    def wanted(self, recipe: Recipe) -> str:
        """With an MTP head below 16 bits."""
        if recipe.mtp is None:
            return "the recipe has no mtp"
        return "" if recipe.mtp.bits < 16 else "mtp.bits is 16: the head is kept"

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The base's head and its Hessians."""
        return (BASE, HESSIANS)

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """Bits and group size; the depth belongs to measuring."""
        return {} if recipe.mtp is None else recipe.mtp.model_dump(mode="json", exclude={"depth"})

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Solve and write."""
        from artifacts.checkpoint import Checkpoint
        from artifacts.names import linear_modules
        from artifacts.scheme import Scheme
        from calibration import hessian

        base = Checkpoint.open(ctx.inputs[BASE])
        modules = [name for name in linear_modules(base) if name.startswith("mtp.")]
        if not modules:
            raise TrimtabError(
                "the base has no mtp.* matrix to quantize",
                hint="set mtp: null in the recipe, or take a base with its MTP head",
            )
        sums = hessian.load(tensors_at(ctx, HESSIANS))
        scheme = Scheme(ctx.config["bits"], ctx.config["group_size"])
        solved = solve_matrices(ctx, base, sums, {name: name for name in modules}, scheme)
        write_solved(ctx.out, solved)
        return error_summary(solved)


STAGE = MtpStage()
