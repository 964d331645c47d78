"""Replay: the wave over all prompts against one prompt at a time, and against real decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts.checkpoint import Checkpoint
from artifacts.errors import TrimtabError
from artifacts.runtime.dflash import Drafter
from artifacts.runtime.draft_head import DraftHead
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.target import Target
from calibration.drafting import leading_matches, walk
from calibration.replay import Replay, replay_dflash, replay_mtp, require_comparable
from calibration.teacher_forced import Chunk, TeacherForced
from calibration.tokensets import Entry, PromptSet
from calibration.traffic import Traffic
from tests.checkpoints import draft, tiny
from tests.oracles.replay import dflash_block, follow, mtp_chain


def make_traffic(
    rows: int, *, seed: int, vocab: int = 490, longest: int = 20, stop: int = 498
) -> Traffic:
    """Prompts and outputs of random ids; every third output ends with the stop id."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randrange(3, 30))] for _ in range(rows)]
    outputs = []
    for row in range(rows):
        output = [rng.randrange(vocab) for _ in range(rng.randrange(1, longest))]
        outputs.append([*output, stop] if row % 3 == 0 else output)
    entries = [
        Entry(
            id=f"p{r}",
            domain="code" if r % 2 else "chat",
            language="en",
            thinking=False,
            document=f"d{r}",
        )
        for r in range(rows)
    ]
    prompt_set = PromptSet(name="heldout", kind="prompts", ids=prompts, entries=entries, header={})
    header = {"sampling": {"temperature": 0.0}, "stop_ids": [stop]}
    return Traffic(prompts=prompt_set, outputs=outputs, header=header)


def plain_chunk(traffic: Traffic) -> Chunk:
    sequences = traffic.sequences()
    longest = max(map(len, sequences))
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences])
    return Chunk(
        rows=list(range(len(sequences))),
        ids_bt=ids,
        lengths_b=torch.tensor([len(s) for s in sequences]),
        prompts_b=torch.tensor([len(p) for p in traffic.prompts.ids]),
        hidden_bth=torch.zeros(*ids.shape, 1),
        taps_btg=None,
    )


class LuckyDrafts:
    """Drafts the truth with some luck: a fixed function of sequence and position."""

    def __init__(self, sequences: list[list[int]], size: int, luck: float) -> None:
        self.size = size
        self.sequences = sequences
        self.luck = luck

    def at(self, row: int, position: int) -> list[int]:
        rng = random.Random(f"{row}:{position}")
        following = self.sequences[row][position + 1 : position + 1 + self.size]
        following = following + [0] * (self.size - len(following))  # padding must not count
        return [t if rng.random() < self.luck else t + 1 for t in following]

    def accept(
        self, rows_a: torch.Tensor, positions_a: torch.Tensor, truth_as: torch.Tensor
    ) -> torch.Tensor:
        places = zip(rows_a.tolist(), positions_a.tolist(), strict=True)
        return leading_matches(torch.tensor([self.at(r, p) for r, p in places]), truth_as)


@pytest.mark.parametrize(("size", "luck"), [(1, 0.5), (3, 0.7), (7, 0.9), (7, 1.0), (4, 0.0)])
@pytest.mark.parametrize("limit", [None, 6])
def test_the_wave_visits_the_anchors_of_one_prompt_at_a_time(
    size: int, luck: float, limit: int | None
) -> None:
    traffic = make_traffic(17, seed=size)
    sequences = traffic.sequences()
    drafts = LuckyDrafts(sequences, size, luck)
    found: dict[int, list[tuple[int, int, int]]] = {r: [] for r in range(len(sequences))}
    for step in walk(plain_chunk(traffic), drafts, limit=limit):
        columns = (step.rows_a, step.positions_a, step.accepted_a, step.known_a)
        for row, *rest in zip(*(c.tolist() for c in columns), strict=True):
            found[row].append((rest[0], rest[1], rest[2]))
    for row, sequence in enumerate(sequences):
        prompt = len(traffic.prompts.ids[row])
        slow = follow(sequence, prompt, lambda p, r=row: drafts.at(r, p), limit=limit)
        assert found[row] == list(zip(*slow, strict=True))


def made_replay(accepted: list[list[int]], known: list[list[int]], **more: Any) -> Replay:
    options: dict[str, Any] = {
        "method": "mtp",
        "depth": 3,
        "prompt_ids": [f"p{i}" for i in range(len(accepted))],
        "domains": ["code" if i % 2 else "chat" for i in range(len(accepted))],
        "conditions": {"template_sha256": "a"},
        **more,
    }
    return Replay(accepted=accepted, known=known, **options)


def test_figures_by_hand() -> None:
    replay = made_replay([[3, 0, 2], [1]], [[3, 3, 2], [3]])
    assert replay.steps == [3, 1]
    assert replay.tokens_per_step == 10 / 4
    assert replay.by_domain() == {"chat": 8 / 3, "code": 2.0}
    # position 3 could not be judged in the step that accepted 2 of 2
    assert replay.cumulative() == [3 / 4, 2 / 4, 1 / 3]
    assert replay.conditional() == [3 / 4, 2 / 3, 1 / 1]
    assert replay.to_json()["tokens"] == 10
    empty = made_replay([[], []], [[], []])
    assert empty.tokens_per_step == 0.0 and empty.cumulative() == [0.0, 0.0, 0.0]


def test_other_conditions_are_not_compared_without_force() -> None:
    one = made_replay([[1]], [[3]])
    other = made_replay([[2]], [[3]], conditions={"template_sha256": "b"})
    with pytest.raises(TrimtabError, match="template_sha256: 'a' against 'b'"):
        require_comparable(one, other)
    assert require_comparable(one, other, force=True) == ["template_sha256: 'a' against 'b'"]
    assert require_comparable(one, one) == []
    with pytest.raises(TrimtabError, match="two sets of prompts"):
        require_comparable(one, made_replay([[1]], [[3]], prompt_ids=["q"]), force=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, MtpHead]:
    source = Checkpoint.open(tiny(tmp_path_factory.mktemp("tiny")))
    target = Target.load(source)
    return target, MtpHead.load(source, target)


def scripted_traffic(draft: Callable[[list[int]], list[int]], rows: int, seed: int) -> Traffic:
    """Outputs made of a drafter's own drafts, cut at random places by other tokens."""
    traffic = make_traffic(rows, seed=seed)
    rng = random.Random(seed)
    for row, prompt in enumerate(traffic.prompts.ids):
        output = traffic.outputs[row][:1]
        while len(output) < 8 + row:
            drafts = draft(prompt + output)
            output += drafts[: rng.randrange(len(drafts) + 1)]
            output.append(rng.randrange(490))
        traffic.outputs[row] = output
    return traffic


def test_mtp_replay_equals_decoding_one_prompt_at_a_time(pair: tuple[Target, MtpHead]) -> None:
    target, mtp = pair
    depth = 5
    traffic = scripted_traffic(lambda prefix: mtp_chain(target, mtp, prefix, depth), 9, seed=7)
    forced = TeacherForced(target, traffic, chunk_tokens=120)
    replay = replay_mtp(forced, mtp, depth)
    for row, sequence in enumerate(traffic.sequences()):
        slow = follow(
            sequence,
            len(traffic.prompts.ids[row]),
            lambda p, s=sequence: mtp_chain(target, mtp, s[: p + 1], depth),
        )
        assert (replay.accepted[row], replay.known[row]) == slow[1:]
    assert {a for row in replay.accepted for a in row} == set(range(depth + 1))
    assert replay.tokens_per_step > 2
    assert list(replay.by_domain()) == ["chat", "code"]
    again = replay_mtp(TeacherForced(target, traffic, chunk_tokens=1), mtp, depth)
    assert again.accepted == replay.accepted  # batch 1 against batches: exact on the CPU


def test_a_reduced_head_never_drafts_outside_its_vocabulary(pair: tuple[Target, MtpHead]) -> None:
    target, mtp = pair
    traffic = scripted_traffic(lambda prefix: mtp_chain(target, mtp, prefix, 2), 6, seed=8)
    forced = TeacherForced(target, traffic)
    full = replay_mtp(forced, mtp, 2)
    everything = DraftHead.reduced(target, target.lm_head.weight, torch.arange(512))
    assert replay_mtp(forced, mtp, 2, draft_head=everything).accepted == full.accepted
    absent = {t for output in traffic.outputs for t in output}
    ids = torch.tensor([i for i in range(512) if i not in absent])
    none = DraftHead.reduced(target, target.lm_head.weight[ids], ids)
    assert sum(map(sum, replay_mtp(forced, mtp, 2, draft_head=none).accepted)) == 0


@pytest.mark.parametrize(("version", "mode"), [(2, "walk"), (2, "argmax"), (1, "walk")])
def test_dflash_replay_equals_decoding_one_prompt_at_a_time(
    pair: tuple[Target, MtpHead], tmp_path: Path, version: int, mode: str
) -> None:
    target, _ = pair
    drafter = Drafter.load(Checkpoint.open(draft(tmp_path, version=version)), target)

    def block(prefix: list[int]) -> list[int]:
        return dflash_block(target, drafter, prefix, argmax=mode == "argmax")

    traffic = scripted_traffic(block, 6, seed=9)
    forced = TeacherForced(target, traffic, tap_ids=drafter.tap_ids, chunk_tokens=120)
    replay = replay_dflash(forced, drafter, mode=mode)
    for row, sequence in enumerate(traffic.sequences()):
        prompt = len(traffic.prompts.ids[row])
        slow = follow(sequence, prompt, lambda p, s=sequence: block(s[: p + 1]))
        assert (replay.accepted[row], replay.known[row]) == slow[1:]
    assert {a for row in replay.accepted for a in row} == {0, 1, 2, 3}
    one = TeacherForced(target, traffic, tap_ids=drafter.tap_ids, chunk_tokens=1)
    assert replay_dflash(one, drafter, mode=mode).accepted == replay.accepted


def test_dflash_replay_with_other_taps_is_refused(
    pair: tuple[Target, MtpHead], tmp_path: Path
) -> None:
    target, _ = pair
    drafter = Drafter.load(Checkpoint.open(draft(tmp_path)), target)
    forced = TeacherForced(target, make_traffic(3, seed=1), tap_ids=(0, 1, 3))
    with pytest.raises(TrimtabError, match=r"layers \[0, 1, 3\], the drafter reads \[0, 2, 3\]"):
        replay_dflash(forced, drafter)
