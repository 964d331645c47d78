"""traffic: the quantized body's own replies to the prompts, sampled as the model would be served.

Leaves calibration, development and heldout .safetensors: prompt and reply ids, and a header with
the resolved sampling. Goes on from its last finished chunk after a kill.
"""

from __future__ import annotations

from typing import Any

from artifacts.errors import TrimtabError
from artifacts.files import canonical_json, read_json
from pipeline.problems import Problems
from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import BASE, body_needs, open_body

SETS = ("calibration", "development", "heldout")


class TrafficStage(BaseStage):
    """Batched decoding by the built-in runtime."""

    name = "traffic"
    resumable = True

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The body as it ships, and the prompts."""
        return (*body_needs(recipe), *[f"prompts/{name}" for name in SETS])

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """The whole section."""
        return recipe.traffic.model_dump(mode="json")

    def check(self, recipe: Recipe, problems: Problems) -> None:
        """A local base that only decodes greedily needs `traffic.sampling`."""
        from calibration.traffic import resolve_sampling

        folder = recipe.base.path
        if folder is None or recipe.traffic.sampling is not None:
            return
        try:
            path = folder / "generation_config.json"
            resolve_sampling(read_json(path) if path.is_file() else {})
        except TrimtabError as error:
            problems.add_error("traffic.sampling", error)

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Generate set by set."""
        from artifacts.runtime.target import Target
        from calibration.tokensets import PromptSet
        from calibration.traffic import own_outputs, resolve_sampling, resolve_stop_ids

        path = ctx.inputs[BASE] / "generation_config.json"
        generation = read_json(path) if path.is_file() else {}
        sampling = resolve_sampling(generation, ctx.config["sampling"])
        source = open_body(ctx)
        target = Target.load(source, dtype=ctx.dtype, device=ctx.device)
        stop_ids = resolve_stop_ids(generation, source.config)
        summary: dict[str, Any] = {"sampling": sampling}
        for name in SETS:
            prompts = PromptSet.load(ctx.inputs[f"prompts/{name}"].with_suffix(".safetensors"))
            limit = ctx.config["prompts"] if name == "calibration" else None
            key = "max_new_tokens" if name == "calibration" else "heldout_new_tokens"
            prompts = prompts.select(range(len(prompts))[:limit])
            total = len(prompts) * ctx.config[key]
            with ctx.progress.task(f"replies: {name}", total, "tokens") as task:

                def settled(done: int, most: int, name: str = name, task: Any = task) -> None:
                    task(done, most)
                    ctx.checkpoint(f"{name}-{done}")

                made = own_outputs(
                    target,
                    prompts,
                    sampling,
                    max_new_tokens=ctx.config[key],
                    seed=ctx.seed,
                    stop_ids=stop_ids,
                    chunk=ctx.config["chunk"],
                    folder=ctx.scratch / name,
                    identity=canonical_json(ctx.config),
                    progress=settled,
                )
            made.save(ctx.out / f"{name}.safetensors")
            summary[name] = {"prompts": len(made), "tokens": sum(map(len, made.outputs))}
        return summary


STAGE = TrafficStage()
