"""capture: Hessians of lm_head, MTP and drafter in one teacher-forced pass over the traffic.

Leaves hessians.safetensors (sums only), states.safetensors (a held-out sample of final hidden
states, for lm_head's KL) and capture.json (rows of each kind, self-checks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import DRAFTER, body_needs, open_body, tensors_at

if TYPE_CHECKING:
    from artifacts.runtime.dflash import Drafter
    from artifacts.runtime.target import Target


class CaptureStage(BaseStage):
    """One streaming pass with the quantized body and everything else in 16 bits."""

    name = "capture"

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The body as it ships, its replies, and the 16-bit drafter."""
        drafter = (DRAFTER,) if recipe.drafter is not None else ()
        return (*body_needs(recipe), "traffic/calibration", "traffic/heldout", *drafter)

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """The section, and whether there is an MTP head to follow."""
        return {**recipe.capture.model_dump(mode="json"), "mtp": recipe.mtp is not None}

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Capture, then sample held-out states."""
        from artifacts.files import atomic_write_json
        from artifacts.runtime.mtp import MtpHead
        from artifacts.runtime.target import Target
        from calibration import hessian
        from calibration.capture import CaptureRows, capture
        from calibration.states import sample_states
        from calibration.traffic import Traffic

        source = open_body(ctx)
        target = Target.load(source, dtype=ctx.dtype, device=ctx.device)
        traffic = Traffic.load(tensors_at(ctx, "traffic/calibration"))
        with ctx.progress.task("capture", len(traffic), "sequences") as task:
            captured = capture(
                target,
                traffic,
                mtp=MtpHead.load(source, target) if ctx.config["mtp"] else None,
                depth=ctx.config["depth"],
                drafter=_drafter(ctx, target),
                rows=CaptureRows(lm_head=ctx.config["lm_head"] == "all"),
                chunk_tokens=ctx.config["chunk_tokens"],
                source="traffic/calibration",
                progress=task,
            )
        ctx.checkpoint("captured")
        hessian.save(ctx.out / "hessians.safetensors", captured.sums)
        heldout = Traffic.load(tensors_at(ctx, "traffic/heldout"))
        with ctx.progress.task("held-out states", len(heldout), "sequences") as task:
            states = sample_states(
                target, heldout, ctx.config["heldout_rows"], seed=ctx.seed, progress=task
            )
        states.save(ctx.out / "states.safetensors")
        summary = captured.to_json()
        atomic_write_json(ctx.out / "capture.json", summary)
        return summary


def _drafter(ctx: StageContext, target: Target) -> Drafter | None:
    from artifacts.checkpoint import Checkpoint
    from artifacts.runtime.dflash import Drafter

    if DRAFTER not in ctx.inputs:
        return None
    return Drafter.load(Checkpoint.open(ctx.inputs[DRAFTER]), target)


STAGE = CaptureStage()
