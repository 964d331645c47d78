"""embedding: the input table to int8 by round-to-nearest, where the recipe asks for it.

Its input is one-hot, so its Hessian is diagonal and rounding is already optimal for each row.
Leaves packed.safetensors and ledger.json.
"""

from __future__ import annotations

from typing import Any

from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import BASE, weight, write_solved


class EmbeddingStage(BaseStage):
    """Rounding with positive, searched scales."""

    name = "embedding"

    def wanted(self, recipe: Recipe) -> str:
        """Only with format int8."""
        return "" if recipe.embedding.format == "int8" else "embedding.format is keep"

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The base."""
        return (BASE,)

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """The whole section."""
        return recipe.embedding.model_dump(mode="json")

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Round and write."""
        from artifacts.checkpoint import Checkpoint
        from artifacts.names import is_embedding
        from artifacts.scheme import Scheme
        from calibration.solve import solve_rtn

        base = Checkpoint.open(ctx.inputs[BASE])
        modules = [
            name.removesuffix(".weight")
            for name in base.names()
            if name.endswith(".weight") and is_embedding(name.removesuffix(".weight"))
        ]
        scheme = Scheme(8, ctx.config["group_size"])
        solved = {
            module: solve_rtn(
                module,
                weight(base, module),
                scheme,
                reason="one-hot input: rounding is optimal for each row",
            )
            for module in modules
        }
        write_solved(ctx.out, solved)
        return {
            "matrices": len(solved),
            "weight_error": max(result.entry.weight_error or 0.0 for result in solved.values()),
        }


STAGE = EmbeddingStage()
