"""What several stages share: opening what earlier stages left, and solving one matrix.

Invariant: a stage's packed tensors lie in its folder as `packed.safetensors` beside `ledger.json`,
and lie over the base in the order of the pipeline; nothing is copied before `assemble`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.checkpoint import Checkpoint, Overlay, TensorSource

if TYPE_CHECKING:
    from artifacts.packing import PackedMatrix
    from artifacts.scheme import Scheme
    from calibration.hessian import HessianSum
    from calibration.solve import Solved
    from pipeline.recipe import Recipe
    from pipeline.stage import StageContext

BASE = "fetch/target"
DRAFTER = "fetch/drafter"
HESSIANS = "capture/hessians"


def body_needs(recipe: Recipe) -> tuple[str, ...]:
    """The base and what lies over it once the body is as it ships."""
    return (BASE, "target/packed" if recipe.target.source == "quantize" else "signs/packed")


def tensors_at(ctx: StageContext, need: str) -> Path:
    """The safetensors file that a need such as "capture/hessians" means."""
    return ctx.inputs[need].with_suffix(".safetensors")


def overlay(ctx: StageContext, *needs: str) -> TensorSource:
    """The base with the packed tensors of those of `needs` that this stage has as inputs."""
    layers = [tensors_at(ctx, need) for need in needs if need in ctx.inputs]
    return Overlay(Checkpoint.open(ctx.inputs[BASE]), *layers)


def open_body(ctx: StageContext) -> TensorSource:
    """The base with the body as it ships; everything else in 16 bits."""
    return overlay(ctx, "target/packed", "signs/packed")


def weight(source: TensorSource, module: str) -> Any:
    """The dense matrix of a module, fp32 [n, k], dequantized if it is packed."""
    import torch

    from artifacts.packing import load_matrix

    return load_matrix(source, module, torch.float32, "cpu")


def solve_matrices(
    ctx: StageContext,
    source: TensorSource,
    hessians: Mapping[str, HessianSum],
    names: Mapping[str, str],
    scheme: Scheme,
) -> dict[str, Solved]:
    """GPTQ of every module in `names` (module to its Hessian's name), with a progress bar."""
    from calibration.solve import solve

    solved: dict[str, Solved] = {}
    with ctx.progress.task("solving", len(names), "matrices") as task:
        for module, hessian in names.items():
            solved[module] = solve(
                module,
                weight(source, module),
                hessians[hessian],
                scheme,
                damping=ctx.config["dampening"],
            )
            ctx.checkpoint(module)
            task.advance()
    return solved


def write_packed(out: Path, matrices: Mapping[str, PackedMatrix]) -> None:
    """Write `packed.safetensors` with the triple of every matrix."""
    from artifacts.tensor_file import write_single

    tensors = {k: v for name, matrix in matrices.items() for k, v in matrix.tensors(name).items()}
    write_single(out / "packed.safetensors", tensors)


def write_solved(out: Path, solved: Mapping[str, Solved]) -> None:
    """Write `packed.safetensors` and `ledger.json` of solved matrices."""
    from artifacts.ledger import write_ledger

    write_packed(out, {name: result.matrix for name, result in solved.items()})
    write_ledger(out / "ledger.json", [result.entry for result in solved.values()])


def error_summary(solved: Mapping[str, Solved]) -> dict[str, Any]:
    """Mean output error against calibration inputs, and round-to-nearest's beside it."""
    entries = [result.entry for result in solved.values()]
    own = [entry.output_error for entry in entries if entry.output_error is not None]
    rtn = [entry.rtn_output_error for entry in entries if entry.rtn_output_error is not None]
    return {
        "matrices": len(entries),
        "output_error": sum(own) / max(len(own), 1),
        "rtn_output_error": sum(rtn) / max(len(rtn), 1),
    }
