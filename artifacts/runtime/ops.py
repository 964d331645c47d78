"""Small pure functions of the forward passes: norms, rope, causal convolution, attention.

Axes: b batch, t tokens, s keys, n query heads, m key/value heads, d head dimension, c channels.
Covers the parts that have no weights of their own beyond a vector. Does not cover the gated delta
rule (`delta`) or modules (`layers`). Everything that transformers computes in fp32 is fp32 here.
Invariant: no function keeps state or writes to its arguments.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in fp32, cast back to x's dtype.

    weight: fp32 [d]; for the offset norms of Qwen3.5 pass 1 + the stored weight.
    """
    y = x.float()
    scale: Tensor = torch.linalg.vecdot(y, y).unsqueeze_(-1)
    scale = scale.div_(y.shape[-1]).add_(eps).rsqrt_()
    return (y * scale).mul_(weight).to(x.dtype)


def l2_norm(x: Tensor, factor: float = 1.0, eps: float = 1e-6) -> Tensor:
    """factor * x / sqrt(sum(x^2) + eps) over the last axis."""
    scale: Tensor = torch.linalg.vecdot(x, x).unsqueeze_(-1).add_(eps).rsqrt_()
    return x * scale.mul_(factor)


class Rope:
    """Rotary embedding of the first `dim` entries of each head, neox halves, absolute positions.

    Tables grow on demand; they are fp32 and hold cos and sin of position * theta^(-2i/dim).
    """

    def __init__(self, dim: int, theta: float, device: torch.device | str) -> None:
        self.dim = dim
        exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        self._frequency = (1.0 / theta**exponent).to(torch.float32)
        self._device = device
        self._cos = self._sin = torch.empty(0, dim // 2, device=device)

    def reserve(self, below: int) -> None:
        """Grow the tables to positions smaller than `below` (before threads use them)."""
        if below > self._cos.shape[0]:
            size = max(512, 1 << (below - 1).bit_length())
            angle = torch.arange(size, dtype=torch.float32)[:, None] * self._frequency
            self._cos = angle.cos().to(self._device)
            self._sin = angle.sin().to(self._device)

    def at(self, positions: Tensor, *, below: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [..., dim/2], at int64 positions, all of them smaller than `below`."""
        self.reserve(below)
        return F.embedding(positions, self._cos), F.embedding(positions, self._sin)

    def apply(self, x_btnd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate [b, t, n, d] with cos and sin [b, t, dim/2] (or [t, dim/2])."""
        half = self.dim // 2
        cos, sin = cos.unsqueeze(-2).to(x_btnd.dtype), sin.unsqueeze(-2).to(x_btnd.dtype)
        a, b = x_btnd[..., :half], x_btnd[..., half : self.dim]
        parts = [a * cos - b * sin, b * cos + a * sin]
        if self.dim < x_btnd.shape[-1]:
            parts.append(x_btnd[..., self.dim :])
        return torch.cat(parts, dim=-1)


def causal_conv(u_btc: Tensor, weight_ck: Tensor, tail_bkc: Tensor | None) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, then silu: y[t] = silu(sum_j w[:, j] u[t - (K-1) + j]).

    Args:
        u_btc: fp32 inputs.
        weight_ck: [c, K].
        tail_bkc: the K-1 inputs before u, or None for zeros.

    Returns: (y [b, t, c], the inputs with the tail before them [b, K-1+t, c]; without a tail u).
    """
    taps = weight_ck.shape[1]
    t = u_btc.shape[1]
    if tail_bkc is None:
        y = u_btc * weight_ck[:, taps - 1]
        for back in range(1, min(taps, t)):
            y[:, back:].addcmul_(u_btc[:, :-back], weight_ck[:, taps - 1 - back])
        return F.silu(y, inplace=True), u_btc
    extended = torch.cat((tail_bkc, u_btc), dim=1)
    y = extended[:, taps - 1 :] * weight_ck[:, taps - 1]
    for j in range(taps - 1):
        y.addcmul_(extended[:, j : j + t], weight_ck[:, j])
    return F.silu(y, inplace=True), extended


def causal_attention(q_bntd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor) -> Tensor:
    """Softmax attention with every query seeing itself and what is before it: [b, n, t, d]."""
    return F.scaled_dot_product_attention(
        q_bntd, k_bmtd, v_bmtd, is_causal=True, enable_gqa=q_bntd.shape[1] != k_bmtd.shape[1]
    )


def masked_attention(q_bntd: Tensor, k_bmsd: Tensor, v_bmsd: Tensor, seen_bts: Tensor) -> Tensor:
    """Softmax attention over the keys that `seen` (bool, [b or 1, t, s]) allows: [b, n, t, d].

    Key/value heads are not repeated: the query heads of one key head are rows of one product.
    Every query must see at least one key.
    """
    b, n, t, d = q_bntd.shape
    m, s = k_bmsd.shape[1], k_bmsd.shape[2]
    group = n // m
    q = (q_bntd * (1.0 / math.sqrt(d))).reshape(b, m, group * t, d)
    scores = torch.matmul(q, k_bmsd.transpose(-1, -2)).view(b, m, group, t, s)
    scores = scores.masked_fill(~seen_bts[:, None, None], float("-inf"))
    weights = scores.float().softmax(dim=-1).to(q.dtype).view(b, m, group * t, s)
    return torch.matmul(weights, v_bmsd).view(b, n, t, d)


Keys = tuple[Tensor, Tensor, Tensor | None]


def two_part_attention(q_bntd: Tensor, first: Keys, second: Keys) -> Tensor:
    """Softmax attention over two sets of keys without joining them: [b, n, t, d].

    Each set: (keys [b, m, s, d], values [b, m, s, d], seen bool [1 or b, 1 or t, s] or None for
    all). Every query must see at least one key.
    """
    b, n, t, d = q_bntd.shape
    m = first[0].shape[1]
    group = n // m
    q = (q_bntd * (1.0 / math.sqrt(d))).reshape(b, m, group * t, d)
    parts: list[Tensor] = []
    for key, _, seen in (first, second):
        score = torch.matmul(q, key.transpose(-1, -2)).view(b, m, group, t, -1)
        if seen is not None:
            score = score.masked_fill(~seen[:, None, None], float("-inf"))
        parts.append(score)
    weights = torch.cat(parts, dim=-1).float().softmax(dim=-1).to(q.dtype)
    weights = weights.view(b, m, group * t, -1)
    s = first[0].shape[2]
    out = torch.matmul(weights[..., :s], first[1])
    out += torch.matmul(weights[..., s:], second[1])
    return out.view(b, n, t, d)
