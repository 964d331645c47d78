"""assemble: the artifact folders, every source tensor accounted for.

Leaves target/ and drafter/ (checkpoints in the layout of their source, config and index made from
what is written), draft_vocab/ and ledger.json. Files that are not weights, config or index are
copied byte for byte.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import BASE, DRAFTER, overlay, tensors_at

if TYPE_CHECKING:
    from torch import Tensor

    from artifacts.checkpoint import TensorSource

LAYERS = ("target", "signs", "lm-head", "embedding", "mtp")  # in the order they lie over the base
MAX_SHARD_BYTES = 4 << 30
OWN_FILES = ("config.json",)  # rewritten here; weights and indexes are told by their suffix


class AssembleStage(BaseStage):
    """Copying and packing; nothing is computed."""

    name = "assemble"
    computes = False

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The base, the drafter, and every stage that left packed tensors or a ledger."""
        made = {
            "target": recipe.target.source == "quantize",
            "signs": recipe.target.source == "imported",
            "lm-head": recipe.lm_head.bits < 16,
            "embedding": recipe.embedding.format != "keep",
            "mtp": recipe.mtp is not None and recipe.mtp.bits < 16,
        }
        needs = [BASE, "target/ledger"]
        for stage, packs in made.items():
            if packs:
                needs += [f"{stage}/packed"] + ([f"{stage}/ledger"] if stage != "target" else [])
        if recipe.drafter is not None:
            needs.append(DRAFTER)
            if recipe.drafter.bits < 16:
                needs += ["drafter/packed", "drafter/ledger"]
        if recipe.wants_draft_vocab:
            needs.append("draft-vocab")
        return tuple(needs)

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Write the folders and the common ledger."""
        from artifacts.checkpoint import Checkpoint, Overlay
        from artifacts.ledger import read_ledger, write_ledger
        from artifacts.manifest import DRAFTER_LEDGER, LEDGER

        target = overlay(ctx, *[f"{stage}/packed" for stage in LAYERS])
        write_model(ctx, target, ctx.inputs[BASE], ctx.out / "target")
        ctx.checkpoint("target")
        entries = [
            entry
            for stage in LAYERS
            if f"{stage}/ledger" in ctx.inputs
            for entry in read_ledger(ctx.inputs[f"{stage}/ledger"].with_suffix(".json"))
        ]
        latest = {entry.name: entry for entry in entries}  # a folded matrix replaces its import
        write_ledger(ctx.out / LEDGER, latest.values())
        if DRAFTER in ctx.inputs:
            layers = [tensors_at(ctx, need) for need in ("drafter/packed",) if need in ctx.inputs]
            drafter = Overlay(Checkpoint.open(ctx.inputs[DRAFTER]), *layers)
            write_model(ctx, drafter, ctx.inputs[DRAFTER], ctx.out / "drafter")
            if layers:
                shutil.copyfile(
                    ctx.inputs["drafter/ledger"].with_suffix(".json"),
                    ctx.out / DRAFTER_LEDGER,
                )
            ctx.checkpoint("drafter")
        if "draft-vocab" in ctx.inputs:
            for name in ("draft_head.safetensors", "draft_vocab.json"):
                (ctx.out / "draft_vocab").mkdir(exist_ok=True)
                shutil.copyfile(ctx.inputs["draft-vocab"] / name, ctx.out / "draft_vocab" / name)
        return {"quantized": len(latest)}


def write_model(ctx: StageContext, source: TensorSource, origin: Path, folder: Path) -> None:
    """Write one checkpoint: all tensors of `source`, config from contents, other files copied."""
    from artifacts.files import atomic_write_json
    from artifacts.quant_config import from_contents
    from artifacts.shards import write_shards

    names = source.names()

    def stream() -> Iterator[tuple[str, Tensor]]:
        with ctx.progress.task(f"writing {folder.name}", len(names), "tensors") as task:
            for name in names:
                yield name, source.get(name)
                task.advance()

    separate = {"mtp.": "mtp"} if any(not name.startswith("mtp.") for name in names) else {}
    write_shards(folder, stream(), max_shard_bytes=MAX_SHARD_BYTES, separate=separate)
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    quantization = from_contents(source)
    if quantization is not None:
        config["quantization_config"] = quantization
    atomic_write_json(folder / "config.json", config)
    for path in sorted(origin.rglob("*")):
        name = path.relative_to(origin).as_posix()
        rewritten = name in OWN_FILES or name.endswith((".safetensors", ".safetensors.index.json"))
        if path.is_file() and not rewritten:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)


STAGE = AssembleStage()
