"""From logits to a distribution, and from a distribution and a uniform number to a token.

Axes: v vocabulary, k kept tokens; leading axes are free.
Covers temperature, top-k and top-p in that order (as transformers applies them), greedy as
temperature 0, and inverse-CDF draws. Does not cover penalties and other processors: a generation
config that asks for one is refused, because drafting would no longer be lossless.
Invariant: a token is drawn from exactly the probabilities that are handed out with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from artifacts.errors import TrimtabError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "min_p": (None, 0.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """temperature 0 is greedy; top_k and top_p None are off."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise TrimtabError(f"temperature {self.temperature} must be 0 or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise TrimtabError(f"top_k {self.top_k} must be at least 1, or absent")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise TrimtabError(f"top_p {self.top_p} must be in (0, 1], or absent")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """The sampling that a generation_config.json asks for; an absent field is off.

        Without `do_sample: true` that is greedy. top_k 0 and top_p 1 are off.
        Raises: TrimtabError for a processor that the runtime does not apply.
        """
        for key, neutral in _NEUTRAL.items():
            if config.get(key) not in neutral:
                raise TrimtabError(
                    f"generation_config: {key} = {config[key]!r} is not applied by the runtime",
                    hint="remove the field, or set the sampling explicitly",
                )
        if not config.get("do_sample", False):
            return cls()
        temperature = config.get("temperature")
        top_p = config.get("top_p")
        return cls(
            temperature=1.0 if temperature is None else float(temperature),
            top_k=int(config["top_k"]) if config.get("top_k") else None,
            top_p=float(top_p) if top_p is not None and float(top_p) < 1.0 else None,
        )


def _kept(logits: Tensor, params: SamplingParams, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(ids [..., k], probabilities [..., k]) of the tokens that top-k and top-p keep, by rank."""
    v = logits.shape[-1]
    count = min(params.top_k or v, v)
    values, ids = logits.topk(count, dim=-1)
    probs = (values.to(dtype) / params.temperature).softmax(dim=-1)
    if params.top_p is not None:
        before = probs.cumsum(dim=-1) - probs
        probs = probs.masked_fill(before >= params.top_p, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return ids, probs


def process(logits: Tensor, params: SamplingParams, dtype: torch.dtype = torch.float64) -> Tensor:
    """Probabilities [..., v] after temperature, top-k and top-p; one-hot argmax when greedy."""
    if params.greedy:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits, dtype=dtype).scatter_(-1, best, 1.0)
    if params.top_k is None and params.top_p is None:
        return (logits.to(dtype) / params.temperature).softmax(dim=-1)
    ids, probs = _kept(logits, params, dtype)
    return torch.zeros_like(logits, dtype=dtype).scatter_(-1, ids, probs)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF: the first index whose running sum exceeds u * total; int64 [...].

    probs: [..., v], not negative, not all zero, of any total. u: [...] in [0, 1).
    An index of probability 0 is never returned.
    """
    running = probs.cumsum(dim=-1)
    total = running[..., -1:].contiguous()
    goal = u.to(running.dtype).unsqueeze(-1) * total
    index = torch.searchsorted(running, goal, right=True)
    last = torch.searchsorted(running, total)
    return torch.minimum(index, last).squeeze(-1)


def sample(logits: Tensor, params: SamplingParams, u: Tensor | None) -> Tensor:
    """Tokens int64 [...] for logits [..., v] and uniforms [...] (None when greedy).

    Draws what `draw(process(logits), u)` draws, but ranks only the kept tokens.
    """
    if params.greedy:
        return logits.argmax(dim=-1)
    if u is None:
        raise ValueError("sampling needs uniforms")
    if params.top_k is None:
        return draw(process(logits, params), u)
    ids, probs = _kept(logits, params, torch.float64)
    ids, order = ids.sort(dim=-1)
    index = draw(probs.gather(-1, order), u)
    return ids.gather(-1, index.unsqueeze(-1)).squeeze(-1)
