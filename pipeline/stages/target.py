"""target: the body's matrices to packed GPTQ codes, or a published body taken as it is.

Leaves packed.safetensors (quantized bodies only) and ledger.json. A kill restarts the stage: the
library that walks the layers keeps its state in memory.
"""

from __future__ import annotations

from typing import Any

from artifacts.errors import TrimtabError
from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import BASE

SETS = ("calibration", "calibration_texts")


class TargetStage(BaseStage):
    """llmcompressor's sequential GPTQ on rows of the calibration sets."""

    name = "target"

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The base and the calibration sets."""
        sets = [name for name in SETS if getattr(recipe.prompts, name) is not None]
        imported = recipe.target.source == "imported"
        return (BASE,) if imported else (BASE, *[f"prompts/{name}" for name in sets])

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """The whole section."""
        return recipe.target.model_dump(mode="json")

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Quantize, or record what an imported body holds."""
        if ctx.config["source"] == "imported":
            return _imported(ctx)
        from artifacts.ledger import write_ledger
        from artifacts.scheme import Scheme
        from calibration.body import quantize_body

        rows = _calibration_rows(ctx)
        entries = quantize_body(
            ctx.inputs[BASE],
            rows,
            Scheme(ctx.config["bits"], ctx.config["group_size"]),
            list(ctx.config["ignore"]),
            ctx.out / "packed.safetensors",
            seed=ctx.seed,
            threads=ctx.threads,
            work_dir=ctx.scratch,
            dampening=ctx.config["dampening"],
            fallback_limit=ctx.config["fallback_limit"],
        )
        write_ledger(ctx.out / "ledger.json", entries)
        return {
            "matrices": len(entries),
            "rows": len(rows),
            "tokens": sum(map(len, rows)),
            "fallbacks": sum(entry.method != "gptq" for entry in entries),
        }


def _calibration_rows(ctx: StageContext) -> list[list[int]]:
    """Rows of exactly `sequence_length` tokens: sets in stable-hash order, end to end, cut."""
    from calibration.tokensets import PromptSet, stable_unit

    length, wanted = ctx.config["sequence_length"], ctx.config["samples"]
    keyed: list[tuple[float, list[int]]] = []
    for need, path in ctx.inputs.items():
        if need.startswith("prompts/"):
            rows = PromptSet.load(path.with_suffix(".safetensors"))
            keyed += [
                (stable_unit(ctx.seed, f"{need}:{entry.id}"), ids)
                for ids, entry in zip(rows.ids, rows.entries, strict=True)
            ]
    stream = [token for _, ids in sorted(keyed) for token in ids]
    if len(stream) < wanted * length:
        raise TrimtabError(
            f"target: {wanted} samples of {length} tokens need {wanted * length} tokens, the "
            f"calibration sets hold {len(stream)}",
            hint="lower target.samples or target.sequence_length, or add calibration texts",
        )
    return [stream[i * length : (i + 1) * length] for i in range(wanted)]


def _imported(ctx: StageContext) -> dict[str, Any]:
    """Ledger entries "copied" for every packed matrix of the base."""
    from artifacts.checkpoint import Checkpoint
    from artifacts.ledger import LedgerEntry, write_ledger
    from artifacts.names import packed_modules
    from artifacts.scheme import packed_scheme

    base = Checkpoint.open(ctx.inputs[BASE])
    entries = []
    for module in packed_modules(base):
        scheme, shape = packed_scheme(base, module)
        entries.append(
            LedgerEntry(
                name=module,
                method="copied",
                reason="imported body",
                bits=scheme.bits,
                group_size=scheme.group_size,
                shape=shape,
            )
        )
    if not entries:
        raise TrimtabError(
            "target.source is imported, but the base holds no packed matrix",
            hint="set target.source to quantize, or base to a published W4A16 checkpoint",
        )
    write_ledger(ctx.out / "ledger.json", entries)
    return {"matrices": len(entries), "fallbacks": 0}


STAGE = TargetStage()
