"""validate: every gate, on what will be uploaded and nothing else.

Leaves gates.json: verdicts, the figures they were judged on, and the conditions. A failed gate ends
the run here; the assembled folders stay.
"""

from __future__ import annotations

from typing import Any

from pipeline.gates import Figure, Gate, judge_all
from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import BASE, DRAFTER, tensors_at


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """What measuring depends on beside the files."""
    traffic = recipe.traffic
    return {
        "gates": {name: gate.model_dump() for name, gate in recipe.active_gates().items()},
        "sampling": None if traffic.sampling is None else traffic.sampling.model_dump(),
        "new_tokens": traffic.heldout_new_tokens,
        "chunk": traffic.chunk,
        "depth": recipe.mtp.depth if recipe.mtp is not None else 1,
        "diversity_prompts": 128,
    }


class ValidateStage(BaseStage):
    """Measure, judge, write."""

    name = "validate"

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The assembled build, its 16-bit sources, and held-out text."""
        drafter = (DRAFTER,) if recipe.drafter is not None else ()
        held_out = ("prompts/heldout", "prompts/texts", "capture/states")
        return ("assemble", BASE, *drafter, *held_out)

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """Gates and how to generate."""
        return settings_of(recipe)

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """All tiers."""
        from artifacts.files import atomic_write_json
        from pipeline.measure import Subject, measure

        subject = Subject(
            build=ctx.inputs["assemble"],
            base=ctx.inputs[BASE],
            drafter=ctx.inputs.get(DRAFTER),
            heldout=tensors_at(ctx, "prompts/heldout"),
            texts=tensors_at(ctx, "prompts/texts"),
            states=tensors_at(ctx, "capture/states"),
            config=ctx.config,
            scratch=ctx.scratch,
            device=ctx.device,
            dtype=ctx.dtype,
            seed=ctx.seed,
        )
        figures = measure(subject, "behaviour", ctx.progress, ctx.checkpoint)
        result = judged(ctx.config, figures)
        atomic_write_json(ctx.out / "gates.json", result)
        failed = [v for v in result["gates"] if not v["passed"]]
        return {
            "passed": len(result["gates"]) - len(failed),
            "failed_gates": [f"{v['gate']}: {v['reason']}" for v in failed],
        }


def judged(config: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """The content of gates.json: verdicts, figures and conditions, plain JSON values."""
    gates = {name: Gate.model_validate(gate) for name, gate in config["gates"].items()}
    plain = {
        name: Figure(point=m.point, sample=m.sample, lower=m.lower, upper=m.upper)
        for name, m in figures.items()
    }
    return {
        "gates": [verdict.as_dict() for verdict in judge_all(gates, plain)],
        "figures": {name: measured.to_json() for name, measured in sorted(figures.items())},
        "conditions": {key: value for key, value in config.items() if key != "gates"},
    }


STAGE = ValidateStage()
