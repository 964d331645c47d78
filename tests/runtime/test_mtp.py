"""The MTP head against its row-by-row reference, and its three paths against each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from artifacts.checkpoint import Checkpoint
from artifacts.runtime.linear import observe
from artifacts.runtime.mtp import ChainEntries, MtpHead
from artifacts.runtime.target import Target
from tests.oracles.mtp import MtpOracle
from tests.oracles.rows import load_all

LENGTHS = [11, 7, 9]


@pytest.fixture(scope="module")
def passed(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 500, (3, 11), generator=torch.Generator().manual_seed(3))
    return ids, target.forward(ids, lengths_b=LENGTHS).hidden_bth


def test_rows_and_chain_equal_the_reference(
    tiny_folder: Path, target: Target, mtp: MtpHead, passed: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Depth 1 at every row, then a chain of two from row 5, fed z after mtp.norm."""
    ids, hidden = passed
    oracle = MtpOracle(load_all(tiny_folder), Checkpoint.open(tiny_folder).config)
    z, kv = mtp.teacher_forced(ids, hidden, LENGTHS)
    for t in range(6):
        expected = oracle.row(int(ids[0, t + 1]), hidden[0, t], t)
        torch.testing.assert_close(z[0, t].double(), expected, atol=1e-5, rtol=1e-4)
    entries: ChainEntries = []
    row, at = torch.tensor([0]), torch.tensor([5])
    deeper = z[0:1, 5]
    slow = oracle_z = expected
    for depth, token in enumerate((17, 401), start=1):
        deeper = mtp.chain(kv, row, at, deeper, torch.tensor([token]), entries)
        oracle_z = oracle.row(token, slow, 5 + depth)
        torch.testing.assert_close(deeper[0].double(), oracle_z, atol=1e-5, rtol=1e-4)
        slow = oracle_z


def test_incremental_equals_teacher_forced(
    mtp: MtpHead, passed: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Ragged refresh, a chain that is truncated, and further refresh rows."""
    ids, hidden = passed
    z, kv = mtp.teacher_forced(ids, hidden, LENGTHS)
    state = mtp.new_state(3, 20)
    counts = [4, 2, 3]
    first = mtp.forward(ids[:, 1:5], hidden[:, :4], state, counts)
    for b, n in enumerate(counts):
        torch.testing.assert_close(first[b, :n], z[b, :n])
    last = torch.tensor(counts) - 1
    rows = torch.arange(3)
    entries: ChainEntries = []
    step, replayed = first[rows, last], z[rows, last]
    for token in (5, 77):
        tokens = torch.full((3,), token)
        step = mtp.forward(tokens[:, None], step[:, None], state)[:, 0]
        replayed = mtp.chain(kv, rows, last, replayed, tokens, entries)
        torch.testing.assert_close(step, replayed, atol=1e-5, rtol=1e-4)
    state.truncate(counts)
    at = torch.tensor(counts)[:, None] + torch.arange(2)
    more = mtp.forward(ids.gather(1, at + 1), hidden[rows[:, None], at], state)
    torch.testing.assert_close(more, z[rows[:, None], at], atol=1e-5, rtol=1e-4)


def test_chain_of_many_anchors_in_one_sequence(
    mtp: MtpHead, passed: tuple[torch.Tensor, torch.Tensor]
) -> None:
    ids, hidden = passed
    z, kv = mtp.teacher_forced(ids, hidden, LENGTHS)
    rows, at = torch.tensor([0, 2, 0, 1]), torch.tensor([2, 7, 9, 5])
    tokens = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]])
    together: ChainEntries = []
    many = z[rows, at]
    for step in tokens:
        many = mtp.chain(kv, rows, at, many, step, together)
    for a in range(4):
        alone: ChainEntries = []
        one = z[rows[a : a + 1], at[a : a + 1]]
        for step in tokens:
            one = mtp.chain(kv, rows[a : a + 1], at[a : a + 1], one, step[a : a + 1], alone)
        torch.testing.assert_close(many[a], one[0], atol=1e-5, rtol=1e-4)


def test_observed_rows_are_the_valid_ones(
    mtp: MtpHead, passed: tuple[torch.Tensor, torch.Tensor]
) -> None:
    ids, hidden = passed
    seen: dict[str, int] = {}

    def count(name: str, x_tk: torch.Tensor) -> None:
        seen[name] = seen.get(name, 0) + x_tk.shape[0]

    quiet, _ = mtp.teacher_forced(ids, hidden, LENGTHS)
    with observe(mtp.linears(), count):
        z, kv = mtp.teacher_forced(ids, hidden, LENGTHS)
        mtp.chain(
            kv, torch.tensor([1, 0]), torch.tensor([2, 3]), z[:2, 2], torch.tensor([4, 5]), []
        )
    assert torch.equal(quiet, z)
    assert set(seen.values()) == {sum(n - 1 for n in LENGTHS) + 2}
    parts = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj"
    names = [*parts.split(), "mlp.up_proj", "mlp.down_proj"]
    assert set(seen) == {"mtp.fc", *(f"mtp.layers.0.{n}" for n in names)}
    assert all(linear.observer is None for linear in mtp.linears())
