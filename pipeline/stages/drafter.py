"""drafter: the block drafter to W4A16 or W8A16, each matrix from its own inputs.

Quantizes fc and the seven matrices of each layer; convolutions, selector and norms stay as they
are, since consumers read them in 16 bits. Leaves packed.safetensors and ledger.json.
"""

from __future__ import annotations

from typing import Any

from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import (
    DRAFTER,
    HESSIANS,
    error_summary,
    solve_matrices,
    tensors_at,
    write_solved,
)


class DrafterStage(BaseStage):
    """One solve a matrix."""

    name = "drafter"

    def wanted(self, recipe: Recipe) -> str:
        """With a drafter below 16 bits."""
        if recipe.drafter is None:
            return "the recipe has no drafter"
        return "" if recipe.drafter.bits < 16 else "drafter.bits is 16: the drafter is kept"

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The 16-bit drafter and its Hessians."""
        return (DRAFTER, HESSIANS)

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """Bits and group size; where it comes from stands in the inputs."""
        section = recipe.drafter
        return (
            {}
            if section is None
            else section.model_dump(include={"bits", "group_size", "dampening"})
        )

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Solve and write."""
        from artifacts.checkpoint import Checkpoint
        from artifacts.names import linear_modules, role
        from artifacts.scheme import Scheme
        from calibration import hessian
        from calibration.capture import DRAFTER_PREFIX, QUANTIZED_ROLES

        drafter = Checkpoint.open(ctx.inputs[DRAFTER])
        modules = [name for name in linear_modules(drafter) if role(name) in QUANTIZED_ROLES]
        sums = hessian.load(tensors_at(ctx, HESSIANS))
        scheme = Scheme(ctx.config["bits"], ctx.config["group_size"])
        names = {name: DRAFTER_PREFIX + name for name in modules}
        solved = solve_matrices(ctx, drafter, sums, names, scheme)
        write_solved(ctx.out, solved)
        return error_summary(solved)


STAGE = DrafterStage()
