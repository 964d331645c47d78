"""The chunked delta rule, the single step and the rollback against the recurrence."""

from __future__ import annotations

import pytest
import torch

from artifacts.runtime import delta
from artifacts.runtime.ops import causal_conv, l2_norm
from tests.oracles.delta import recurrence


def _inputs(t: int, seed: int, *, alike: bool = False) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    key = torch.randn(2, 2, t, 16, generator=g)
    if alike:
        key = key[:, :, :1] + 0.01 * key
    query = l2_norm(torch.randn(2, 2, t, 16, generator=g), 16**-0.5)
    value = torch.randn(2, 4, t, 8, generator=g)
    decay = -torch.rand(2, 4, t, generator=g) * (0.001 if alike else 0.5)
    beta = torch.rand(2, 4, t, generator=g)
    return query, l2_norm(key), value, decay, beta if not alike else beta * 0 + 0.999


@pytest.mark.parametrize("t", [1, 7, 32, 33, 100])
@pytest.mark.parametrize("alike", [False, True])
def test_chunked_equals_recurrence(t: int, alike: bool) -> None:
    """Also with nearly equal keys and no decay, where the triangular inverse is at its worst."""
    inputs = _inputs(t, t, alike=alike)
    before = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(1))
    for start in (None, before):
        state = None if start is None else start.clone()
        out, record = delta.chunked(*inputs, state)
        assert record is None
        for b in range(2):
            first = torch.zeros(4, 16, 8) if start is None else start[b]
            slow, states = recurrence(*(x[b] for x in inputs), first)
            torch.testing.assert_close(out[b].double(), slow, atol=2e-4, rtol=1e-3)
            if state is not None:
                torch.testing.assert_close(state[b].double(), states[-1], atol=2e-4, rtol=1e-3)


def test_steps_and_rollback_equal_recurrence() -> None:
    inputs = _inputs(9, 3)
    before = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(2))
    slow = [recurrence(*(x[b] for x in inputs), before[b]) for b in range(2)]
    state = before.clone()
    query, key, value, g, beta = inputs
    for t in range(9):
        out = delta.step(
            query[:, :, t], key[:, :, t], value[:, :, t], g[:, :, t], beta[:, :, t], state
        )
        for b in range(2):
            torch.testing.assert_close(out[b].double(), slow[b][0][:, t], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(state[b].double(), slow[b][1][t], atol=1e-5, rtol=1e-4)
    for keep in ([0, 9], [1, 5], [9, 0], [3, 3]):
        state = before.clone()
        out, record = delta.chunked(*inputs, state, advance=False)
        assert record is not None and torch.equal(state, before)
        record.commit(state, torch.tensor(keep))
        for b, k in enumerate(keep):
            expected = before[b].double() if k == 0 else slow[b][1][k - 1]
            torch.testing.assert_close(state[b].double(), expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(out[b].double(), slow[b][0], atol=1e-5, rtol=1e-4)


def test_causal_conv_with_and_without_a_tail() -> None:
    generator = torch.Generator().manual_seed(4)
    u = torch.randn(2, 11, 6, generator=generator)
    weight = torch.randn(6, 4, generator=generator)
    padded = torch.nn.functional.pad(u.transpose(1, 2), (3, 0))
    full = torch.nn.functional.conv1d(padded, weight[:, None], groups=6).transpose(1, 2)
    expected = torch.nn.functional.silu(full)
    torch.testing.assert_close(causal_conv(u, weight, None)[0], expected)
    tail = torch.cat((torch.zeros(2, 1, 6), u[:, :2]), dim=1)
    torch.testing.assert_close(causal_conv(u[:, 2:], weight, tail)[0], expected[:, 2:])
