"""The trained pocket family: every drafter is lossless on real text."""

from __future__ import annotations

import json
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch

from artifacts.checkpoint import Checkpoint
from artifacts.runtime.decode import Decoder
from artifacts.runtime.dflash import Drafter
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.sampling import SamplingParams
from artifacts.runtime.target import Target

POCKET = Path(__file__).resolve().parents[2] / "recipes" / "pocket"
METHODS = ("mtp", "dflash2", "lookup", "dflash2+lookup")
FLOORS = {"mtp": 2.3, "dflash2": 2.4, "lookup": 1.05, "dflash2+lookup": 2.4}


@cache
def family() -> tuple[Target, MtpHead, Drafter]:
    source = Checkpoint.open(POCKET / "target")
    target = Target.load(source, dtype=torch.float32)
    drafter = Drafter.load(Checkpoint.open(POCKET / "drafter"), target)
    return target, MtpHead.load(source, target), drafter


@cache
def prompts(count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(POCKET / "target"), local_files_only=True)
    with (POCKET / "data" / "heldout.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, count)]
    return [
        tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for row in rows
    ]


@cache
def replies(method: str, count: int, new_tokens: int) -> tuple[list[list[int]], float]:
    target, mtp, drafter = family()
    decoder = Decoder(target, method, mtp=mtp, drafter=drafter, depth=3)
    made = [
        decoder.complete(ids, SamplingParams(), new_tokens, stop_ids=(8163, 8165))
        for ids in prompts(count)
    ]
    return made, decoder.stats.tokens_per_step


def check(method: str, count: int, new_tokens: int) -> None:
    plain, _ = replies("none", count, new_tokens)
    drafted, tokens_per_step = replies(method, count, new_tokens)
    assert drafted == plain
    assert tokens_per_step > FLOORS[method]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_plain_decoding_s(method: str) -> None:
    check(method, 6, 48)


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_plain_decoding_s_on_50_prompts_of_64(method: str) -> None:
    check(method, 50, 64)
