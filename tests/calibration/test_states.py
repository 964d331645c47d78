"""Teacher-forced states: batch against alone, the self-checks, the held-out sample."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts.checkpoint import Checkpoint
from artifacts.errors import TrimtabError
from artifacts.runtime.target import Target, TargetOutput
from calibration.self_check import SelfCheck
from calibration.states import States, sample_states
from calibration.teacher_forced import TeacherForced
from calibration.traffic import Traffic
from tests.calibration.test_replay import make_traffic
from tests.checkpoints import tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tiny(tmp_path_factory.mktemp("tiny"))
    return Target.load(Checkpoint.open(folder))


def by_row(forced: TeacherForced) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for chunk in forced:
        for b, row in enumerate(chunk.rows):
            assert chunk.taps_btg is not None
            n = int(chunk.lengths_b[b])
            found[row] = (chunk.hidden_bth[b, :n], chunk.taps_btg[b, :n])
    return found


def test_states_belong_to_their_prompt_whatever_the_batch(target: Target) -> None:
    traffic = make_traffic(5, seed=1)
    order = [3, 0, 4, 1, 2]
    many = by_row(TeacherForced(target, traffic, tap_ids=(0, 2), chunk_tokens=10**6))
    alone = by_row(TeacherForced(target, traffic.select(order), tap_ids=(0, 2), chunk_tokens=1))
    sequences = traffic.sequences()
    assert sorted(many) == [0, 1, 2, 3, 4]
    for place, row in enumerate(order):
        for a, b in zip(many[row], alone[place], strict=True):
            assert len(a) == len(sequences[row])
            assert float((a - b).abs().max()) < 1e-3
    widths = {tuple(x.shape[-1] for x in pair) for pair in many.values()}
    assert widths == {(256, 512)}


def test_chunks_are_bounded_kept_or_streamed(target: Target) -> None:
    traffic = make_traffic(20, seed=2)
    kept = TeacherForced(target, traffic, chunk_tokens=100)
    first, second = list(kept), list(kept)
    assert kept.kept and all(a is b for a, b in zip(first, second, strict=True))
    assert len(first) > 3
    assert all(c.ids_bt.numel() <= 100 or len(c.rows) == 1 for c in first)
    assert sorted(r for c in first for r in c.rows) == list(range(20))
    streamed = TeacherForced(target, traffic, chunk_tokens=100, keep_bytes=0)
    again = list(streamed)
    assert not streamed.kept
    for a, b in zip(first, again, strict=True):
        assert a.rows == b.rows and torch.equal(a.hidden_bth, b.hidden_bth)
        assert b is not next(iter(streamed))


def test_masks_by_hand(target: Target) -> None:
    traffic = make_traffic(3, seed=3)
    for chunk in TeacherForced(target, traffic):
        for b, row in enumerate(chunk.rows):
            prompt, output = len(traffic.prompts.ids[row]), len(traffic.outputs[row])
            assert int(chunk.valid_bt()[b].sum()) == prompt + output
            assert int(chunk.processed_bt()[b].sum()) == prompt + output - 1
            answering = chunk.answering_bt()[b].nonzero().squeeze(1).tolist()
            assert answering == list(range(prompt - 1, prompt + output - 1))


def test_traffic_without_outputs_is_refused(target: Target) -> None:
    traffic = make_traffic(3, seed=3)
    traffic.outputs[1].clear()
    with pytest.raises(TrimtabError, match="'p1' has no prompt or no output"):
        TeacherForced(target, traffic)


class Wrong:
    """A target whose captured states are wrong in one way; its lone runs are right."""

    def __init__(self, target: Target, fault: str) -> None:
        self._target = target
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, ids_bt: torch.Tensor, **options: Any) -> TargetOutput:
        out = self._target.forward(ids_bt, **options)
        if self._fault == "prompts swapped":
            return (
                out
                if len(ids_bt) == 1
                else dataclasses.replace(out, hidden_bth=out.hidden_bth.roll(1, 0))
            )
        layer = {"before the norm": 3, "one block early": 2}[self._fault]
        taps = self._target.forward(ids_bt, **{**options, "tap_ids": (layer,)}).taps_bth
        assert taps is not None
        hidden = taps if layer == 3 else self._target.norm(taps)
        return dataclasses.replace(out, hidden_bth=hidden)


@pytest.mark.parametrize("fault", ["", "before the norm", "one block early", "prompts swapped"])
def test_states_that_do_not_give_the_logits_are_refused(target: Target, fault: str) -> None:
    traffic = make_traffic(6, seed=4)
    subject: Any = Wrong(target, fault) if fault else target
    check = SelfCheck(subject, traffic, share=0.5)
    chunks = list(TeacherForced(subject, traffic))
    if not fault:
        for chunk in chunks:
            check(chunk)
        result = check.result()
        assert result.prompts == 3
        assert 0 <= result.states_max_difference < 1e-3
        assert 0 <= result.logits_max_difference < 1e-3
        return
    with pytest.raises(TrimtabError, match=r"prompt 'p\d': a (state|logit) differs by") as caught:
        for chunk in chunks:
            check(chunk)
    assert float(str(caught.value).split("differs by ")[1].split()[0]) > 0.1


def states_of(target: Target, traffic: Traffic, count: int, seed: int = 0) -> States:
    return sample_states(target, traffic, count, seed=seed, chunk_tokens=100)


def test_the_held_out_sample(target: Target, tmp_path: Path) -> None:
    traffic = make_traffic(20, seed=5)
    available = sum(map(len, traffic.outputs))
    states = states_of(target, traffic, 64)
    assert states.hidden_th.shape == (64, 256) and states.hidden_th.dtype == torch.float32
    places = list(zip(states.prompt_t.tolist(), states.position_t.tolist(), strict=True))
    assert places == sorted(set(places))
    for (row, position), hidden in list(zip(places, states.hidden_th, strict=True))[::9]:
        sequence = traffic.sequences()[row]
        assert len(traffic.prompts.ids[row]) - 1 <= position < len(sequence) - 1
        alone = target.forward(torch.tensor([sequence[: position + 1]])).hidden_bth[0, -1]
        assert float((alone - hidden).abs().max()) < 1e-3
    assert states.groups() == [f"d{row}" for row, _ in places]
    everything = states_of(target, traffic, available)
    assert len(everything.hidden_th) == available
    assert not torch.equal(states_of(target, traffic, 64, seed=1).position_t, states.position_t)
    with pytest.raises(TrimtabError, match=f"{available + 1} asked for"):
        states_of(target, traffic, available + 1)

    for name in ("a", "b"):
        states.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = States.load(tmp_path / "a")
    assert torch.equal(loaded.hidden_th, states.hidden_th)
    assert loaded.groups() == states.groups()


def test_a_state_that_is_not_finite_names_its_prompt(target: Target) -> None:
    traffic = make_traffic(4, seed=6)

    class Broken(Wrong):
        def forward(self, ids_bt: torch.Tensor, **options: Any) -> TargetOutput:
            out = self._target.forward(ids_bt, **options)
            hidden = out.hidden_bth.clone()
            for b, ids in enumerate(ids_bt.tolist()):
                if ids[:3] == traffic.prompts.ids[2][:3]:
                    hidden[b] = torch.nan
            return dataclasses.replace(out, hidden_bth=hidden)

    subject: Any = Broken(target, "")
    with pytest.raises(TrimtabError, match="prompt 'p2' is not finite"):
        states_of(subject, traffic, 8 + sum(map(len, traffic.outputs)) // 2)
