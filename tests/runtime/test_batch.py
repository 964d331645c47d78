"""Sampling maths, and batched decoding against transformers and against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from artifacts.errors import TrimtabError
from artifacts.runtime.batch import generate_batch
from artifacts.runtime.sampling import SamplingParams, draw, process, sample
from artifacts.runtime.target import Target
from tests import checkpoints

PARAMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.9, top_p=0.6),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.95),
    SamplingParams(),
]


@pytest.mark.parametrize("params", PARAMS)
def test_process_equals_transformers_warpers(params: SamplingParams) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(40, 100, generator=torch.Generator().manual_seed(0)) * 3
    probs = process(logits, params)
    torch.testing.assert_close(probs.sum(-1), torch.ones(40, dtype=torch.float64))
    if params.greedy:
        assert torch.equal(probs.argmax(-1), logits.argmax(-1)) and float(probs.max()) == 1.0
        return
    scores = TemperatureLogitsWarper(params.temperature)(None, logits.double())
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    torch.testing.assert_close(probs, scores.softmax(-1))


@pytest.mark.parametrize("params", PARAMS)
def test_sample_draws_what_process_says(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(200, 50, generator=generator) * 2
    u = torch.rand(200, generator=generator, dtype=torch.float64)
    assert torch.equal(sample(logits, params, u), draw(process(logits, params), u))


def test_draw_never_returns_a_zero() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64).expand(5, 5)
    u = torch.tensor([0.0, 0.2999, 0.3, 0.9999, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw(probs, u).tolist() == [1, 1, 3, 3, 3]


def test_generation_config() -> None:
    read = SamplingParams.from_generation_config
    assert read(checkpoints.GENERATION_CONFIG) == SamplingParams(
        temperature=0.8, top_k=20, top_p=0.95
    )
    assert read({"temperature": 0.8}).greedy
    assert read({"do_sample": True}) == SamplingParams(temperature=1.0)
    with pytest.raises(TrimtabError, match="repetition_penalty"):
        read({"do_sample": True, "repetition_penalty": 1.1})


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(0, 490, (n,), generator=generator).tolist() for n in lengths]


def test_greedy_batch_equals_transformers(target: Target, tiny_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    prompts = _prompts(4)
    outputs = generate_batch(target, prompts, SamplingParams(), 20, [], [498])
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, do_sample=False, max_new_tokens=20, eos_token_id=498)
        assert whole[0, len(prompt) :].tolist() == output


def test_sampled_rows_do_not_depend_on_the_batch(target: Target) -> None:
    """Rows stop at different lengths, so the batch is compacted on the way."""
    prompts, params = _prompts(9), SamplingParams(temperature=1.0, top_k=30)
    stops = list(range(0, 490, 15))
    together = generate_batch(target, prompts, params, 25, list(range(9)), stops)
    assert len({len(o) for o in together}) > 3
    for row in (0, 4, 8):
        assert generate_batch(target, [prompts[row]], params, 25, [row], stops)[0] == together[row]
    for output in together:
        assert not set(output[:-1]) & set(stops)
        assert output[-1] in stops or len(output) == 25
    again = generate_batch(target, prompts, params, 25, list(range(9)), stops)
    assert again == together
    other = generate_batch(target, prompts, params, 25, list(range(100, 109)), stops)
    assert other != together
