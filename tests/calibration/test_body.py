"""The body through llmcompressor's sequential pipeline, on TINY."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from artifacts.checkpoint import Checkpoint, load_single, sha256_file
from artifacts.errors import TrimtabError
from artifacts.ledger import LedgerEntry
from artifacts.names import packed_modules
from artifacts.packing import PackedMatrix, Scheme, load_matrix
from calibration import body
from calibration.body import quantize_body
from tests.checkpoints import tiny
from tests.oracles.gptq import output_energy

INT4 = Scheme(4, 128)
IGNORE = [r"re:.*linear_attn\.in_proj_[ab]$"]
LENGTHS = (96, 96, 96, 80, 80, 57, 31, 1)  # of unlike lengths, so there is padding to keep out
TOKENS = sum(LENGTHS)


def token_rows() -> list[list[int]]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(0, 490, (length,), generator=draw).tolist() for length in LENGTHS]


def run(folder: Path, work: Path, out: str = "packed.safetensors", **options: Any) -> Any:
    arguments: dict[str, Any] = {"seed": 3, "threads": 1, "work_dir": work} | options
    scheme, ignore = arguments.pop("scheme", INT4), arguments.pop("ignore", IGNORE)
    rows = arguments.pop("rows", None) or token_rows()
    return quantize_body(folder, rows, scheme, ignore, work / out, **arguments)


@dataclass
class Run:
    folder: Path
    work: Path
    entries: dict[str, LedgerEntry]
    progress: list[tuple[int, int]]
    touched: list[str]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BATCH_TOKENS", 256)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Two blocks of TINY, one of each kind, quantized once; with what the process kept."""
    patch = pytest.MonkeyPatch()
    patch.setattr(body, "BATCH_TOKENS", 256)
    folder = tiny(tmp_path_factory.mktemp("base"), num_hidden_layers=2)
    work = tmp_path_factory.mktemp("work")
    progress: list[tuple[int, int]] = []

    def kept() -> dict[str, object]:
        return {
            "environment": dict(os.environ),
            "folder": Path.cwd(),
            "torch's random state": torch.get_rng_state().tolist(),
            "numpy's random state": np.random.get_state()[1].tolist(),  # type: ignore[index]
            "Python's random state": random.getstate(),
            "threads": torch.get_num_threads(),
            "files here": sorted(os.listdir()),  # noqa: PTH208
        }

    before = kept()
    entries = run(folder, work, progress=lambda a, b: progress.append((a, b)))
    after = kept()
    touched = [name for name in before if before[name] != after[name]]
    yield Run(folder, work, {entry.name: entry for entry in entries}, progress, touched)
    patch.undo()


LAYER_0 = {
    f"model.layers.0.{name}"
    for name in (
        "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )
}  # fmt: skip
LAYER_1 = {
    f"model.layers.1.{name}"
    for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )
}  # fmt: skip


def test_exactly_the_declared_matrices_leave_each_with_its_entry(done: Run) -> None:
    packed = load_single(done.work / "packed.safetensors")
    assert set(packed_modules(packed)) == LAYER_0 | LAYER_1 == set(done.entries)
    assert len(packed.names()) == 3 * len(done.entries)
    base = Checkpoint.open(done.folder)
    for name, entry in done.entries.items():
        matrix = PackedMatrix.from_source(packed, name)
        assert (matrix.scheme, matrix.shape) == (INT4, base.info(f"{name}.weight").shape)
        assert matrix.scale.dtype is torch.bfloat16 and bool((matrix.scale > 0).all())
        assert (entry.method, entry.rows, entry.damping) == ("gptq", TOKENS, 0.01)
        w = load_matrix(base, name)
        assert entry.weight_error == pytest.approx(
            float((matrix.dense() - w).norm() / w.norm()), rel=1e-3
        )
        assert entry.output_error is not None and entry.rtn_output_error is not None
        assert entry.output_error < 0.8 * entry.rtn_output_error


def test_progress_is_told_by_layer(done: Run) -> None:
    assert done.progress[-1] == (13, 13)
    assert done.progress == sorted(done.progress) and (6, 13) in done.progress


def test_the_process_is_left_as_it_was(done: Run) -> None:
    assert done.touched == []
    assert [path.name for path in done.work.iterdir()] == ["packed.safetensors"]


def rows_read(folder: Path, replaced: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Inputs of a module [t, k], every row of tokens run on its own, some weights replaced."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for module, weight in replaced.items():
        model.get_submodule(module).weight.data.copy_(weight)
    seen: list[torch.Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: seen.append(args[0].flatten(0, 1))
    )
    with torch.no_grad():
        for row in token_rows():
            model(torch.tensor([row]), use_cache=False)
    hook.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("role", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_later_layers_are_calibrated_on_the_quantized_ones(done: Run, role: str) -> None:
    packed = load_single(done.work / "packed.safetensors")
    quantized = {name: load_matrix(packed, name) for name in sorted(LAYER_0)}
    name = f"model.layers.1.{role}"
    w = load_matrix(Checkpoint.open(done.folder), name)
    error = load_matrix(packed, name) - w
    figures = {}
    for case, replaced in (("quantized", quantized), ("16-bit", {})):
        x = rows_read(done.folder, replaced, name).double()
        assert len(x) == TOKENS
        h = x.T @ x
        figures[case] = (output_energy(error, h) / output_energy(w, h)) ** 0.5
    assert done.entries[name].output_error == pytest.approx(figures["quantized"], rel=1e-4)
    assert abs(figures["16-bit"] / figures["quantized"] - 1) > 1e-3


def test_a_second_run_gives_the_same_bytes_and_reads_the_base_only(done: Run) -> None:
    before = {path.name: sha256_file(path) for path in done.folder.iterdir()}
    torch.manual_seed(99)
    entries = run(done.folder, done.work, "again.safetensors")
    assert {entry.name: entry for entry in entries} == done.entries
    assert sha256_file(done.work / "again.safetensors") == sha256_file(
        done.work / "packed.safetensors"
    )
    assert {path.name: sha256_file(path) for path in done.folder.iterdir()} == before


@pytest.fixture
def one_block(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    return tiny(tmp_path / "base", num_hidden_layers=1, full_attention_interval=1)


class GoesAround(torch.nn.Linear):
    """A Linear whose call does not go through hooks."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.nn.functional.linear(x, self.weight)


def loading_with(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    real = body._load_model

    def load(folder: Path) -> Any:
        model = real(folder)
        change(model.model.layers[0])
        return model

    monkeypatch.setattr(body, "_load_model", load)


def test_a_layer_that_bypasses_hooks_ends_the_run(
    one_block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bypass(layer: Any) -> None:
        layer.mlp.up_proj.__class__ = GoesAround

    loading_with(monkeypatch, bypass)
    with pytest.raises(TrimtabError, match=r"model\.layers\.0\.mlp\.up_proj: rows_seen=0"):
        run(one_block, tmp_path)
    assert not (tmp_path / "packed.safetensors").exists()


def test_a_module_called_twice_counts_its_rows_twice(
    one_block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(layer: Any) -> None:
        class Twice(type(layer.mlp)):  # type: ignore[misc]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.gate_proj(2 * x)
                return super().forward(x)  # type: ignore[no-any-return]

        layer.mlp.__class__ = Twice

    loading_with(monkeypatch, twice)
    entries = {entry.name.rpartition(".")[2]: entry for entry in run(one_block, tmp_path)}
    assert entries["gate_proj"].rows == 2 * TOKENS
    assert entries["up_proj"].rows == TOKENS
    assert entries["gate_proj"].method == "gptq"


def test_fallbacks_are_an_error_or_counted(one_block: Path, tmp_path: Path) -> None:
    few: dict[str, Any] = {"rows": [[1, 2, 3]], "dampening": 0.0}
    with pytest.raises(TrimtabError, match=r"model\.layers\.0\..*Hessian of 3 rows for 256"):
        run(one_block, tmp_path, **few)
    with pytest.raises(TrimtabError, match=r"7 of 7 matrices fell back .* 6 allowed"):
        run(one_block, tmp_path, fallback_limit=6, **few)
    entries = run(one_block, tmp_path, fallback_limit=7, **few)
    assert {entry.method for entry in entries} == {"rtn"}
    assert all(entry.reason.startswith("rtn-fallback") for entry in entries)


def test_vl_checkpoints_keep_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "vl").mkdir()
    folder = tiny(tmp_path / "vl", vl=True, num_hidden_layers=1, full_attention_interval=1)
    ignore = [*IGNORE, r"re:model\.language_model\..*\.mlp\.(gate|up)_proj$"]
    entries = run(folder, tmp_path, ignore=ignore, scheme=Scheme(8, -1))
    assert sorted(entry.name for entry in entries) == [
        f"model.language_model.layers.0.{name}"
        for name in (
            "mlp.down_proj", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj",
            "self_attn.v_proj",
        )
    ]  # fmt: skip
    assert {(entry.bits, entry.group_size) for entry in entries} == {(8, -1)}


def test_bad_input_is_refused_before_any_work(one_block: Path, tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="group size 96 does not divide its 256 inputs"):
        run(one_block, tmp_path, scheme=Scheme(4, 96))
    with pytest.raises(TrimtabError, match="leaves no matrix"):
        run(one_block, tmp_path, ignore=["re:.*"])
    with pytest.raises(TrimtabError, match="row 1 is empty"):
        run(one_block, tmp_path, rows=[[1], []])
    with pytest.raises(TrimtabError, match="token 512 of row 0 is outside"):
        run(one_block, tmp_path, rows=[[1, 512]])
    config = one_block / "config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("{", '{"quantization_config": {},', 1), encoding="utf-8")
    with pytest.raises(TrimtabError, match="already quantized"):
        run(one_block, tmp_path)


def test_batches_hold_every_token_once() -> None:
    batches, masks = body._batches(token_rows(), 200)
    rows = []
    for batch, mask in zip(batches, masks, strict=True):
        ids = batch["input_ids"]
        assert ids.shape[1] <= 200 and ids.numel() <= max(200, ids.shape[1])
        kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        rows += [ids[row][kept[row]].tolist() for row in range(len(ids))]
    assert sorted(rows) == sorted(token_rows())
