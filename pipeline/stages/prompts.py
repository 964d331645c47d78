"""prompts: chat prompts and texts as token ids, through the model's own tokenizer and template.

Leaves NAME.safetensors and NAME.json for each set of the recipe. Sets that serve different ends
(calibrating, choosing settings, measuring) may share no document.
"""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

from pipeline.recipe import Recipe
from pipeline.sections import PromptSource
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import BASE

KINDS = {
    "calibration": "prompts",
    "development": "prompts",
    "heldout": "prompts",
    "texts": "texts",
    "calibration_texts": "texts",
}
ENDS = (("calibration", "calibration_texts"), ("development",), ("heldout", "texts"))


def _sources(recipe: Recipe) -> dict[str, PromptSource]:
    found = {name: getattr(recipe.prompts, name) for name in KINDS}
    return {name: source for name, source in found.items() if source is not None}


class PromptsStage(BaseStage):
    """Read, render, choose, and refuse sets that overlap."""

    name = "prompts"

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The base, for its tokenizer and template."""
        return (BASE,)

    def files(self, recipe: Recipe) -> dict[str, Path]:
        """The local prompt files."""
        return {n: s.path for n, s in _sources(recipe).items() if s.path is not None}

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """Every set's section without its path."""
        return {
            name: source.model_dump(mode="json", exclude={"path"})
            for name, source in _sources(recipe).items()
        }

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Build every set; the summary holds counts and lengths."""
        from calibration.prompts import TextTokenizer, build_set, refuse_overlap

        tokenizer = TextTokenizer(ctx.inputs[BASE])
        sets = {}
        for name, section in ctx.config.items():
            built = build_set(
                name,
                KINDS[name],
                _calibration_source(section, ctx.files.get(name)),
                tokenizer,
                count=section["limit"],
                seed=ctx.seed,
                max_tokens=section["max_tokens"],
                min_tokens=section["min_tokens"],
                allow_shortfall=section["allow_shortfall"],
            )
            built.save(ctx.out / f"{name}.safetensors")
            sets[name] = built
            ctx.checkpoint(name)
        for one, other in combinations(ENDS, 2):
            for a, b in product(one, other):
                if a in sets and b in sets:
                    refuse_overlap([sets[a], sets[b]])
        return {name: built.summary() for name, built in sets.items()}


def _calibration_source(section: dict[str, Any], path: Path | None) -> Any:
    from calibration.prompts import Source

    fields = ("dataset", "revision", "subset", "split", "max_rows")
    labels = ("columns", "domain", "language", "thinking_share")
    values = {key: section[key] for key in (*fields, *labels)}
    return Source(files=() if path is None else (path,), **values)


STAGE = PromptsStage()
