"""Plain decoding of many prompts at once: own outputs for calibration, reference continuations.

Axes: b rows of the batch, t tokens, v vocabulary.
Covers ragged prefill, one token a step for all unfinished prompts, greedy or sampled with a noise
stream of its own for each prompt. Does not cover drafting (`decode`). In: prompts as id lists. Out:
continuations as id lists, the stop id included.
Invariant: a prompt's noise depends on its seed alone, not on its place in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from artifacts.errors import TrimtabError
from artifacts.runtime.sampling import SamplingParams, sample
from artifacts.runtime.state import TargetState
from artifacts.runtime.target import Target

_COMPACT_BELOW = 0.8


def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_new_tokens: int,
    seeds: Sequence[int],
    stop_ids: Iterable[int],
) -> list[list[int]]:
    """Continuations of up to `max_new_tokens` tokens, each ending with a stop id if one is met.

    seeds: one per prompt, for its own local generator; not read when greedy.
    Raises: TrimtabError for an empty prompt or a wrong number of seeds.
    """
    if not params.greedy and len(seeds) != len(prompts):
        raise TrimtabError(f"{len(prompts)} prompts need as many seeds, got {len(seeds)}")
    empty = [i for i, p in enumerate(prompts) if not p]
    if empty:
        raise TrimtabError(f"prompt {empty[0]} has no tokens")
    outputs: list[list[int]] = [[] for _ in prompts]
    if not prompts or max_new_tokens < 1:
        return outputs
    noise = None if params.greedy else _uniforms(seeds, max_new_tokens, target.device)
    stops = frozenset(stop_ids)
    rows = sorted(range(len(prompts)), key=lambda row: (-len(prompts[row]), row))
    state, hidden_bh = _prefill(target, [prompts[row] for row in rows], max_new_tokens)
    with torch.no_grad():
        for step in range(max_new_tokens):
            u = None if noise is None else noise[torch.tensor(rows, device=noise.device), step]
            tokens_b = _choose(target, hidden_bh, params, u)
            going: list[int] = []
            for place, token in enumerate(tokens_b.tolist()):
                row = rows[place]
                if outputs[row] and outputs[row][-1] in stops:
                    continue
                outputs[row].append(token)
                if token not in stops:
                    going.append(place)
            if not going or step + 1 == max_new_tokens:
                break
            if len(going) < _COMPACT_BELOW * len(rows):
                state.select(going)
                tokens_b = tokens_b[torch.tensor(going, device=tokens_b.device)]
                rows = [rows[place] for place in going]
            hidden_bh = target.forward(tokens_b.unsqueeze(1), state).hidden_bth[:, 0]
    return outputs


def _choose(target: Target, hidden_bh: Tensor, params: SamplingParams, u: Tensor | None) -> Tensor:
    """The next token of each row, int64 [b]; rows in groups, as in the target's own passes."""
    rows = hidden_bh.shape[0]
    tokens_b = torch.zeros(rows, dtype=torch.int64, device=target.device)

    def group(part: slice) -> Callable[[], None]:
        def task() -> None:
            own = None if u is None else u[part]
            with torch.no_grad():
                tokens_b[part] = sample(target.logits(hidden_bh[part]), params, own)

        return task

    size = target.pass_rows
    target.run_groups([group(slice(s, min(s + size, rows))) for s in range(0, rows, size)])
    return tokens_b


def _uniforms(seeds: Sequence[int], count: int, device: torch.device) -> Tensor:
    """float64 [b, count] in [0, 1), row i from a generator seeded with seeds[i]."""
    rows = [
        torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in seeds
    ]
    return torch.stack(rows).to(device)


def _prefill(
    target: Target, prompts: Sequence[Sequence[int]], extra: int
) -> tuple[TargetState, Tensor]:
    """The state after all prompts, and the last valid hidden row of each [b, h]."""
    lengths = [len(p) for p in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : lengths[row]] = torch.tensor(prompt, dtype=torch.int64)
    state = target.new_state(len(prompts), max(lengths) + extra)
    out = target.forward(ids, state, lengths_b=lengths)
    last = torch.tensor(lengths, device=target.device) - 1
    return state, out.hidden_bth[torch.arange(len(prompts), device=target.device), last]
