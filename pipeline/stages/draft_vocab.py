"""draft-vocab: which ids MTP drafts from, and their rows of the quantized head.

Compares own counts, text counts and mixtures on one half of the development replies (by document),
ships the best and reports its coverage of the other half; the gate sees held-out replies, which
this stage does not. Leaves draft_head.safetensors, draft_vocab.json and choice.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from artifacts.errors import TrimtabError
from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, StageContext
from pipeline.stages.common import BASE, tensors_at

REPLIES = ("calibration", "development")
COUNTS = {"own_counts": "counts_all", "text_counts": "text_counts"}
HEAD = "lm_head"


class DraftVocabStage(BaseStage):
    """Counting, choosing, and slicing rows after quantization."""

    name = "draft-vocab"

    def wanted(self, recipe: Recipe) -> str:
        """Only MTP drafts from it."""
        if recipe.draft_vocab is None:
            return "the recipe has no draft_vocab"
        return "" if recipe.mtp is not None else "only MTP uses a draft vocabulary"

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The replies, the base (tokenizer and vocabulary size), and the head as it ships."""
        head = ("lm-head/packed",) if recipe.lm_head.bits < 16 else ()
        return (BASE, *[f"traffic/{name}" for name in REPLIES], *head)

    def files(self, recipe: Recipe) -> dict[str, Path]:
        """Count files of the recipe."""
        section = recipe.draft_vocab
        found = {name: getattr(section, name) for name in COUNTS} if section is not None else {}
        return {name: path for name, path in found.items() if path is not None}

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """The section without the paths of the count files."""
        section = recipe.draft_vocab
        return {} if section is None else section.model_dump(mode="json", exclude=set(COUNTS))

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Choose, slice, write."""
        from artifacts.checkpoint import Checkpoint, Overlay
        from artifacts.draft_vocab import write_from_head
        from artifacts.files import atomic_write_json

        layers = [tensors_at(ctx, n) for n in ("lm-head/packed",) if n in ctx.inputs]
        source = Overlay(Checkpoint.open(ctx.inputs[BASE]), *layers)
        choice = self._choose(ctx, source.config)
        record = choice.to_json()
        ids = record.pop("ids")
        meta = {
            key: record[key]
            for key in (
                "candidate",
                "coverage",
                "coverage_by_domain",
                "floor",
                "reason",
                "tokens",
                "forced_added",
            )
        }
        write_from_head(ctx.out, ids, source, meta)
        atomic_write_json(ctx.out / "choice.json", record)
        return {"rows": len(ids), **{k: meta[k] for k in ("candidate", "coverage", "reason")}}

    def _choose(self, ctx: StageContext, config: dict[str, Any]) -> Any:
        from calibration.traffic import Traffic
        from calibration.vocabulary import choose, special_ids

        text = config.get("text_config", config)
        vocab_size = int(text["vocab_size"])
        rows = ctx.config["rows"] or round(ctx.config["fraction"] * vocab_size)
        replies = {n: Traffic.load(tensors_at(ctx, f"traffic/{n}")).as_outputs() for n in REPLIES}
        counts = {n: _counts(p, COUNTS[n], vocab_size) for n, p in ctx.files.items()}
        return choose(
            own=replies["calibration"],
            heldout=replies["development"],
            vocab_size=vocab_size,
            forced=[*special_ids(ctx.inputs[BASE]), *ctx.config["force"]],
            size=rows,
            sizes=[round(share * vocab_size) for share in ctx.config["compare"]],
            floor=ctx.config["floor"],
            own_counts_v=counts.get("own_counts"),
            text_counts_v=counts.get("text_counts"),
            seed=ctx.seed,
        )


def _counts(path: Path, name: str, vocab_size: int) -> Any:
    """int64 counts [vocab_size] from a count file."""
    from artifacts.checkpoint import load_single

    source = load_single(path)
    if name not in source or source.info(name).shape != (vocab_size,):
        raise TrimtabError(
            f"{path.name}: holds no {name} of shape [{vocab_size}], one count for each id",
            hint="count with the base's own tokenizer, or leave the file out",
        )
    return source.get(name).numpy()


STAGE = DraftVocabStage()
