"""A published body with negative scales goes through the whole pipeline, with an int8 embedding.

The body is made in AutoRound's way: in half of the groups the sign of the scale is turned and the
largest weight sits on code -8.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from artifacts.checkpoint import Checkpoint, Overlay, write_shards
from artifacts.names import linear_modules, role
from artifacts.packing import PackedMatrix
from artifacts.quant_config import from_contents
from artifacts.scheme import Scheme
from artifacts.tensor_file import write_single
from calibration.grid import amax_scales, dequantize, round_to_nearest
from pipeline import recipe as recipes
from pipeline.runner import Runner
from pipeline.stages import registry
from tests.pipeline import tiny_family

SCHEME = Scheme(4, 128)


def signed(weight_nk: torch.Tensor) -> PackedMatrix:
    """Every second group with a negative scale and its largest weight on code -8."""
    scale_ng = amax_scales(weight_nk, SCHEME)
    grouped = weight_nk.view(len(weight_nk), -1, 128)
    extreme = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True)).squeeze(-1)
    full = (extreme / -8).to(torch.bfloat16).float()  # the extremum lands on -8
    turn = torch.arange(scale_ng.numel()).view_as(scale_ng) % 2 == 0
    turn &= full < 0
    scale_ng = torch.where(turn, full, scale_ng)
    codes = (grouped / scale_ng.unsqueeze(-1)).round().clamp(-8, 7).to(torch.int8)
    return PackedMatrix.from_codes(codes.view_as(weight_nk), scale_ng, SCHEME)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Work folder of a finished run; the imported base lies in ../family/imported."""
    folder = tmp_path_factory.mktemp("imported") / "family"
    tiny_family.make(folder)
    base = Checkpoint.open(folder / "target")
    modules = [
        m
        for m in linear_modules(base)
        if ".layers." in m
        and not m.startswith("mtp.")
        and role(m) not in ("in_proj_a", "in_proj_b")
    ]
    triples = {}
    for module in modules:
        triples |= signed(base.get(f"{module}.weight").float()).tensors(module)
    write_single(folder / "body.safetensors", triples)
    source = Overlay(base, folder / "body.safetensors")
    imported = folder / "imported"
    shutil.copytree(folder / "target", imported, ignore=shutil.ignore_patterns("*.safetensors*"))
    write_shards(imported, ((n, source.get(n)) for n in source.names()), max_shard_bytes=1 << 30)
    config = {**base.config, "quantization_config": from_contents(source)}
    (imported / "config.json").write_text(json.dumps(config))
    recipe = tiny_family.make(
        folder,
        base="{path: imported}",
        target="{source: imported}",
        embedding="{format: int8, group_size: 128}",
    )
    work = folder.parent / "work"
    Runner(recipes.load(recipe), work, registry()).run()
    return work


def summary(work: Path, stage: str) -> dict[str, object]:
    (record,) = (work / "store" / stage).glob("*/record.json")
    result: dict[str, object] = json.loads(record.read_text())["summary"]
    return result


def test_no_scale_of_the_build_is_negative(run: Path) -> None:
    built = Checkpoint.open(run / "dist" / "target")
    scales = [n for n in built.names() if n.endswith(".weight_scale")]
    assert len(scales) > 20
    assert all(bool((built.get(name) > 0).all()) for name in scales)


def test_the_imported_body_had_negative_scales_and_their_cost_is_told(run: Path) -> None:
    before = Checkpoint.open(run.parent / "family" / "imported")
    negative = {
        name.removesuffix(".weight_scale"): int((before.get(name) < 0).sum())
        for name in before.names()
        if name.endswith(".weight_scale")
    }
    cost = summary(run, "signs")["cost"]
    assert isinstance(cost, dict)
    assert {name: told["flipped_groups"] for name, told in cost.items()} == {
        name: count for name, count in negative.items() if count
    }
    assert sum(told["saturated_codes"] for told in cost.values()) >= sum(negative.values())


def test_groups_that_were_positive_are_byte_identical(run: Path) -> None:
    before = Checkpoint.open(run.parent / "family" / "imported")
    built = Checkpoint.open(run / "dist" / "target")
    module = "model.layers.0.mlp.up_proj"
    old, new = (PackedMatrix.from_source(s, module) for s in (before, built))
    positive = old.scale > 0
    assert bool(positive.any()) and not bool(positive.all())
    shape = (*old.scale.shape, -1)
    assert torch.equal(old.codes().view(shape)[positive], new.codes().view(shape)[positive])
    assert torch.equal(old.scale[positive], new.scale[positive])


def test_the_embedding_is_int8_and_close(run: Path) -> None:
    base = Checkpoint.open(run.parent / "family" / "target")
    built = Checkpoint.open(run / "dist" / "target")
    table = base.get("model.embed_tokens.weight").float()
    packed = PackedMatrix.from_source(built, "model.embed_tokens")
    assert packed.bits == 8
    error = (packed.dense() - table).norm() / table.norm()
    assert error < 0.012
    scale = amax_scales(table, Scheme(8, 128))
    plain = dequantize(round_to_nearest(table, scale, Scheme(8, 128)), scale)
    assert error <= (plain - table).norm() / table.norm() * 1.001
