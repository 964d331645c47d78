"""The block drafters against their row-by-row reference; each tensor matters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from artifacts.checkpoint import Checkpoint
from artifacts.runtime.dflash import Drafter
from artifacts.runtime.linear import observe
from artifacts.runtime.target import Target
from tests import checkpoints
from tests.oracles.dflash import DraftOracle
from tests.oracles.rows import load_all

VARIANTS = {
    "dflash2": {},
    "dflash2-window": {"sliding_window": 3},
    "dflash2-causal": {"is_causal": True},
    "dflash2-full": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "dflash": {"version": 1},
}


@pytest.fixture(scope="module")
def taps(target: Target) -> torch.Tensor:
    ids = torch.randint(0, 500, (2, 12), generator=torch.Generator().manual_seed(9))
    out = target.forward(ids, tap_ids=(0, 2, 3))
    assert out.taps_bth is not None
    return out.taps_bth


def _oracle(folder: Path, tiny_folder: Path) -> DraftOracle:
    base = load_all(tiny_folder)
    return DraftOracle(
        load_all(folder),
        Checkpoint.open(folder).config,
        base["model.embed_tokens.weight"],
        base["lm_head.weight"],
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_block_and_walk_equal_the_reference(
    variant: str, tmp_path: Path, tiny_folder: Path, target: Target, taps: torch.Tensor
) -> None:
    folder = checkpoints.draft(tmp_path, **VARIANTS[variant])
    drafter, oracle = Drafter.load(Checkpoint.open(folder), target), _oracle(folder, tiny_folder)
    context = drafter.context(drafter.fuse(taps))
    anchors, positions = torch.tensor([33, 450]), [10, 5]
    hidden = drafter.block(anchors, positions, context)
    uniforms = torch.rand(2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    greedy = drafter.walk(anchors, hidden)
    sampled = drafter.walk(anchors, hidden, 0.7, uniforms)
    for b in range(2):
        features = [oracle.feature(taps[b, j]) for j in range(positions[b])]
        slow = oracle.block(int(anchors[b]), positions[b], features)
        torch.testing.assert_close(hidden[b].double(), torch.stack(slow), atol=2e-5, rtol=1e-4)
        if "dflash2" not in variant:
            logits = torch.stack([oracle.head @ h for h in slow])
            assert torch.equal(greedy.tokens_bs[b], logits.argmax(-1))
            law = torch.softmax(logits / 0.7, dim=-1)
            assert sampled.q_bsk is not None and sampled.cand_ids_bsk is None
            torch.testing.assert_close(sampled.q_bsk[b], law, atol=1e-5, rtol=1e-3)
            continue
        tokens, _ = oracle.walk(int(anchors[b]), slow)
        assert greedy.tokens_bs[b].tolist() == tokens and greedy.q_bsk is None
        tokens, laws = oracle.walk(int(anchors[b]), slow, 0.7, uniforms[b])
        assert sampled.tokens_bs[b].tolist() == tokens
        assert sampled.cand_ids_bsk is not None and sampled.q_bsk is not None
        for step, law_by_id in enumerate(laws):
            ids = sampled.cand_ids_bsk[b, step].tolist()
            assert set(ids) == set(law_by_id)
            expected = torch.tensor([law_by_id[i] for i in ids], dtype=torch.float64)
            torch.testing.assert_close(sampled.q_bsk[b, step], expected, atol=1e-4, rtol=1e-3)


def test_context_in_pieces_and_shared_rows(drafter: Drafter, taps: torch.Tensor) -> None:
    """Ragged appends with rejected rows behind them, and several anchors on one context row."""
    feature = drafter.fuse(taps)
    whole = drafter.context(feature)
    pieces = drafter.new_context(2, 20)
    drafter.extend(pieces, feature[:, :6], [6, 3])
    at = torch.tensor([6, 3])[:, None] + torch.arange(4)
    drafter.extend(pieces, feature[torch.arange(2)[:, None], at], [2, 4])
    assert pieces.lengths == [8, 7]
    anchors = torch.tensor([7, 8])
    torch.testing.assert_close(
        drafter.block(anchors, [8, 7], pieces), drafter.block(anchors, [8, 7], whole)
    )
    shared = drafter.block(torch.tensor([1, 2, 3]), [4, 9, 11], whole, rows=torch.tensor([1, 0, 1]))
    alone = drafter.block(torch.tensor([3]), [11], whole.select([1]))
    torch.testing.assert_close(shared[2:], alone)


def test_context_rows_are_not_observed(drafter: Drafter, taps: torch.Tensor) -> None:
    seen: dict[str, int] = {}

    def count(name: str, x_tk: torch.Tensor) -> None:
        seen[name] = seen.get(name, 0) + x_tk.shape[0]

    with observe(drafter.linears(), count):
        context = drafter.context(drafter.fuse(taps))
        assert seen == {"fc": 24}
        drafter.block(torch.tensor([7, 8]), [8, 7], context)
    assert seen.pop("fc") == 24
    assert set(seen.values()) == {2 * drafter.block_size}
    assert len([n for n in seen if n.endswith("_proj")]) == 14


def test_every_tensor_changes_the_draft(
    tmp_path: Path, target: Target, draft_folder: Path, taps: torch.Tensor
) -> None:
    """Scaling any one tensor moves the scores: nothing is loaded and then left unused."""
    config = checkpoints.draft_config()
    tensors = checkpoints.draft_tensors(config)

    def scores(folder: Path) -> torch.Tensor:
        drafter = Drafter.load(Checkpoint.open(folder), target)
        context = drafter.context(drafter.fuse(taps))
        anchors = torch.tensor([33, 450])
        hidden = drafter.block(anchors, [10, 5], context)
        uniforms = torch.full((2, 3), 0.4, dtype=torch.float64)
        draft = drafter.walk(anchors, hidden, 1.0, uniforms)
        assert draft.q_bsk is not None
        return torch.cat((hidden.double().flatten(), draft.q_bsk.flatten()))

    base = scores(draft_folder)
    assert len(tensors) == 36
    for name, tensor in tensors.items():
        changed = checkpoints.draft(tmp_path / name, tensors={name: tensor * 1.5})
        assert float((scores(changed) - base).abs().max()) > 1e-4, name
