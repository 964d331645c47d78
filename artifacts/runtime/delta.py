"""The gated delta rule: whole sequences by chunks, single tokens, and exact rollback.

Axes: b batch, a key heads, r value heads per key head, h = a * r value heads, n chunks, c tokens of
a chunk, t tokens, k key dimension, v value dimension.
The rule (Gated DeltaNet; transformers `torch_recurrent_gated_delta_rule`), per value head:
    S <- S exp(g);  u = (value - S^T key) beta;  S <- S + key u^T;  out = S^T query
By chunks, with G the running sum of g inside the chunk and S the state before it:
    (I + A) U = beta (V - exp(G) K S),   A[i, j] = beta_i exp(G_i - G_j) k_i.k_j  for j < i
    out = exp(G) Q S + lower(Q K^T exp(G_i - G_j)) U
    S after m tokens = exp(G_m) S + sum_{j <= m} exp(G_m - G_j) k_j u_j^T
The last line is the rollback: with (K, U, G) of the last call at hand the state after any number of
its tokens follows from the state before it, so no state is ever stored twice.
Everything is fp32. Queries come scaled, queries and keys normalised. Invariant: both forms and the
rollback agree with the recurrence up to fp32 rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 32
_BASE = 16


@dataclass
class DeltaRecord:
    """What the rollback needs of one call of c tokens: keys, updates, running decay logarithms."""

    key_bhck: Tensor
    update_bhcv: Tensor
    decay_bhc: Tensor

    def commit(self, state_bhkv: Tensor, keep_b: Tensor) -> None:
        """Advance `state` in place from before the call to after its first keep[b] tokens."""
        c = self.decay_bhc.shape[-1]
        last = (keep_b - 1).clamp(min=0).view(-1, 1, 1).expand(-1, self.decay_bhc.shape[1], 1)
        total = self.decay_bhc.gather(2, last)
        total = torch.where(keep_b.view(-1, 1, 1) > 0, total, torch.zeros_like(total))
        kept = torch.arange(c, device=keep_b.device) < keep_b.view(-1, 1, 1)
        weight = (total - self.decay_bhc).masked_fill_(~kept, float("-inf")).exp_()
        state_bhkv.mul_(total.exp().unsqueeze(-1))
        keys = (self.key_bhck * weight.unsqueeze(-1)).transpose(-1, -2)
        state_bhkv.add_(torch.matmul(keys, self.update_bhcv))


def _inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower triangular [..., c, c], by halves down to small blocks."""
    c = lower.shape[-1]
    if c <= _BASE or c % 2:
        eye = torch.eye(c, dtype=lower.dtype, device=lower.device).expand_as(lower)
        inverse: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
        return inverse
    half = c // 2
    blocks = torch.stack((lower[..., :half, :half], lower[..., half:, half:]))
    first, second = _inverse(blocks)
    corner = torch.matmul(torch.matmul(second, lower[..., half:, :half]), first).neg_()
    out = torch.zeros_like(lower)
    out[..., :half, :half] = first
    out[..., half:, half:] = second
    out[..., half:, :half] = corner
    return out


def _pad(x: Tensor, count: int) -> Tensor:
    """Zeros appended on axis 2 (tokens): with g = beta = 0 they change nothing."""
    shape = list(x.shape)
    shape[2] = count
    return torch.cat((x, x.new_zeros(shape)), dim=2) if count else x


def chunked(
    query_batk: Tensor,
    key_batk: Tensor,
    value_bhtv: Tensor,
    g_bht: Tensor,
    beta_bht: Tensor,
    state_bhkv: Tensor | None,
    *,
    chunk: int = CHUNK,
    advance: bool = True,
) -> tuple[Tensor, DeltaRecord | None]:
    """The rule over t tokens.

    Args:
        query_batk, key_batk: fp32, normalised, query scaled by k^-1/2; a key heads.
        value_bhtv, g_bht (log decay), beta_bht: fp32; value head h uses key head h // r.
        state_bhkv: the state before, advanced in place if `advance`; None for zeros, not returned.
        advance: False leaves the state alone and returns the record for `DeltaRecord.commit`; the
            call is then one chunk, whatever its length.

    Returns: (out [b, h, t, v], record or None).
    """
    b, _, t, dk = key_batk.shape
    h, dv = value_bhtv.shape[1], value_bhtv.shape[3]
    c = t if t <= chunk or not advance else chunk
    parts = _prepare(query_batk, key_batk, value_bhtv, g_bht, beta_bht, c)
    n = parts.first_u.shape[1]
    if state_bhkv is None:
        state = parts.reads.new_zeros(b * h, dk, dv)
    else:
        state = state_bhkv.reshape(b * h, dk, dv)
    out = parts.reads.new_empty(b * h, n, c, dv)
    update = parts.first_u[:, 0]
    for i in range(n):
        read = torch.bmm(parts.reads[:, i], state)
        update = parts.first_u[:, i] - read[:, :c]
        out[:, i] = torch.baddbmm(read[:, c:], parts.mixing[:, i], update)
        if advance and (i + 1 < n or state_bhkv is not None):
            state = torch.baddbmm(state * parts.shrink[:, i], parts.writes[:, i], update)
    out = out.view(b, h, n * c, dv)[:, :, :t]
    if not advance:
        keys = key_batk.repeat_interleave(h // key_batk.shape[1], dim=1)
        return out, DeltaRecord(keys, update.view(b, h, c, dv), g_bht.cumsum(-1))
    if state_bhkv is not None:
        state_bhkv.copy_(state.view_as(state_bhkv))
    return out, None


@dataclass
class _Chunks:
    """What does not depend on the state, for all chunks at once (leading axis b * h).

    first_u [., n, c, v]: (I + A)^-1 beta V; reads [., n, 2c, k]: what multiplies the state, for
    updates and outputs; mixing [., n, c, c]; writes [., n, k, c]; shrink [., n, 1, 1].
    """

    first_u: Tensor
    reads: Tensor
    mixing: Tensor
    writes: Tensor
    shrink: Tensor


def _prepare(
    query_batk: Tensor,
    key_batk: Tensor,
    value_bhtv: Tensor,
    g_bht: Tensor,
    beta_bht: Tensor,
    c: int,
) -> _Chunks:
    b, a, t, dk = key_batk.shape
    h, dv = value_bhtv.shape[1], value_bhtv.shape[3]
    r, fill = h // a, -t % c
    n = (t + fill) // c
    q = _pad(query_batk, fill).reshape(b, a, 1, n, c, dk)
    k = _pad(key_batk, fill).reshape(b, a, 1, n, c, dk)
    v = _pad(value_bhtv, fill).reshape(b, a, r, n, c, dv)
    beta = _pad(beta_bht, fill).reshape(b, a, r, n, c, 1)
    decay = _pad(g_bht, fill).reshape(b, a, r, n, c).cumsum(-1)
    future = torch.ones(c, c, dtype=torch.bool, device=k.device).triu(1)
    ratio = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill_(future, float("-inf")).exp_()
    key_t = k.transpose(-1, -2)
    lower = (torch.matmul(k, key_t) * ratio).mul_(beta).tril_(-1)
    grown = decay.exp().unsqueeze(-1)
    right = torch.cat((v * beta, k * (beta * grown)), dim=-1)
    solved = torch.matmul(_inverse(lower), right)
    total = decay[..., -1:]
    writes = (k * (total - decay).exp_().unsqueeze(-1)).view(b * h, n, c, dk)
    return _Chunks(
        first_u=solved[..., :dv].reshape(b * h, n, c, dv),
        reads=torch.cat((solved[..., dv:], q * grown), dim=-2).view(b * h, n, 2 * c, dk),
        mixing=(torch.matmul(q, key_t) * ratio).view(b * h, n, c, c),
        writes=writes.transpose(-1, -2),
        shrink=total.exp().reshape(b * h, n, 1, 1),
    )


def step(
    query_bak: Tensor,
    key_bak: Tensor,
    value_bhv: Tensor,
    g_bh: Tensor,
    beta_bh: Tensor,
    state_bhkv: Tensor,
) -> Tensor:
    """The rule for one token, in place on the state: [b, h, v]. Arguments as in `chunked`.

    With S the old state, one product reads S for key and query together:
    u = beta (value - exp(g) S^T key), out = exp(g) S^T query + (key.query) u.
    """
    b, h, dk, dv = state_bhkv.shape
    r = h // key_bak.shape[1]
    state = state_bhkv.view(b * h, dk, dv)
    both = torch.stack((key_bak, query_bak), dim=2)
    both = both.unsqueeze(2).expand(-1, -1, r, -1, -1).reshape(b * h, 2, dk)
    shrink = g_bh.exp().view(b * h, 1, 1)
    read = torch.bmm(both, state).mul_(shrink)
    update = (value_bhv.reshape(b * h, 1, dv) - read[:, :1]).mul_(beta_bh.reshape(b * h, 1, 1))
    key = both[:, :1]
    overlap = (key * both[:, 1:]).sum(-1, keepdim=True)
    state.mul_(shrink).baddbmm_(key.transpose(1, 2), update)
    return torch.addcmul(read[:, 1:], overlap, update).view(b, h, dv)
