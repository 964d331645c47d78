"""Replay against real draft-and-verify, and own outputs by the real runtime.

The target is TINY with its sublayers turned down, so that its next token hangs mostly on the
current one; MTP and the selector are wired to guess it, with faults, so that some drafts are
accepted and some are not.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from artifacts.checkpoint import Checkpoint
from artifacts.runtime.decode import Decoder
from artifacts.runtime.dflash import Drafter
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.sampling import SamplingParams
from artifacts.runtime.target import Target
from calibration.replay import Replay, replay_dflash, replay_mtp
from calibration.teacher_forced import TeacherForced
from calibration.tokensets import stable_seed
from calibration.traffic import GREEDY, Traffic, own_outputs
from tests.calibration.test_replay import make_traffic
from tests.checkpoints import (
    MASK_ID,
    draft,
    draft_config,
    draft_tensors,
    tiny,
    tiny_config,
    tiny_tensors,
)

NEW = 20
DEPTH = 3
VOCAB = 512


class Parts(NamedTuple):
    target: Target
    mtp: MtpHead
    drafter: Drafter


def wired_target() -> dict[str, torch.Tensor]:
    tensors = tiny_tensors(tiny_config())
    turned_down = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    wired = {n: 0.1 * t for n, t in tensors.items() if n.endswith(turned_down)}
    noise = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) / 16
    wired["mtp.fc.weight"] = torch.cat([torch.eye(256) + 0.2 * noise, 0.1 * noise], dim=1)
    return {n: t.to(torch.bfloat16) for n, t in wired.items()}


def wired_drafter(following: torch.Tensor, mask_row: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codebooks by which the selector prefers the token that follows its predecessor.

    With the sublayers turned down a mask row stays near the mask's own embedding, so the gate is
    positive on it, and whether the right token is among the candidates is a matter of luck.
    """
    turned_down = ("o_proj.weight", "down_proj.weight", "fc.weight")
    wired = {
        n: 0.2 * t for n, t in draft_tensors(draft_config()).items() if n.endswith(turned_down)
    }
    codes = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(1)).sign()
    wired["candidate_selector.predecessor_codebook"] = codes[following]
    wired["candidate_selector.successor_codebook"] = codes
    wired["candidate_selector.hidden_projection.weight"] = (mask_row / 256).expand(32, 256)
    return {n: t.to(torch.bfloat16).contiguous() for n, t in wired.items()}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    source = Checkpoint.open(tiny(tmp_path_factory.mktemp("tiny"), tensors=wired_target()))
    target = Target.load(source)
    states = target.forward(torch.arange(VOCAB)[:, None]).hidden_bth[:, 0]
    mask_row = target.embedding(torch.tensor(MASK_ID))
    wired = wired_drafter(target.logits(states).argmax(-1), mask_row)
    folder = draft(tmp_path_factory.mktemp("draft"), tensors=wired, selector_top_k=320)
    return Parts(
        target, MtpHead.load(source, target), Drafter.load(Checkpoint.open(folder), target)
    )


@pytest.fixture(scope="module")
def greedy(parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    """Continuations longer than the limit by more than a block: the last step is judged in full."""
    return own_outputs(
        parts.target,
        make_traffic(12, seed=21).prompts,
        GREEDY,
        max_new_tokens=NEW + 4,
        seed=0,
        stop_ids=[],
        chunk=5,
        folder=tmp_path_factory.mktemp("greedy"),
        identity="tiny",
    )


def decoded(
    parts: Parts, method: str, traffic: Traffic, draftable: torch.Tensor
) -> list[list[int]]:
    """Accepted drafts of each step of real decoding, checked to give the same tokens."""
    decoder = Decoder(
        parts.target,
        method,
        mtp=parts.mtp,
        drafter=parts.drafter,
        depth=DEPTH,
        draftable=draftable,
    )
    found = []
    for prompt, output in zip(traffic.prompts.ids, traffic.outputs, strict=True):
        steps = list(decoder.generate(prompt, SamplingParams(), max_new_tokens=NEW))
        assert [t for step in steps for t in step.tokens] == output[:NEW]
        found.append([step.accepted for step in steps[1:]])
    assert decoder.stats.tokens_per_step == pytest.approx(
        sum(sum(a) + len(a) for a in found) / sum(map(len, found))
    )
    return found


def check(replay: Replay, real: list[list[int]]) -> None:
    assert replay.accepted == real
    pooled = sum(map(sum, real)) / sum(map(len, real)) + 1
    assert replay.tokens_per_step == pytest.approx(pooled)
    assert 1.3 < pooled < 3.7  # some accepted, some rejected


@pytest.mark.parametrize("method", ["mtp", "dflash2"])
def test_replay_counts_what_decoding_counts(parts: Parts, greedy: Traffic, method: str) -> None:
    draftable = torch.arange(VOCAB) < 499
    forced = TeacherForced(parts.target, greedy, tap_ids=parts.drafter.tap_ids)
    if method == "mtp":
        replay = replay_mtp(forced, parts.mtp, DEPTH, draftable_v=draftable, limit=NEW)
    else:
        replay = replay_dflash(forced, parts.drafter, draftable_v=draftable, limit=NEW)
    check(replay, decoded(parts, method, greedy, draftable))


def test_own_outputs_do_not_depend_on_the_batch(parts: Parts, tmp_path: Path) -> None:
    prompts = make_traffic(8, seed=22).prompts
    sampling = {"temperature": 1.2, "top_k": 40, "top_p": 0.95}

    def generate(chunk: int, seed: int = 3) -> Traffic:
        return own_outputs(
            parts.target,
            prompts,
            sampling,
            max_new_tokens=12,
            seed=seed,
            stop_ids=[7, 9],
            chunk=chunk,
            folder=tmp_path / f"{chunk}-{seed}",
            identity="tiny",
        )

    one, many = generate(1), generate(8)
    assert one.outputs == many.outputs
    assert generate(8, seed=4).outputs != many.outputs
    for output in many.outputs:
        assert 1 <= len(output) <= 12
        assert not {7, 9} & set(output[:-1])
    assert len({stable_seed(3, e.id) for e in prompts.entries}) == 8
