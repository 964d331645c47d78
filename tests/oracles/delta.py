"""The gated delta rule, one token and one value head at a time, float64."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """(out [h, t, v], the state [h, k, v] after each token) for one sequence.

    query, key: [a, t, k]; value: [h, t, v]; g, beta: [h, t]; state: [h, k, v] before.
    """
    heads, steps = value.shape[:2]
    repeat = heads // key.shape[0]
    s = state.double().clone()
    out = torch.zeros(value.shape, dtype=torch.float64)
    states = []
    for t in range(steps):
        for h in range(heads):
            k, q = key[h // repeat, t].double(), query[h // repeat, t].double()
            s[h] = s[h] * torch.exp(g[h, t].double())
            update = (value[h, t].double() - s[h].T @ k) * beta[h, t].double()
            s[h] = s[h] + torch.outer(k, update)
            out[h, t] = s[h].T @ q
        states.append(s.clone())
    return out, states
