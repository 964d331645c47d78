"""Own outputs: seeds, chunks, resuming, headers, and what sampling is refused."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artifacts.errors import TrimtabError
from calibration.tokensets import Entry, PromptSet, read_ragged, stable_seed, write_ragged
from calibration.traffic import GREEDY, Traffic, own_outputs, resolve_sampling, resolve_stop_ids

SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": None}
STOP = [98]


def prompt_set(rows: int = 11, seed: int = 0) -> PromptSet:
    rng = random.Random(seed)
    return PromptSet(
        name="calibration",
        kind="prompts",
        ids=[[rng.randrange(90) for _ in range(rng.randrange(3, 20))] for _ in range(rows)],
        entries=[
            Entry(id=f"p{r}", domain="chat", language="en", thinking=False, document=f"d{r}")
            for r in range(rows)
        ],
        header={"template_sha256": "t"},
    )


class Stub:
    """A generator whose output is a pure function of prompt and seed; may die at one chunk."""

    def __init__(self, die_at: int | None = None) -> None:
        self.calls: list[list[int]] = []
        self.die_at = die_at
        self.params: Any = None

    def __call__(
        self,
        target: object,
        prompts: list[list[int]],
        params: Any,
        *,
        max_new_tokens: int,
        seeds: list[int],
        stop_ids: list[int],
    ) -> list[list[int]]:
        if len(self.calls) == self.die_at:
            raise KeyboardInterrupt
        self.calls.append([len(p) for p in prompts])
        self.params = params
        made = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            rng = random.Random(f"{prompt}{seed}")
            length = rng.randrange(1, max_new_tokens + 1)
            row = [rng.randrange(90) for _ in range(length)]
            made.append([*row[:-1], stop_ids[0]] if length < max_new_tokens else row)
        return made


def run(folder: Path, stub: Stub, prompts: PromptSet | None = None, **more: Any) -> Traffic:
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "seed": 5,
        "stop_ids": STOP,
        "chunk": 4,
        "folder": folder,
        "identity": "target-hash",
        **more,
    }
    sampling = options.pop("sampling", SAMPLED)
    prompts = prompt_set() if prompts is None else prompts
    target: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=100))
    return own_outputs(target, prompts, sampling, generate=stub, **options)


def tree(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_chunks_are_fixed_sorted_by_length_and_rows_come_back_in_order(tmp_path: Path) -> None:
    stub = Stub()
    ticks: list[tuple[int, int]] = []
    prompts = prompt_set()
    made = run(tmp_path, stub, prompts, progress=lambda done, total: ticks.append((done, total)))
    assert [len(c) for c in stub.calls] == [4, 4, 3]
    assert [n for call in stub.calls for n in call] == sorted(len(p) for p in prompts.ids)
    assert ticks == [(32, 88), (64, 88), (88, 88)]
    for prompt, entry, output in zip(prompts.ids, prompts.entries, made.outputs, strict=True):
        seed = int.from_bytes(hashlib.sha256(f"5:{entry.id}".encode()).digest()[:8], "big") >> 1
        assert stable_seed(5, entry.id) == seed
        alone = Stub()(None, [prompt], None, max_new_tokens=8, seeds=[seed], stop_ids=STOP)
        assert output == alone[0]
    counts = made.header["counts"]
    assert counts["prompts"] == 11 and counts["output"]["tokens"] == sum(map(len, made.outputs))
    assert counts["stopped"] == sum(o[-1] == 98 for o in made.outputs)
    assert counts["stopped"] + counts["length_limited"] == 11
    assert made.header["sampling"] == SAMPLED and made.header["seed"] == 5
    assert (stub.params.temperature, stub.params.top_k, stub.params.top_p) == (0.8, 20, None)


@pytest.mark.parametrize("die_at", [0, 1, 2])
def test_killed_in_any_chunk_the_next_run_gives_the_same_bytes(tmp_path: Path, die_at: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole, Stub()).save(whole / "traffic.safetensors")
    with pytest.raises(KeyboardInterrupt):
        run(broken, Stub(die_at))
    again = Stub()
    made = run(broken, again)
    made.save(broken / "traffic.safetensors")
    assert (made.resumed, made.recomputed) == (die_at, 0)
    assert len(again.calls) == 3 - die_at
    assert tree(whole) == tree(broken)


def test_damaged_or_foreign_chunks_are_computed_again(tmp_path: Path) -> None:
    first = run(tmp_path, Stub())
    one = tmp_path / "chunk-00000.safetensors"
    one.write_bytes(one.read_bytes()[:-1])  # a short file
    two = tmp_path / "chunk-00001.safetensors"
    lists, header = read_ragged(two)
    lists["output"][0][0] ^= 1
    write_ragged(two, lists, header)  # other ids under the old hash
    made = run(tmp_path, Stub())
    assert made == first and (made.resumed, made.recomputed) == (1, 2)
    for change in ({"seed": 6}, {"identity": "x"}, {"sampling": GREEDY}, {"max_new_tokens": 9}):
        folder = tmp_path / str(sorted(change))
        run(folder, Stub())
        other = run(folder, Stub(), **change)
        assert (other.resumed, other.recomputed) == (0, 3)
        assert other.header["run"] != first.header["run"]
    folder = tmp_path / "prompts"
    run(folder, Stub())
    assert run(folder, Stub(), prompt_set(seed=1)).resumed == 0


def test_save_and_load(tmp_path: Path) -> None:
    made = run(tmp_path, Stub())
    path = tmp_path / "traffic.safetensors"
    made.save(path)
    loaded = Traffic.load(path)
    assert loaded == made and loaded.stop_ids == {98}
    sequence = made.prompts.ids[3] + made.outputs[3]
    assert loaded.sequences()[3] == sequence
    part = loaded.select([3, 1])
    assert part.sequences()[0] == sequence and len(part) == 2
    assert loaded.as_outputs().ids == made.outputs
    lists, header = read_ragged(path)
    lists["output"][0][0] ^= 1
    write_ragged(path, lists, header)
    with pytest.raises(TrimtabError, match="not those it was written with"):
        Traffic.load(path)
    with pytest.raises(TrimtabError, match="not a traffic file"):
        Traffic.load(tmp_path / "chunk-00000.safetensors")


def test_prompts_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    prompts = prompt_set()
    prompts.ids[2][0] = 100
    with pytest.raises(TrimtabError, match="token id 100 is outside"):
        run(tmp_path, Stub(), prompts)
    with pytest.raises(TrimtabError, match="no prompts"):
        run(tmp_path, Stub(), prompts.select([]))


def test_sampling_comes_from_the_config_and_absent_means_off() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert resolve_sampling(config) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    off = {"temperature": 1.0, "top_k": None, "top_p": None}
    assert resolve_sampling({"do_sample": True}) == off  # never transformers' top_k of 50
    assert resolve_sampling({"do_sample": True, "top_k": 0, "top_p": 1.0}) == off
    assert resolve_sampling({}, {"temperature": 0.7}) == {**off, "temperature": 0.7}
    override = resolve_sampling(config, {"top_k": 5})
    assert override == {**off, "top_k": 5}  # replaces the whole, does not mix


@pytest.mark.parametrize(
    ("config", "override", "message"),
    [
        ({}, None, "decodes greedily"),
        ({"do_sample": False, "temperature": 0.7}, None, "do_sample is False"),
        ({"do_sample": True, "temperature": 0}, None, "not positive"),
        ({"do_sample": True, "repetition_penalty": 1.1}, None, "repetition_penalty = 1.1"),
        ({"do_sample": True, "min_p": 0.1}, None, "min_p = 0.1"),
        ({}, {"temprature": 0.7}, "'temprature'"),
        ({}, {"top_k": 2.5}, "top_k 2.5"),
        ({}, {"top_p": 0.0}, "top_p 0.0"),
        ({}, {"temperature": -1}, "temperature -1"),
    ],
)
def test_sampling_that_is_refused(
    config: dict[str, Any], override: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(TrimtabError, match=message):
        resolve_sampling(config, override)


def test_neutral_settings_of_the_config_pass() -> None:
    config = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.0, "min_p": 0}
    assert resolve_sampling(config)["temperature"] == 0.7


def test_stop_ids() -> None:
    assert resolve_stop_ids({"eos_token_id": [5, 3]}, {"eos_token_id": 9}) == [3, 5]
    assert resolve_stop_ids({}, {"text_config": {"eos_token_id": 9}}) == [9]
    with pytest.raises(TrimtabError, match="eos_token_id"):
        resolve_stop_ids({}, {})
