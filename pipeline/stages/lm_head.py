"""lm-head: the output matrix to int4 or int8 by GPTQ on the model's own final hidden states.

Leaves packed.safetensors and ledger.json. Its KL against the 16-bit head is measured by `validate`.
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

MODULE = "lm_head"


class LmHeadStage(BaseStage):
    """One solve."""

    name = "lm-head"

    def wanted(self, recipe: Recipe) -> str:
        """Unless the recipe keeps 16 bits."""
        return "" if recipe.lm_head.bits < 16 else "lm_head.bits is 16: the head is kept"

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The base's head and its Hessian."""
        return (BASE, HESSIANS)

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """Bits and group size."""
        return recipe.lm_head.model_dump(mode="json")

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Solve and write."""
        from artifacts.checkpoint import Checkpoint
        from artifacts.scheme import Scheme
        from calibration import hessian

        base = Checkpoint.open(ctx.inputs[BASE])
        if f"{MODULE}.weight" not in base:
            raise TrimtabError(
                "the base has no lm_head.weight: its head is tied to the embedding",
                hint="set lm_head.bits to 16",
            )
        sums = hessian.load(tensors_at(ctx, HESSIANS))
        scheme = Scheme(ctx.config["bits"], ctx.config["group_size"])
        solved = solve_matrices(ctx, base, sums, {MODULE: MODULE}, scheme)
        write_solved(ctx.out, solved)
        return {**error_summary(solved), "rows": sums[MODULE].rows}


STAGE = LmHeadStage()
