"""signs: folds the negative group scales of an imported body into its codes.

Kernels that run int8 activations read scales unsigned, so a build must have no negative one. The
fold saturates (code -8 has no positive twin); what that cost stands in the summary, by tensor.
Leaves packed.safetensors with the matrices that changed, and ledger.json for them.
"""

from __future__ import annotations

from typing import Any

from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import BASE, write_packed


class SignsStage(BaseStage):
    """Only for an imported body: our own scales are positive by construction."""

    name = "signs"
    computes = False

    def wanted(self, recipe: Recipe) -> str:
        """Only with target.source imported."""
        if recipe.target.source == "imported":
            return ""
        return "target.source is quantize: its scales are positive by construction"

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The base, and that `target` has looked at it."""
        return (BASE, "target/ledger")

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """The whole section."""
        return recipe.signs.model_dump(mode="json")

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Fold every matrix that has a negative scale; say what it cost."""
        from artifacts.checkpoint import Checkpoint
        from artifacts.ledger import LedgerEntry, write_ledger
        from artifacts.names import packed_modules
        from artifacts.packing import PackedMatrix
        from artifacts.sign_fold import fold_matrix

        base = Checkpoint.open(ctx.inputs[BASE])
        modules = packed_modules(base)
        folded: dict[str, PackedMatrix] = {}
        entries, costs = [], {}
        with ctx.progress.task("folding", len(modules), "matrices") as task:
            for module in modules:
                before = PackedMatrix.from_source(base, module)
                after, result = fold_matrix(before)
                task.advance()
                if after is before:
                    continue
                folded[module] = after
                costs[module] = {
                    "flipped_groups": result.flipped_groups,
                    "saturated_codes": result.saturated,
                    "coarse_groups": result.coarse_groups,
                    "weight_error": result.weight_error_after,
                }
                entries.append(
                    LedgerEntry(
                        name=module,
                        method="folded",
                        reason=f"{result.flipped_groups} groups flipped, "
                        f"{result.saturated} codes saturated",
                        bits=after.bits,
                        group_size=after.group_size,
                        shape=after.shape,
                        weight_error=result.weight_error_after,
                    )
                )
                ctx.checkpoint(module)
        write_packed(ctx.out, folded)
        write_ledger(ctx.out / "ledger.json", entries)
        return {"matrices": len(modules), "folded": len(folded), "cost": costs}


STAGE = SignsStage()
