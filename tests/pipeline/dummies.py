"""A small pipeline of stages that only write bytes: source, then left and right, then join.

`left` copies in pieces and keeps finished pieces in its scratch, as `traffic` does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pipeline import recipe as recipes
from pipeline.recipe import Recipe
from pipeline.stage import BaseStage, Stage, StageContext

TEXT = """
name: dummy
threads: 1
device: cpu
base: {path: base}
prompts:
  calibration: {path: input.txt}
  development: {path: input.txt}
  heldout: {path: input.txt}
  texts: {path: input.txt}
"""
PIECES = 4


class Source(BaseStage):
    """Splits the input file into two parts."""

    name = "source"
    computes = False

    def files(self, recipe: Recipe) -> dict[str, Path]:
        path = recipe.prompts.calibration.path
        assert path is not None
        return {"input": path}

    def run(self, ctx: StageContext) -> dict[str, Any]:
        data = ctx.files["input"].read_bytes()
        half = len(data) // 2
        (ctx.out / "a").mkdir()
        (ctx.out / "a" / "x.bin").write_bytes(data[:half])
        ctx.checkpoint("half")
        (ctx.out / "b.bin").write_bytes(data[half:])
        return {"bytes": len(data)}


class Left(BaseStage):
    """Hashes part a again and again; each piece is kept in scratch."""

    name = "left"
    computes = False
    resumable = True
    made = 0  # pieces computed in this process

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        return ("source/a",)

    def config(self, recipe: Recipe) -> dict[str, Any]:
        return {"bits": recipe.lm_head.bits}

    def run(self, ctx: StageContext) -> dict[str, Any]:
        data = (ctx.inputs["source/a"] / "x.bin").read_bytes()
        for i in range(PIECES):
            piece = ctx.scratch / f"{i}.bin"
            if not piece.exists():
                partial = ctx.scratch / f".{i}.partial"
                partial.write_bytes(hashlib.sha256(data + bytes([i, ctx.config["bits"]])).digest())
                ctx.checkpoint(f"piece-{i}-written")
                partial.rename(piece)
                Left.made += 1
            ctx.checkpoint(f"piece-{i}")
        joined = b"".join((ctx.scratch / f"{i}.bin").read_bytes() for i in range(PIECES))
        (ctx.out / "left.bin").write_bytes(joined)
        return {"pieces": PIECES}


class Right(BaseStage):
    """Uses part b and the seed."""

    name = "right"
    computes = False

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        return ("source/b",)

    def config(self, recipe: Recipe) -> dict[str, Any]:
        return {"group_size": recipe.embedding.group_size, "seed": recipe.seed}

    def run(self, ctx: StageContext) -> dict[str, Any]:
        data = ctx.inputs["source/b"].with_suffix(".bin").read_bytes()
        (ctx.out / "right.bin").write_bytes(data[::-1] + str(ctx.config).encode())
        ctx.checkpoint("written")
        return {}


class Join(BaseStage):
    """Puts both together; fails gates if the recipe's floor is 1."""

    name = "join"
    computes = False

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        return ("left", "right")

    def config(self, recipe: Recipe) -> dict[str, Any]:
        assert recipe.draft_vocab is not None
        return {"floor": recipe.draft_vocab.floor}

    def run(self, ctx: StageContext) -> dict[str, Any]:
        left = (ctx.inputs["left"] / "left.bin").read_bytes()
        right = (ctx.inputs["right"] / "right.bin").read_bytes()
        (ctx.out / "joined.bin").write_bytes(left + right)
        return {"failed_gates": ["coverage"] if ctx.config["floor"] == 1 else []}


class Last(BaseStage):
    """What a failed gate keeps from running."""

    name = "last"
    computes = False

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        return ("join",)

    def run(self, ctx: StageContext) -> dict[str, Any]:
        (ctx.out / "last.bin").write_bytes(b"end")
        return {}


def stages() -> dict[str, Stage]:
    """All of them, by name."""
    made: list[Stage] = [Source(), Left(), Right(), Join(), Last()]
    return {stage.name: stage for stage in made}


def recipe(folder: Path, extra: str = "") -> Recipe:
    """The recipe, with further keys; writes the input file if it is not there."""
    source = folder / "input.txt"
    if not source.exists():
        source.write_bytes(bytes(range(256)) * 40)
    return recipes.parse(TEXT + extra, name="recipe.yaml", folder=folder)


def contents(work: Path) -> dict[str, bytes]:
    """Every file below the store with its bytes: what must be equal after any history."""
    root = work / "store"
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
