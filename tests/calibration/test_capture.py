"""Capture: every Hessian against brute force, row counts by hand, prompt rows, self-checks, NaN."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts.checkpoint import Checkpoint
from artifacts.errors import TrimtabError
from artifacts.runtime.dflash import Drafter
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.target import Target, TargetOutput
from calibration.capture import Captured, CaptureRows, capture
from calibration.traffic import Traffic
from tests.calibration.test_replay import make_traffic, scripted_traffic
from tests.checkpoints import draft, tiny
from tests.oracles.replay import Rows, dflash_block, drafter_rows, mtp_chain, mtp_rows

DEPTH = 3
MTP_NAMES = [
    "mtp.fc",
    *(f"mtp.layers.0.self_attn.{p}_proj" for p in "qkvo"),
    *(f"mtp.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")),
]
DRAFTER_NAMES = [
    "drafter.fc",
    *(f"drafter.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qkvo"),
    *(f"drafter.layers.{i}.mlp.{p}_proj" for i in range(2) for p in ("gate", "up", "down")),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(Checkpoint.open(tiny(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory, target: Target) -> MtpHead:
    return MtpHead.load(Checkpoint.open(tiny(tmp_path_factory.mktemp("tiny"))), target)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Drafter:
    return Drafter.load(Checkpoint.open(draft(tmp_path_factory.mktemp("draft"))), target)


def relative_error(captured: Captured, name: str, gram_kk: torch.Tensor) -> float:
    sum_kk = captured.sums[name].sum_kk.double()
    return float((sum_kk - gram_kk).norm() / gram_kk.norm())


def head_rows(target: Target, traffic: Traffic, *, prompts: bool = False) -> Rows:
    rows = Rows()
    for prompt, sequence in zip(traffic.prompts.ids, traffic.sequences(), strict=True):
        hidden_th = target.forward(torch.tensor([sequence])).hidden_bth[0]
        rows("lm_head", hidden_th[0 if prompts else len(prompt) - 1 : len(sequence) - 1])
    return rows


def test_head_and_mtp_hessians_equal_brute_force(target: Target, mtp: MtpHead) -> None:
    traffic = scripted_traffic(lambda prefix: mtp_chain(target, mtp, prefix, DEPTH), 6, seed=9)
    captured = capture(target, traffic, mtp=mtp, depth=DEPTH, chunk_tokens=120, source="traffic")
    assert sorted(captured.sums) == sorted(["lm_head", *MTP_NAMES])

    outputs = sum(map(len, traffic.outputs))
    assert captured.sums["lm_head"].rows == outputs
    assert relative_error(captured, "lm_head", head_rows(target, traffic).gram("lm_head")) < 1e-5

    slow, anchors = Rows(), 0
    for prompt, sequence in zip(traffic.prompts.ids, traffic.sequences(), strict=True):
        anchors += mtp_rows(target, mtp, sequence, len(prompt), DEPTH, slow)
    processed = sum(len(s) - 1 for s in traffic.sequences())
    for name in MTP_NAMES:
        assert captured.sums[name].rows == slow.count(name) == processed + anchors * (DEPTH - 1)
        assert relative_error(captured, name, slow.gram(name)) < 1e-5
        assert captured.sums[name].source == "traffic"
    assert captured.counts == {
        "sequences": 6,
        "tokens": processed + 6,
        "lm_head_rows": outputs,
        "mtp_refresh_rows": processed,
        "mtp_chain_rows": anchors * (DEPTH - 1),
        "mtp_anchors": anchors,
        "mtp_accepted": outputs - 6 - anchors,
    }
    q, k, v, gate, up = (MTP_NAMES[i] for i in (1, 2, 3, 5, 6))
    assert captured.sums[q] is captured.sums[k] is captured.sums[v]
    assert captured.sums[gate] is captured.sums[up]
    assert captured.check.prompts == 1 and captured.check.states_max_difference < 1e-3


def test_drafter_hessians_equal_brute_force(target: Target, drafter: Drafter) -> None:
    traffic = scripted_traffic(lambda prefix: dflash_block(target, drafter, prefix), 5, seed=9)
    captured = capture(target, traffic, drafter=drafter, chunk_tokens=120)
    assert sorted(captured.sums) == sorted(["lm_head", *DRAFTER_NAMES])
    slow, anchors = Rows(), 0
    for prompt, sequence in zip(traffic.prompts.ids, traffic.sequences(), strict=True):
        anchors += drafter_rows(target, drafter, sequence, len(prompt), slow)
    processed = sum(len(s) - 1 for s in traffic.sequences())
    for name in DRAFTER_NAMES:
        plain = name.removeprefix("drafter.")
        expected = processed if plain == "fc" else anchors * drafter.block_size
        assert captured.sums[name].rows == slow.count(plain) == expected
        assert relative_error(captured, name, slow.gram(plain)) < 1e-5
    assert captured.counts["drafter_anchors"] == anchors
    assert captured.counts["drafter_query_rows"] == anchors * 4
    assert captured.counts["drafter_accepted"] == sum(map(len, traffic.outputs)) - 5 - anchors


def test_prompt_rows_of_the_context_can_stay_out(target: Target, drafter: Drafter) -> None:
    traffic = make_traffic(4, seed=15)
    captured = capture(target, traffic, drafter=drafter, rows=CaptureRows(context=False))
    assert captured.sums["drafter.fc"].rows == sum(map(len, traffic.outputs))


def test_other_chunks_give_the_same_sums(target: Target, mtp: MtpHead, drafter: Drafter) -> None:
    traffic = make_traffic(9, seed=10)
    one = capture(target, traffic, mtp=mtp, depth=2, drafter=drafter, chunk_tokens=1)
    all_ = capture(target, traffic, mtp=mtp, depth=2, drafter=drafter, chunk_tokens=10**6)
    assert one.counts == all_.counts
    for name, total in one.sums.items():
        assert relative_error(all_, name, total.sum_kk.double()) < 1e-5


def test_prompt_rows_as_the_recipe_says(target: Target, mtp: MtpHead) -> None:
    traffic = make_traffic(5, seed=11)
    rows = CaptureRows(lm_head=True, mtp=False)
    captured = capture(target, traffic, mtp=mtp, depth=1, rows=rows)
    processed = sum(len(s) - 1 for s in traffic.sequences())
    outputs = sum(map(len, traffic.outputs))
    assert captured.sums["lm_head"].rows == processed
    gram_kk = head_rows(target, traffic, prompts=True).gram("lm_head")
    assert relative_error(captured, "lm_head", gram_kk) < 1e-5
    assert captured.sums["mtp.fc"].rows == outputs == captured.counts["mtp_refresh_rows"]
    assert captured.counts["mtp_chain_rows"] == 0


class Spoiled:
    """A target that gives NaN states for one prompt."""

    def __init__(self, target: Target, prompt: list[int]) -> None:
        self._target, self._prompt = target, prompt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, ids_bt: torch.Tensor, **options: Any) -> TargetOutput:
        out = self._target.forward(ids_bt, **options)
        hidden = out.hidden_bth.clone()
        for b, ids in enumerate(ids_bt.tolist()):
            if ids[: len(self._prompt)] == self._prompt:
                hidden[b, len(self._prompt)] = torch.nan
        return dataclasses.replace(out, hidden_bth=hidden)


def test_a_row_that_is_not_finite_names_its_prompt(target: Target, mtp: MtpHead) -> None:
    traffic = make_traffic(6, seed=12)
    spoiled: Any = Spoiled(target, traffic.prompts.ids[4])
    with pytest.raises(TrimtabError, match=r"lm_head: prompt p4: input row \d+"):
        capture(spoiled, traffic, mtp=mtp)


def test_mtp_rows_that_are_not_finite_name_their_prompt(target: Target, mtp: MtpHead) -> None:
    """The head's own overflow: the states are fine, its inputs are not."""
    traffic = make_traffic(6, seed=13)

    class Overflowing:
        def __getattr__(self, name: str) -> Any:
            return getattr(mtp, name)

        def teacher_forced(self, ids: torch.Tensor, hidden: torch.Tensor, lengths: Any) -> Any:
            hidden = hidden.clone()
            for b, row in enumerate(ids.tolist()):
                if row[:3] == traffic.prompts.ids[2][:3]:
                    hidden[b, 1] = torch.inf
            return mtp.teacher_forced(ids, hidden, lengths)

    broken: Any = Overflowing()
    with pytest.raises(TrimtabError, match=r"mtp\.\S+: prompt p2: input row"):
        capture(target, traffic, mtp=broken)


def test_outputs_of_one_token_have_no_anchors(target: Target, mtp: MtpHead) -> None:
    traffic = make_traffic(4, seed=14, longest=2)
    captured = capture(target, traffic.select([1, 2]), mtp=mtp, depth=3)
    assert captured.counts["mtp_anchors"] == 0
    assert captured.sums["mtp.fc"].rows == captured.counts["mtp_refresh_rows"] > 0


MEMORY_PROBE = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from artifacts.checkpoint import Checkpoint
from artifacts.runtime.dflash import Drafter
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.target import Target
from calibration.capture import capture
from tests.calibration.test_replay import make_traffic
from tests.checkpoints import draft, tiny

def peak():  # getrusage's figure would be the parent's, which it survives exec with
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

folder, length, chunk = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
before = peak()
source = Checkpoint.open(tiny(folder / "tiny"))
target = Target.load(source)
mtp = MtpHead.load(source, target)
drafter = Drafter.load(Checkpoint.open(draft(folder / "draft")), target)
for rows in map(int, sys.argv[4:]):
    traffic = make_traffic(rows, seed=rows)
    for prompt, output in zip(traffic.prompts.ids, traffic.outputs):
        prompt += [i % 250 for i in range(length - len(prompt) - len(output))]
    capture(target, traffic, mtp=mtp, drafter=drafter, chunk_tokens=chunk)
    print(peak() - before)
"""


def peaks_above_baseline(
    folder: Path, length: int, chunk: int, rows: tuple[int, int]
) -> list[float]:
    """MiB above the state after the imports, after the small and after the large capture."""
    root = Path(__file__).parents[2]
    arguments = [folder, length, chunk, *rows]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, *map(str, arguments)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def test_memory_does_not_grow_with_the_traffic(tmp_path: Path) -> None:
    small, large = peaks_above_baseline(tmp_path, 128, 1024, (24, 96))
    assert 0 < small <= large <= 1.1 * small
    assert large < 400


@pytest.mark.full
def test_memory_at_full_length(tmp_path: Path) -> None:
    small, large = peaks_above_baseline(tmp_path, 1024, 8192, (64, 512))
    assert 0 < small <= large <= 1.1 * small
    assert large < 1024
