"""publish: manifest, card, fetch script and sums; then the build goes where the recipe says.

Leaves the sealed build itself. Sending it again where it already is changes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from artifacts.files import read_json
from pipeline.folders import link_tree
from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import BASE, DRAFTER

PATHS = ("path", "own_counts", "text_counts")


def without_paths(value: Any) -> Any:
    """The same plain value with every path replaced by its last part."""
    if isinstance(value, dict):
        return {
            key: Path(inner).name if key in PATHS and inner is not None else without_paths(inner)
            for key, inner in value.items()
        }
    return [without_paths(inner) for inner in value] if isinstance(value, list) else value


class PublishStage(BaseStage):
    """Sealing and sending."""

    name = "publish"
    is_build = True

    def wanted(self, recipe: Recipe) -> str:
        """Unless the recipe stops after validation."""
        return "" if recipe.publish is not None else "the recipe has no publish"

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The validated build, and what it was made from."""
        drafter = (DRAFTER,) if recipe.drafter is not None else ()
        return ("validate", BASE, *drafter, "fetch/files", "prompts")

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """The resolved recipe without paths; where it goes."""
        section = recipe.publish
        if section is None:
            return {}
        base_model = section.base_model or recipe.base.repo or recipe.name
        return {
            "name": section.name or recipe.name,
            "licence": section.licence,
            "base_model": base_model,
            "base_revision": recipe.base.revision,
            "to": section.to.model_dump(mode="json"),
            "recipe": without_paths(recipe.resolved()),
        }

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Seal a linked copy of the validated build, then publish it."""
        from artifacts.hub import publish
        from artifacts.manifest import seal

        link_tree(ctx.inputs["validate"], ctx.out)
        manifest = seal(ctx.out, build_info(ctx))
        ctx.checkpoint("sealed")
        to = ctx.config["to"]
        destination = to["repo"] or str(ctx.work / to["path"])
        made = publish(ctx.out, destination)
        ctx.progress.say(f"published to {made.url or made.location}")
        return {"files": len(manifest.files), "bytes": made.bytes}


def build_info(ctx: StageContext) -> Any:
    """What the manifest says beside the bytes."""
    from artifacts.checkpoint import Checkpoint
    from artifacts.manifest import BuildInfo
    from pipeline.keys import library_versions

    gates = read_json(ctx.inputs["validate"] / "gates.json")
    fetched = read_json(ctx.inputs["fetch/files"].with_suffix(".json"))
    sources = {"target": BASE, "drafter": DRAFTER}
    prompt_sets = {
        path.stem: read_json(path)["summary"]["content_sha256"]
        for path in sorted(ctx.inputs["prompts"].glob("*.json"))
        if path.name != "record.json"
    }
    environment = ctx.environment
    return BuildInfo(
        name=ctx.config["name"],
        base_model=ctx.config["base_model"],
        base_revision=ctx.config["base_revision"],
        licence=ctx.config["licence"],
        repo_id=ctx.config["to"]["repo"],
        recipe=ctx.config["recipe"],
        inputs={
            f"{part}/{name}": entry["sha256"]
            for part, made in fetched.items()
            for name, entry in made["files"].items()
        },
        versions=library_versions(),
        seeds={"recipe": environment.seed},
        device=f"{environment.device} {environment.dtype}, {environment.threads} threads",
        gates=gates,
        drafters=profiles(gates),
        prompt_sets=prompt_sets,
        source_bytes={
            part: _tensor_bytes(Checkpoint.open(ctx.inputs[need]))
            for part, need in sources.items()
            if need in ctx.inputs
        },
    )


def _tensor_bytes(source: Any) -> int:
    return sum(source.info(name).nbytes for name in source.names())


def profiles(gates: dict[str, Any]) -> list[dict[str, Any]]:
    """One profile a way of drafting that was measured, with its greedy tokens per step."""
    found = []
    for method in ("mtp", "drafter"):
        figure = gates["figures"].get(f"{method}_tokens_per_step_ratio")
        if figure is not None:
            found.append(
                {
                    "method": method,
                    "depth": figure["quantized"]["depth"],
                    "tokens_per_step": figure["tokens_per_step"],
                    "tokens_per_step_16bit": figure["tokens_per_step_16bit"],
                    "prompts": figure["sample"],
                }
            )
    return found


STAGE = PublishStage()
