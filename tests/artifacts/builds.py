"""A small complete BUILD for the tests: TINY and DRAFT, rounded to nearest, with all side files.

Axes: n rows, k inputs, g groups. The rounding here is the plain one (scale amax / 7 or amax / 127),
independent of `calibration`. Invariant: same arguments, same bytes.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from artifacts import draft_vocab
from artifacts.checkpoint import Checkpoint, Overlay, atomic_write_json, write_shards, write_single
from artifacts.ledger import LedgerEntry, write_ledger
from artifacts.manifest import BuildInfo
from artifacts.names import linear_modules, role
from artifacts.packing import PackedMatrix, Scheme
from artifacts.quant_config import from_contents
from tests.checkpoints import draft, tiny

KEPT_ROLES = {"in_proj_a", "in_proj_b", "kernel_projection", "hidden_projection"}
IDS = [*range(100, 180), 490, 495, 498, 7]


def round_plain(w_nk: torch.Tensor, scheme: Scheme) -> PackedMatrix:
    """Round to nearest with scale amax / code_max, in bf16 before the codes are computed."""
    n, k = w_nk.shape
    groups = scheme.groups(k)
    w = w_nk.float().view(n, groups, -1)
    scale = (w.abs().amax(-1) / scheme.code_max).clamp(min=1e-6).bfloat16().float()
    codes = (w / scale.unsqueeze(-1)).round().clamp(scheme.code_min, scheme.code_max)
    return PackedMatrix.from_codes(codes.view(n, k).to(torch.int8), scale, scheme)


def quantize(source: Checkpoint, path: Path, schemes: dict[str, Scheme]) -> list[LedgerEntry]:
    """Writes the triples of `schemes` (module -> scheme) to one file; returns ledger entries."""
    tensors: dict[str, torch.Tensor] = {}
    entries = []
    for name, scheme in schemes.items():
        matrix = round_plain(source.get(f"{name}.weight"), scheme)
        tensors |= matrix.tensors(name)
        entries.append(
            LedgerEntry(
                name=name,
                method="gptq",
                bits=scheme.bits,
                group_size=scheme.group_size,
                shape=matrix.shape,
                rows=4096,
                damping=0.01,
                damping_tries=1,
                output_error=0.05,
                rtn_output_error=0.1,
            )
        )
    write_single(path, tensors)
    return entries


def body_schemes(source: Checkpoint) -> dict[str, Scheme]:
    """int4 g128 everywhere, int8 g128 for lm_head; a and b projections stay."""
    names = [
        name
        for name in linear_modules(source)
        if role(name) not in KEPT_ROLES and "visual" not in name
    ]
    return {name: Scheme(8 if name == "lm_head" else 4, 128) for name in names}


def write_artifact(source: Any, origin: Path, folder: Path, *, shard_bytes: int = 1 << 20) -> None:
    """A checkpoint folder from a source: shards, index, config, and the origin's other files."""
    tensors = ((name, source.get(name)) for name in source.names())
    write_shards(folder, tensors, max_shard_bytes=shard_bytes, separate={"mtp.": "mtp"})
    quantization = from_contents(source)
    extra = {} if quantization is None else {"quantization_config": quantization}
    atomic_write_json(folder / "config.json", {**source.config, **extra})
    for path in origin.iterdir():
        if not path.name.endswith((".safetensors", ".index.json")) and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)


def gates(*, failing: str | None = None) -> dict[str, Any]:
    """A gates.json with a quality gate and an acceptance gate."""
    verdicts = [
        ("target_perplexity", "target_perplexity_ratio", "at_most", 1.05, 1.02, "tokens"),
        ("drafter_acceptance", "drafter_tokens_per_step_ratio", "at_least", 0.98, 0.99, "prompts"),
    ]
    return {
        "gates": [
            {
                "gate": name,
                "statistic": statistic,
                "side": side,
                "threshold": threshold,
                "bound": "point",
                "minimum_sample": 100,
                "unit": unit,
                "value": value,
                "sample": 300,
                "passed": name != failing,
                "reason": "",
            }
            for name, statistic, side, threshold, value, unit in verdicts
        ]
    }


def info(**overrides: Any) -> BuildInfo:
    """What a pipeline would hand to `seal`."""
    values: dict[str, Any] = {
        "name": "tiny-test",
        "base_model": "acme/Tiny",
        "base_revision": "0" * 40,
        "licence": "apache-2.0",
        "recipe": {"target": {"bits": 4}},
        "inputs": {"base": "1" * 64},
        "versions": {"torch": "2.13.0"},
        "seeds": {"recipe": 0},
        "device": "cpu float32",
        "gates": gates(),
        "drafters": [{"method": "dflash2", "tokens_per_step": 3.21, "block_size": 4}],
        "prompt_sets": {"heldout": "2" * 64},
        "source_bytes": {"target": 12_345_678},
    }
    return BuildInfo(**{**values, **overrides})


@dataclass(frozen=True)
class Built:
    """Folders of a build and of its sources."""

    build: Path
    base: Path
    drafter: Path

    def copy(self, folder: Path) -> Built:
        """The build copied to `folder`, for tests that damage it; the sources stay."""
        shutil.copytree(self.build, folder)
        return Built(folder, self.base, self.drafter)


def make(folder: Path, **tiny_arguments: Any) -> Built:
    """TINY and DRAFT quantized into `folder`/build, unsealed."""
    base_folder = tiny(folder / "base", **tiny_arguments)
    draft_folder = draft(folder / "draft")
    build = folder / "build"
    base, drafter = Checkpoint.open(base_folder), Checkpoint.open(draft_folder)
    entries = quantize(base, folder / "target.safetensors", body_schemes(base))
    target = Overlay(base, folder / "target.safetensors")
    write_artifact(target, base_folder, build / "target")
    write_ledger(build / "ledger.json", entries)
    names = [name for name in linear_modules(drafter) if role(name) not in KEPT_ROLES]
    schemes = {name: Scheme(4, 64) for name in names}
    entries = quantize(drafter, folder / "drafter.safetensors", schemes)
    overlay = Overlay(drafter, folder / "drafter.safetensors")
    write_artifact(overlay, draft_folder, build / "drafter")
    write_ledger(build / "drafter_ledger.json", entries)
    draft_vocab.write_from_head(build / "draft_vocab", IDS, target, {"coverage": 0.9})
    atomic_write_json(build / "gates.json", gates())
    return Built(build, base_folder, draft_folder)


def edit_json(path: Path, change: Any) -> None:
    """Reads, changes in place and writes a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
