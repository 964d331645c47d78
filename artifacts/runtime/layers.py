"""The sublayers that targets, MTP heads and drafters are made of.

Axes: b batch, t tokens, h hidden, n query heads, m key/value heads, d head dimension, a key heads
and r value heads per key head of the linear attention, k and v its dimensions, c channels.
Covers full attention (q/k norms, partial rope, output gate), gated DeltaNet and the SwiGLU MLP,
each with its matrices stacked where they share inputs. Does not cover residuals, norms between
sublayers, or caches' bookkeeping (`state`).
In: normed activations. Out: what is added to the residual. Sources: transformers 5.17
`models/qwen3_5/modeling_qwen3_5.py`, `models/qwen3`. Invariant: equal to transformers in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from artifacts.runtime import delta
from artifacts.runtime.config_fields import AttentionConfig, LinearAttentionConfig
from artifacts.runtime.linear import Linear
from artifacts.runtime.loading import Taken
from artifacts.runtime.ops import (
    Rope,
    causal_attention,
    causal_conv,
    l2_norm,
    masked_attention,
    rms_norm,
)
from artifacts.runtime.state import DeltaState, KvCache, Placement, tail_after

Rows = bool | Tensor


@dataclass
class Norm:
    """RMS norm with its effective fp32 weight (1 + stored for the offset norms)."""

    weight: Tensor
    eps: float

    @classmethod
    def load(cls, taken: Taken, name: str, size: int, eps: float, *, offset: bool) -> Norm:
        weight = taken.tensor(f"{name}.weight", (size,), dtype=torch.float32)
        return cls(weight + 1.0 if offset else weight, eps)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Mlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down
        self.width = gate_up.parts[0][1]

    @classmethod
    def load(cls, taken: Taken, name: str, hidden: int, intermediate: int) -> Mlp:
        parts = [(f"{name}.gate_proj", intermediate), (f"{name}.up_proj", intermediate)]
        return cls(
            taken.stack(parts, hidden), taken.linear(f"{name}.down_proj", hidden, intermediate)
        )

    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def __call__(self, x: Tensor, observe: Rows = True) -> Tensor:
        both = self.gate_up(x, observe=observe)
        return self.down(
            F.silu(both[..., : self.width]).mul_(both[..., self.width :]), observe=observe
        )


class FullAttention:
    """Grouped-query softmax attention with optional q/k norms and output gate."""

    def __init__(
        self, config: AttentionConfig, qkv: Linear, o: Linear, norms: tuple[Norm, Norm] | None
    ) -> None:
        self.config = config
        self.qkv = qkv
        self.o = o
        self.norms = norms

    @classmethod
    def load(cls, taken: Taken, name: str, config: AttentionConfig, hidden: int) -> FullAttention:
        d, heads, kv = config.head_dim, config.heads, config.kv_heads
        parts = [
            (f"{name}.q_proj", heads * d * (2 if config.output_gate else 1)),
            (f"{name}.k_proj", kv * d),
            (f"{name}.v_proj", kv * d),
        ]
        norms = None
        if config.qk_norm:
            norms = tuple(
                Norm.load(taken, f"{name}.{n}", d, config.eps, offset=config.offset_norm)
                for n in ("q_norm", "k_norm")
            )
        return cls(
            config,
            taken.stack(parts, hidden),
            taken.linear(f"{name}.o_proj", hidden, heads * d),
            (norms[0], norms[1]) if norms else None,
        )

    def linears(self) -> list[Linear]:
        return [self.qkv, self.o]

    def keys(self, key_btmd: Tensor, rope: Rope, cos: Tensor, sin: Tensor) -> Tensor:
        """Normed and rotated keys [b, m, t, d] from projected ones [b, t, m, d]."""
        if self.norms:
            key_btmd = self.norms[1](key_btmd)
        return rope.apply(key_btmd, cos, sin).transpose(1, 2)

    def project(
        self, x_bth: Tensor, rope: Rope, cos: Tensor, sin: Tensor, observe: Rows = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(query [b, n, t, d], key [b, m, t, d], value [b, m, t, d], gate [b, t, n, d] or None)."""
        c = self.config
        b, t = x_bth.shape[:2]
        q, k, v = self.qkv.split(self.qkv(x_bth, observe=observe))
        gate = None
        q = q.view(b, t, c.heads, -1)
        if c.output_gate:
            q, gate = q[..., : c.head_dim], q[..., c.head_dim :]
        if self.norms:
            q = self.norms[0](q)
        q = rope.apply(q, cos, sin).transpose(1, 2)
        key = self.keys(k.view(b, t, c.kv_heads, c.head_dim), rope, cos, sin)
        return q, key, v.view(b, t, c.kv_heads, c.head_dim).transpose(1, 2), gate

    def finish(self, mixed_bntd: Tensor, gate: Tensor | None, observe: Rows = True) -> Tensor:
        """o_proj of the gated attention output: [b, t, h]."""
        b, n, t, d = mixed_bntd.shape
        out = mixed_bntd.transpose(1, 2)
        if gate is not None:
            out = out * gate.sigmoid()
        return self.o(out.reshape(b, t, n * d), observe=observe)

    def __call__(
        self,
        x_bth: Tensor,
        rope: Rope,
        place: Placement,
        cache: KvCache | None,
        observe: Rows = True,
    ) -> Tensor:
        """Causal attention of a call's tokens; with a cache they are appended to it first."""
        q, k, v, gate = self.project(x_bth, rope, place.cos, place.sin, observe)
        if cache is not None:
            cache.append(k, v, place)
            if place.seen_bts is not None:
                k, v = cache.up_to(place.limit)
        return self.finish(self.mix(q, k, v, place), gate, observe)

    @staticmethod
    def mix(q: Tensor, k: Tensor, v: Tensor, place: Placement) -> Tensor:
        """Attention as the placement says: causal, or over the keys that it shows."""
        if place.seen_bts is None:
            return causal_attention(q, k, v)
        return masked_attention(q, k, v, place.seen_bts)


class LinearAttention:
    """Gated DeltaNet: stacked projections, causal convolution, delta rule, gated norm."""

    def __init__(
        self,
        config: LinearAttentionConfig,
        inputs: Linear,
        out: Linear,
        vectors: tuple[Tensor, Tensor, Tensor],
        norm: Norm,
    ) -> None:
        self.config = config
        self.inputs = inputs
        self.out = out
        self.conv_ck, self.rate_h, self.bias_h = vectors
        self.norm = norm

    @classmethod
    def load(
        cls, taken: Taken, name: str, config: LinearAttentionConfig, hidden: int, eps: float
    ) -> LinearAttention:
        heads, vd = config.value_heads, config.value_heads * config.value_dim
        parts = [
            (f"{name}.in_proj_qkv", config.channels),
            (f"{name}.in_proj_z", vd),
            (f"{name}.in_proj_b", heads),
            (f"{name}.in_proj_a", heads),
        ]
        f32 = torch.float32
        conv = taken.tensor(
            f"{name}.conv1d.weight", (config.channels, 1, config.conv_kernel), dtype=f32
        )
        rate = -taken.tensor(f"{name}.A_log", (heads,), dtype=f32).exp()
        bias = taken.tensor(f"{name}.dt_bias", (heads,), dtype=f32)
        return cls(
            config,
            taken.stack(parts, hidden),
            taken.linear(f"{name}.out_proj", hidden, vd),
            (conv[:, 0], rate, bias),
            Norm.load(taken, f"{name}.norm", config.value_dim, eps, offset=False),
        )

    def linears(self) -> list[Linear]:
        return [self.inputs, self.out]

    def empty_state(self, b: int, *, device: torch.device | str) -> DeltaState:
        c = self.config
        return DeltaState(
            torch.zeros(b, c.value_heads, c.key_dim, c.value_dim, device=device),
            torch.zeros(b, c.conv_kernel - 1, c.channels, device=device),
        )

    def __call__(
        self,
        x_bth: Tensor,
        place: Placement,
        state: DeltaState | None,
        *,
        snapshots: bool,
        observe: Rows = True,
    ) -> Tensor:
        """The mixer's output [b, t, h]; with a state, it is advanced (or recorded: snapshots)."""
        b, t = x_bth.shape[:2]
        qkv, z, beta, alpha = self.inputs.split(self.inputs(x_bth, observe=observe))
        beta_bth = beta.float().sigmoid()
        g_bth = F.softplus(alpha.float() + self.bias_h) * self.rate_h
        valid = place.valid_bt
        if valid is not None and state is not None:
            beta_bth, g_bth = beta_bth * valid.unsqueeze(-1), g_bth * valid.unsqueeze(-1)
        mixed, extended = causal_conv(
            qkv.float(), self.conv_ck, None if state is None else state.tail_bjc
        )
        out_bhtv = self._delta(mixed, g_bth, beta_bth, state, snapshots=snapshots)
        if state is not None:
            if snapshots:
                state.extended = extended
            else:
                counts = None if valid is None else valid.sum(1)
                state.tail_bjc.copy_(tail_after(extended, state.tail_bjc.shape[1], counts))
        c = self.config
        normed = self.norm(out_bhtv.transpose(1, 2))
        gate = z.float().reshape(b, t, c.value_heads, c.value_dim)
        gate = F.silu(gate) if c.gate_activation == "silu" else gate.sigmoid()
        return self.out(normed.mul_(gate).to(x_bth.dtype).reshape(b, t, -1), observe=observe)

    def _delta(
        self,
        mixed_btc: Tensor,
        g_bth: Tensor,
        beta_bth: Tensor,
        state: DeltaState | None,
        *,
        snapshots: bool,
    ) -> Tensor:
        c = self.config
        b, t = mixed_btc.shape[:2]
        kd = c.key_heads * c.key_dim
        query, key, value = (
            mixed_btc[..., :kd],
            mixed_btc[..., kd : 2 * kd],
            mixed_btc[..., 2 * kd :],
        )
        query = l2_norm(query.view(b, t, c.key_heads, c.key_dim), c.key_dim**-0.5)
        key = l2_norm(key.view(b, t, c.key_heads, c.key_dim))
        value = value.view(b, t, c.value_heads, c.value_dim)
        if t == 1 and state is not None and not snapshots:
            out = delta.step(
                query[:, 0], key[:, 0], value[:, 0], g_bth[:, 0], beta_bth[:, 0], state.state_bhkv
            )
            return out.unsqueeze(2)
        out, record = delta.chunked(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            g_bth.transpose(1, 2),
            beta_bth.transpose(1, 2),
            None if state is None else state.state_bhkv,
            advance=not snapshots,
        )
        if state is not None:
            state.record = record
        return out
