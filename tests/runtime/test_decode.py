"""Decoding: greedy equality for every method, rollback, limits, stop ids, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts.checkpoint import Checkpoint
from artifacts.errors import TrimtabError
from artifacts.runtime import decode
from artifacts.runtime.batch import generate_batch
from artifacts.runtime.decode import Decoder
from artifacts.runtime.dflash import Drafter
from artifacts.runtime.drafting import BlockDrafting, Drafting, LookupDrafting, MtpDrafting
from artifacts.runtime.lookup import LookupConfig
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.noise import Noise
from artifacts.runtime.proposal import Proposal, point_mass
from artifacts.runtime.sampling import SamplingParams
from artifacts.runtime.target import Target, TargetOutput
from tests import checkpoints
from tests.runtime import wired

GREEDY = SamplingParams()
SHORT = LookupConfig(strong_match=2, tail_match=1, longest_match=6, tokens=7)


def _prompts(count: int, length: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(21)
    return [torch.randint(0, 490, (length,), generator=generator).tolist() for _ in range(count)]


def _decode(decoder: Decoder, prompt: list[int], count: int, **kw: Any) -> list[int]:
    steps = decoder.generate(prompt, kw.pop("params", GREEDY), count, **kw)
    return [token for step in steps for token in step.tokens]


@pytest.fixture(scope="module")
def v1_drafter(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Drafter:
    folder = checkpoints.draft(tmp_path_factory.mktemp("v1"), version=1)
    return Drafter.load(Checkpoint.open(folder), target)


@pytest.mark.parametrize("method", ["none", "mtp", "dflash", "dflash2", "lookup", "dflash2+lookup"])
def test_greedy_equals_plain_decoding(
    method: str, target: Target, mtp: MtpHead, drafter: Drafter, v1_drafter: Drafter
) -> None:
    used = v1_drafter if method == "dflash" else drafter
    decoder = Decoder(target, method, mtp=mtp, drafter=used, depth=3, lookup=SHORT)
    prompts = _prompts(3)
    prompts.append((prompts[0][:5] * 4)[:18])
    plain = generate_batch(target, prompts, GREEDY, 40, [], [])
    for prompt, expected in zip(prompts, plain, strict=True):
        assert _decode(decoder, prompt, 40) == expected
    stats = decoder.stats
    assert stats.requests == len(prompts) and stats.tokens == 40 * len(prompts)
    if method == "none":
        assert stats.steps == 39 * len(prompts) and stats.tokens_per_step == 1.0


class Scripted:
    """Drafts the known continuation, made wrong from a random position on.

    `inner` takes in the committed rows as usual and drafts, too; what it drafted at each committed
    length is kept for comparison.
    """

    width = 6

    def __init__(self, text: list[int], seed: int, inner: Drafting | None = None) -> None:
        self.text = text
        self.inner = inner
        self.tap_ids = inner.tap_ids if inner else ()
        self.generator = torch.Generator().manual_seed(seed)
        self.drafts: dict[int, list[int]] = {}
        self.accepted: set[int] = set()

    def start(self, capacity: int) -> None:
        self.length = 0
        if self.inner:
            self.inner.start(capacity)

    def observe_rows(self, ids: Sequence[int], next_ids: Sequence[int], out: TargetOutput) -> None:
        self.length += len(ids)
        if self.inner:
            self.inner.observe_rows(ids, next_ids, out)

    def propose(self, anchor: int, params: SamplingParams, noise: Noise | None) -> Proposal:
        n = self.length + 1
        assert anchor == self.text[n - 1]
        if self.inner:
            draft = self.inner.propose(anchor, params, noise)
            self.drafts[n] = draft.tokens_bs[0].tolist()
        right = int(torch.randint(0, self.width + 1, (1,), generator=self.generator))
        size = max(right, int(torch.randint(1, self.width + 1, (1,), generator=self.generator)))
        tokens = self.text[n : n + size]
        tokens = [t if i < right else (t + 1) % 490 for i, t in enumerate(tokens)]
        self.accepted.add(min(right, len(tokens)))
        return point_mass(torch.tensor([tokens], dtype=torch.int64))


@pytest.mark.parametrize("inner", ["none", "mtp", "dflash2"])
def test_forced_acceptance_over_hundreds_of_tokens(
    inner: str, target: Target, mtp: MtpHead, drafter: Drafter
) -> None:
    """Random acceptance lengths keep greedy equality, and never leave a drafter's cache stale."""
    prompt, count = _prompts(1)[0], 300
    text = prompt + generate_batch(target, [prompt], GREEDY, count + 8, [], [])[0]
    make = {
        "none": lambda: None,
        "mtp": lambda: MtpDrafting(mtp, 3),
        "dflash2": lambda: BlockDrafting(drafter),
    }[inner]
    scripted = Scripted(text, 4, make())
    decoder = Decoder(target, drafting=scripted)
    assert _decode(decoder, prompt, count) == text[len(prompt) : len(prompt) + count]
    assert scripted.accepted == set(range(7))
    assert 2.0 < decoder.stats.tokens_per_step < 6.0
    fresh = make()
    if fresh is None:
        return
    for n in list(scripted.drafts)[::7]:
        out = target.forward(torch.tensor([text[: n - 1]]), tap_ids=fresh.tap_ids)
        fresh.start(n)
        fresh.observe_rows(text[: n - 1], text[1:n], out)
        assert fresh.propose(text[n - 1], GREEDY, None).tokens_bs[0].tolist() == scripted.drafts[n]


@pytest.fixture(scope="module")
def wired_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target]:
    folder = tmp_path_factory.mktemp("wired")
    checkpoints.tiny(folder, tensors=wired.target_tensors(wired.CYCLE))
    return folder, Target.load(Checkpoint.open(folder))


def test_drafters_that_know_the_text_accept_whole_blocks(
    wired_target: tuple[Path, Target], tmp_path: Path
) -> None:
    folder, target = wired_target
    mtp = MtpHead.load(Checkpoint.open(folder), target)
    path = checkpoints.draft(tmp_path / "v2", tensors=wired.draft_tensors(2))
    drafter = Drafter.load(Checkpoint.open(path), target)
    prompt = wired.CYCLE * 2 + wired.CYCLE[:3]
    expected = generate_batch(target, [prompt], GREEDY, 41, [], [])[0]
    assert expected[:3] == wired.CYCLE[3:6]
    for method, width in (("mtp", 4), ("dflash2", 3), ("lookup", 15), ("dflash2+lookup", 15)):
        decoder = Decoder(target, method, mtp=mtp, drafter=drafter, depth=4)
        steps = list(decoder.generate(prompt, GREEDY, 41))
        assert [t for s in steps for t in s.tokens] == expected, method
        assert {(s.drafted, s.accepted) for s in steps[1:]} == {(width, width)}, method
        assert decoder.stats.tokens_per_step == width + 1
        assert decoder.stats.acceptance_by_position == [1.0] * width
    config, draft_config = checkpoints.tiny_config(), checkpoints.draft_config()
    assert config["vocab_size"] == draft_config["vocab_size"]
    shuffled = wired.draft_tensors(2)
    name = "candidate_selector.successor_codebook"
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    shuffled[name] = shuffled[name][order]
    control = checkpoints.draft(tmp_path / "control", tensors=shuffled)
    decoder = Decoder(target, "dflash2", drafter=Drafter.load(Checkpoint.open(control), target))
    assert _decode(decoder, prompt, 41) == expected
    assert decoder.stats.accepted < 0.3 * 41


def test_v1_accepts_where_independent_rows_can_know(tmp_path: Path) -> None:
    folder = checkpoints.tiny(tmp_path / "t", tensors=wired.target_tensors([wired.FIXED]))
    target = Target.load(Checkpoint.open(folder))
    path = checkpoints.draft(tmp_path / "d", version=1, tensors=wired.draft_tensors(1))
    decoder = Decoder(target, "dflash", drafter=Drafter.load(Checkpoint.open(path), target))
    assert _decode(decoder, [3, wired.FIXED], 21) == [wired.FIXED] * 21
    assert decoder.stats.tokens_per_step == 4.0


def test_tail_follows_an_agreeing_drafter(
    wired_target: tuple[Path, Target], tmp_path: Path
) -> None:
    """A match too short for the head extends the drafter's block when both agree on it."""
    _, target = wired_target
    path = checkpoints.draft(tmp_path, tensors=wired.draft_tensors(2))
    drafter = Drafter.load(Checkpoint.open(path), target)
    config = LookupConfig(strong_match=9, tail_match=4, longest_match=9, tokens=10)
    decoder = Decoder(target, "dflash2+lookup", drafter=drafter, lookup=config)
    prompt = [*wired.CYCLE, *wired.CYCLE[:2], 40, 41, *wired.CYCLE[2:5]]
    steps = list(decoder.generate(prompt, GREEDY, 20))
    assert (steps[1].drafted, steps[1].accepted) == (10, 4)
    assert [t for s in steps for t in s.tokens] == generate_batch(
        target, [prompt], GREEDY, 20, [], []
    )[0]


@pytest.mark.parametrize("method", ["mtp", "dflash2", "lookup"])
def test_stop_ids_and_limits_inside_a_block(
    method: str, wired_target: tuple[Path, Target], tmp_path: Path
) -> None:
    folder, target = wired_target
    mtp = MtpHead.load(Checkpoint.open(folder), target)
    path = checkpoints.draft(tmp_path, tensors=wired.draft_tensors(2))
    drafter = Drafter.load(Checkpoint.open(path), target)
    decoder = Decoder(target, method, mtp=mtp, drafter=drafter)
    prompt = wired.CYCLE * 2
    full = _decode(decoder, prompt, 24)
    for limit in range(1, 12):
        assert _decode(decoder, prompt, limit) == full[:limit]
    for stop in wired.CYCLE:
        expected = full[: full.index(stop) + 1]
        assert _decode(decoder, prompt, 24, stop_ids=[stop, 498]) == expected
    steps = list(decoder.generate(prompt, GREEDY, 24, stop_ids=[full[2]]))
    assert len(steps) == 2 and len(steps[1].tokens) == 2 and steps[1].accepted > 2


@pytest.mark.parametrize("method", ["mtp", "dflash2", "dflash2+lookup"])
def test_sampling_is_seeded_and_local(
    method: str, target: Target, mtp: MtpHead, drafter: Drafter
) -> None:
    decoder = Decoder(target, method, mtp=mtp, drafter=drafter, lookup=SHORT)
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.95)
    prompt = _prompts(1)[0]
    before = torch.random.get_rng_state()
    first = _decode(decoder, prompt, 30, params=params, seed=5)
    assert torch.equal(before, torch.random.get_rng_state())
    assert _decode(decoder, prompt, 30, params=params, seed=5) == first
    assert _decode(decoder, prompt, 30, params=params, seed=6) != first


def test_noise_streams_are_independent(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting, acceptance and emission each draw from a stream of their own."""
    made: list[str] = []

    def recorded(seed: int, purpose: str, device: torch.device) -> Noise:
        made.append(purpose)
        return Noise(seed, purpose, device)

    monkeypatch.setattr(decode, "Noise", recorded)
    _decode(
        Decoder(target, "dflash2", drafter=drafter), [1], 4, params=SamplingParams(temperature=1)
    )
    assert len(made) == 3 and len(set(made)) == 3
    streams = torch.stack([Noise(7, purpose).uniforms(20000) for purpose in made])
    correlation = torch.corrcoef(streams) - torch.eye(3, dtype=torch.float64)
    assert float(correlation.abs().max()) < 0.03
    assert torch.equal(streams[0], Noise(7, made[0]).uniforms(20000))
    assert not torch.equal(streams[0], Noise(8, made[0]).uniforms(20000))


def test_the_drafter_follows_while_lookup_wins(target: Target, drafter: Drafter) -> None:
    """After steps that lookup won, the drafter drafts what a fresh one would."""
    prompt = _prompts(1)[0]
    config = LookupConfig(strong_match=1, tail_match=1, longest_match=6, tokens=7)
    decoder = Decoder(target, "dflash2+lookup", drafter=drafter, lookup=config)
    steps = list(decoder.generate(prompt, GREEDY, 60))
    text = prompt + [token for step in steps for token in step.tokens]
    assert {step.drafted for step in steps[1:]} == {3, 7}
    joined = decoder.drafting
    assert isinstance(joined, LookupDrafting) and isinstance(joined.inner, BlockDrafting)
    n = joined.inner.context.lengths[0]
    assert n >= len(text) - 1 and joined.lookup.history[: len(text)] == text
    anchor = joined.lookup.history[n]
    used = joined.inner.propose(anchor, GREEDY, None).tokens_bs
    committed = joined.lookup.history[:n]
    fresh = BlockDrafting(drafter)
    fresh.start(n)
    out = target.forward(torch.tensor([committed]), tap_ids=fresh.tap_ids)
    fresh.observe_rows(committed, joined.lookup.history[1 : n + 1], out)
    assert torch.equal(used, fresh.propose(anchor, GREEDY, None).tokens_bs)


def test_undraftable_ids_are_never_drafted(target: Target, mtp: MtpHead, drafter: Drafter) -> None:
    """Every drafted id lies in the allowed set, greedy and sampled, on all paths."""
    allowed = torch.zeros(512, dtype=torch.bool)
    allowed[40:90] = True
    hot = SamplingParams(temperature=1.5)
    noise = Noise(1, "draft")
    out = target.forward(torch.tensor([[1, 2, 3]]), tap_ids=drafter.tap_ids)
    for drafting in (MtpDrafting(mtp, 4, allowed), BlockDrafting(drafter, allowed)):
        drafting.start(10)
        drafting.observe_rows([1, 2, 3], [2, 3, 4], out)
        for params, stream in ((GREEDY, None), (hot, noise)):
            for _ in range(20):
                tokens = drafting.propose(4, params, stream).tokens_bs
                assert bool(allowed[tokens].all())


def test_one_thread_within_a_step(target: Target) -> None:
    """Small models step with one thread; the caller's count is back between steps."""
    inside: list[int] = []

    class Spy(Scripted):
        def propose(self, anchor: int, params: SamplingParams, noise: Noise | None) -> Proposal:
            inside.append(torch.get_num_threads())
            return point_mass(torch.zeros(1, 0, dtype=torch.int64))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in Decoder(target, drafting=Spy([], 0)).generate([1, 2], GREEDY, 4):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert inside == [1, 1, 1]


def test_bf16_decodes_with_every_method(tiny_folder: Path, draft_folder: Path) -> None:
    """The dtypes of CUDA, on the CPU: close to fp32, fp32 recurrent state, all methods run."""
    source = Checkpoint.open(tiny_folder)
    target = Target.load(source, dtype=torch.bfloat16)
    mtp = MtpHead.load(source, target)
    drafter = Drafter.load(Checkpoint.open(draft_folder), target)
    ids = torch.tensor(_prompts(2))
    exact = Target.load(source).forward(ids).hidden_bth
    error = (target.forward(ids).hidden_bth.float() - exact).norm() / exact.norm()
    assert 1e-4 < float(error) < 0.05
    params = SamplingParams(temperature=0.8, top_k=20)
    for method in ("none", "mtp", "dflash2", "lookup", "dflash2+lookup"):
        decoder = Decoder(target, method, mtp=mtp, drafter=drafter, lookup=SHORT)
        assert len(_decode(decoder, ids[0].tolist(), 12, params=params)) == 12
    assert target.new_state(1, 4).layers[0].state_bhkv.dtype == torch.float32


def test_methods_are_asked_for_not_guessed(
    tmp_path: Path, target: Target, drafter: Drafter, v1_drafter: Drafter
) -> None:
    folder = checkpoints.tiny(tmp_path / "dflash2-test")
    other = Target.load(Checkpoint.open(folder))
    head = MtpHead.load(Checkpoint.open(folder), other)
    assert isinstance(Decoder(other, "mtp", mtp=head).drafting, MtpDrafting)
    for method, kw in (
        ("eagle", {}),
        ("mtp", {}),
        ("dflash2", {}),
        ("dflash2", {"drafter": v1_drafter}),
        ("dflash", {"drafter": drafter}),
    ):
        with pytest.raises(TrimtabError, match=method):
            Decoder(target, method, **kw)
    for prompt in ([], [512], [-1]):
        with pytest.raises(TrimtabError, match="prompt"):
            next(Decoder(target).generate(prompt, GREEDY, 1))
