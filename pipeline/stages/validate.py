"""validate: every gate, on what will be uploaded and nothing else.

Leaves the assembled build with gates.json in it: verdicts, the figures they were judged on, and the
conditions. A failed gate ends the run here; the build stays, unsealed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import GateFailed, TrimtabError
from artifacts.files import atomic_write_json, read_json
from pipeline.folders import link_tree
from pipeline.gates import Figure, Gate, judge_all
from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import BASE, DRAFTER, tensors_at

if TYPE_CHECKING:
    from pipeline.measure import Subject

GATES = "gates.json"
LATEST = "latest.json"  # written by the runner beside dist


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
    is_build = True

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The assembled build, its 16-bit sources, and held-out text."""
        drafter = (DRAFTER,) if recipe.drafter is not None else ()
        held_out = ("prompts/heldout", "prompts/texts", "capture/states")
        return ("assemble", BASE, *drafter, *held_out)

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """Gates and how to generate."""
        return settings_of(recipe)

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """All tiers, on the files that the next stage sends."""
        from pipeline.measure import measure

        link_tree(ctx.inputs["assemble"], ctx.out)
        figures = measure(_subject(ctx), "behaviour", ctx.progress, ctx.checkpoint)
        result = judged(ctx.config, figures)
        atomic_write_json(ctx.out / GATES, result)
        return {
            "passed": sum(verdict["passed"] for verdict in result["gates"]),
            "failed_gates": failures(result),
        }


def _subject(ctx: StageContext) -> Subject:
    from pipeline.measure import Subject

    return Subject(
        build=ctx.out,
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


def failures(result: dict[str, Any]) -> list[str]:
    """ "gate: reason" of every verdict that did not pass."""
    return [f"{v['gate']}: {v['reason']}" for v in result["gates"] if not v["passed"]]


def judged(
    config: dict[str, Any], figures: dict[str, Any], tier: str = "behaviour"
) -> dict[str, Any]:
    """The content of gates.json: verdicts, figures and conditions, plain JSON values.

    Below the tier "behaviour" only gates whose figure was measured are judged.
    """
    gates = {name: Gate.model_validate(gate) for name, gate in config["gates"].items()}
    if tier != "behaviour":
        gates = {name: gate for name, gate in gates.items() if gate.statistic in figures}
    plain = {
        name: Figure(point=m.point, sample=m.sample, lower=m.lower, upper=m.upper)
        for name, m in figures.items()
    }
    return {
        "gates": [verdict.as_dict() for verdict in judge_all(gates, plain)],
        "figures": {name: measured.to_json() for name, measured in sorted(figures.items())},
        "conditions": {key: value for key, value in config.items() if key != "gates"},
    }


def validate_build(build: Path, *, tier: str = "behaviour") -> list[str]:
    """Measure and judge a build again, without writing to it; one line a gate.

    The tier "structure" needs only the build. The others need the sources it was made from: the
    build must be WORK/dist of the work folder that made it.

    Raises:
        GateFailed: a gate did not pass.
        TrimtabError: the folder is no build, the tier is unknown, or the sources are not at hand.
    """
    from pipeline.measure import TIERS

    if tier not in TIERS:
        raise TrimtabError(f"--tier {tier}: must be one of {', '.join(TIERS)}")
    if not (build / "target").is_dir():
        raise TrimtabError(
            f"{build}: is not a build (it has no target folder)",
            hint="give WORK/dist, or a folder that `trimtab fetch` filled",
        )
    latest = build.resolve().parent / LATEST
    if not latest.is_file():
        return _structure_only(build, tier)
    return _measure_again(build, tier, read_json(latest)["contexts"]["validate"])


def _structure_only(build: Path, tier: str) -> list[str]:
    from artifacts.structure import check_build_structure

    if tier != "structure":
        raise TrimtabError(
            f"{build}: the tier {tier} compares with the 16-bit sources, which are not beside it",
            hint="validate WORK/dist of the run that made it, or pass --tier structure",
        )
    problems = check_build_structure(build, None)
    if problems:
        raise GateFailed("\n".join(problems), hint="do not use this build")
    return ["structure: passed (without its sources: nothing was compared with them)"]


def _measure_again(build: Path, tier: str, context: dict[str, Any]) -> list[str]:
    import tempfile

    from pipeline import environment as environments
    from pipeline.events import View
    from pipeline.measure import measure
    from pipeline.stage import Environment

    environment = Environment(**context["environment"])
    if tier != "structure":
        environments.prepare(environment)
    with tempfile.TemporaryDirectory() as scratch:
        stage_context = StageContext(
            name="validate",
            config=context["config"],
            inputs={need: Path(place) for need, place in context["inputs"].items()},
            files={},
            file_hashes={},
            out=build,
            scratch=Path(scratch),
            work=build.parent,
            environment=environment,
            progress=View(None),
            hash_file=lambda path: "",
            on_checkpoint=lambda name: None,
        )
        subject = replace(_subject(stage_context), build=build)
        figures = measure(subject, tier, stage_context.progress, stage_context.checkpoint)
    result = judged(context["config"], figures, tier)
    if failures(result):
        raise GateFailed("\n".join(failures(result)), hint="the build is not fit to publish")
    return [f"{v['gate']}: passed ({v['reason']})" for v in result["gates"]]


STAGE = ValidateStage()
