"""The target's forward pass against transformers, and against itself cut into pieces."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts.checkpoint import Checkpoint
from artifacts.runtime.linear import observe
from artifacts.runtime.target import Target
from tests import checkpoints

KINDS = ("tiny", "tied", "vl", "qwen3", "llama")


def _build(kind: str, folder: Path) -> Path:
    if kind in ("qwen3", "llama"):
        return checkpoints.dense(folder, kind=kind)
    return checkpoints.tiny(folder, tied=kind == "tied", vl=kind == "vl")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {kind: _build(kind, root / kind) for kind in KINDS}


def _ids(b: int, t: int, seed: int = 0, vocab: int = 500) -> torch.Tensor:
    return torch.randint(0, vocab, (b, t), generator=torch.Generator().manual_seed(seed))


def _reference(folder: Path, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    return out.logits, out.hidden_states


@pytest.mark.parametrize("kind", ["tiny", "tied", "qwen3", "llama"])
def test_logits_equal_transformers(kind: str, folders: dict[str, Path]) -> None:
    ids = _ids(3, 75)
    expected, hidden = _reference(folders[kind], ids)
    target = Target.load(Checkpoint.open(folders[kind]))
    taps = (0, target.config.num_layers - 2)
    out = target.forward(ids, tap_ids=taps)
    torch.testing.assert_close(target.logits(out.hidden_bth), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.hidden_bth, hidden[-1], atol=1e-4, rtol=1e-4)
    tapped = torch.cat([hidden[i + 1] for i in taps], dim=-1)
    torch.testing.assert_close(out.taps_bth, tapped, atol=1e-4, rtol=1e-4)


def test_vl_prefix_is_the_same_model(folders: dict[str, Path]) -> None:
    ids = _ids(2, 20)
    flat = Target.load(Checkpoint.open(folders["tiny"])).forward(ids)
    nested = Target.load(Checkpoint.open(folders["vl"])).forward(ids)
    assert torch.equal(flat.hidden_bth, nested.hidden_bth)


@pytest.mark.parametrize("kind", ["tiny", "qwen3"])
def test_ragged_prefill_then_steps_equal_teacher_forcing(
    kind: str, folders: dict[str, Path]
) -> None:
    target = Target.load(Checkpoint.open(folders[kind]))
    lengths, more = [37, 1, 64, 9, 33], 12
    ids = _ids(5, 64 + more, seed=1)
    ids = torch.stack(
        [torch.cat((r[:n], r[64:], r[n:64])) for r, n in zip(ids, lengths, strict=True)]
    )
    full = target.forward(ids, lengths_b=[n + more for n in lengths], tap_ids=(1,))
    state = target.new_state(5, 80)
    padded = ids[:, :64].clone()
    for row, n in enumerate(lengths):
        padded[row, n:] = 7
    out = target.forward(padded, state, lengths_b=lengths, tap_ids=(1,))
    assert full.taps_bth is not None and out.taps_bth is not None
    for row, n in enumerate(lengths):
        torch.testing.assert_close(out.hidden_bth[row, :n], full.hidden_bth[row, :n])
        torch.testing.assert_close(out.taps_bth[row, :n], full.taps_bth[row, :n])
    at = torch.tensor(lengths)
    rows = torch.arange(5)
    for step, width in ((0, 1), (1, 1), (2, 3), (5, 1), (6, 1)):
        index = at[:, None] + step + torch.arange(width)
        out = target.forward(ids.gather(1, index), state)
        expected = full.hidden_bth[rows[:, None], index]
        torch.testing.assert_close(out.hidden_bth, expected, atol=2e-4, rtol=1e-4)
    assert state.lengths == [n + 7 for n in lengths]


def test_prefill_in_groups_equals_one_pass(folders: dict[str, Path]) -> None:
    target = Target.load(Checkpoint.open(folders["tiny"]))
    ids = _ids(6, 40, seed=2)
    lengths = [40, 3, 17, 40, 1, 25]
    one, many = target.new_state(6, 41), target.new_state(6, 41)
    a = target.forward(ids, one, lengths_b=lengths, tap_ids=(0, 3))
    target.pass_tokens = 80
    b = target.forward(ids, many, lengths_b=lengths, tap_ids=(0, 3))
    c = target.forward(ids, lengths_b=lengths, tap_ids=(0, 3))
    for row, n in enumerate(lengths):
        for other in (b, c):
            torch.testing.assert_close(a.hidden_bth[row, :n], other.hidden_bth[row, :n])
            assert a.taps_bth is not None and other.taps_bth is not None
            torch.testing.assert_close(a.taps_bth[row, :n], other.taps_bth[row, :n])
    assert one.lengths == many.lengths
    step = _ids(6, 1, seed=3)
    torch.testing.assert_close(
        target.forward(step, one).hidden_bth, target.forward(step, many).hidden_bth
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_commit_keeps_exactly_what_was_accepted(seed: int, folders: dict[str, Path]) -> None:
    """60 calls with random acceptance, wrong tokens behind each accepted prefix."""
    target = Target.load(Checkpoint.open(folders["tiny"]))
    choice = torch.Generator().manual_seed(seed)
    ids = _ids(2, 500, seed=4)
    full = target.forward(ids)
    state = target.new_state(2, 500)
    target.forward(ids[:, :5], state)
    for _ in range(60):
        width = int(torch.randint(1, 9, (1,), generator=choice))
        keep = torch.randint(1, width + 1, (2,), generator=choice)
        call = torch.stack([ids[row, n : n + width] for row, n in enumerate(state.lengths)])
        call = torch.where(torch.arange(width) >= keep[:, None], (call + 1) % 500, call)
        starts = list(state.lengths)
        out = target.forward(call, state, snapshots=True)
        assert state.lengths == starts
        state.commit(keep)
        for row, (n, k) in enumerate(zip(starts, keep.tolist(), strict=True)):
            torch.testing.assert_close(
                out.hidden_bth[row, :k], full.hidden_bth[row, n : n + k], atol=3e-4, rtol=1e-3
            )
    assert min(state.lengths) > 130


def test_thread_count_changes_nothing(folders: dict[str, Path]) -> None:
    """Groups of rows are cut by a fixed rule: the result is the same bytes with 1 and 3 threads."""
    target = Target.load(Checkpoint.open(folders["tiny"]))
    target.pass_tokens, target.pass_rows = 64, 2
    ids, lengths = _ids(7, 30, seed=8), [30, 7, 12, 30, 1, 22, 19]
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            forced = target.forward(ids, lengths_b=lengths).hidden_bth
            state = target.new_state(7, 40)
            target.forward(ids, state, lengths_b=lengths)
            step = target.forward(ids[:, :1], state).hidden_bth
            assert torch.get_num_threads() == count
            results.append((forced, step))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_observed_pass_is_serial(folders: dict[str, Path]) -> None:
    """Observers see every valid row once, from the caller's thread."""
    target = Target.load(Checkpoint.open(folders["tiny"]))
    target.pass_tokens = 32
    seen: dict[str, int] = {}
    threads: set[int] = set()

    def count(name: str, x_tk: torch.Tensor) -> None:
        threads.add(threading.get_ident())
        seen[name] = seen.get(name, 0) + x_tk.shape[0]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with observe(target.linears(), count):
            target.forward(_ids(5, 20), lengths_b=[20, 3, 20, 9, 14])
    finally:
        torch.set_num_threads(before)
    assert set(seen.values()) == {66} and threads == {threading.get_ident()}
    assert "model.layers.0.linear_attn.in_proj_z" in seen and "lm_head" not in seen


def test_select_drops_rows(folders: dict[str, Path]) -> None:
    target = Target.load(Checkpoint.open(folders["tiny"]))
    ids = _ids(4, 12, seed=5)
    state = target.new_state(4, 20)
    target.forward(ids, state, lengths_b=[12, 5, 9, 12])
    alone = target.new_state(2, 20)
    target.forward(ids[[2, 0]], alone, lengths_b=[9, 12])
    state.select([2, 0])
    step = _ids(2, 1, seed=6)
    torch.testing.assert_close(
        target.forward(step, state).hidden_bth, target.forward(step, alone).hidden_bth
    )
    assert state.lengths == alone.lengths == [10, 13]
