"""Plain PyTorch forward passes of the pocket family: target, MTP head, DFlash2 drafter.

Parameter names are those of the released checkpoints, so a ``state_dict`` is a checkpoint.
Three uses share the modules: training (whole windows, gradients), replay (whole sequences,
fp32, no gradients) and generation (``Decoder``: one token a step for many rows).
Axes: b batch, t position, h hidden, n anchors, r rows of a block, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The numbers of the target's config that the code needs."""

    vocab: int = 8192
    hidden: int = 256
    inter: int = 768
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    key_heads: int = 2
    value_heads: int = 4
    lin_dim: int = 64
    conv: int = 4
    interval: int = 4
    theta: float = 100_000.0
    rotary: float = 0.25
    eps: float = 1e-6

    @property
    def key_dim(self) -> int:
        return self.key_heads * self.lin_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.lin_dim

    def full(self, i: int) -> bool:
        """Whether layer i is full attention."""
        return (i + 1) % self.interval == 0

    @classmethod
    def from_config(cls, c: dict[str, Any]) -> Shape:
        """From a ``qwen3_5_text`` config."""
        rope = c["rope_parameters"]
        return cls(
            c["vocab_size"],
            c["hidden_size"],
            c["intermediate_size"],
            c["num_hidden_layers"],
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
            c["linear_num_key_heads"],
            c["linear_num_value_heads"],
            c["linear_key_head_dim"],
            c["linear_conv_kernel_dim"],
            c["full_attention_interval"],
            rope["rope_theta"],
            rope["partial_rotary_factor"],
            c["rms_norm_eps"],
        )


class OffsetNorm(nn.Module):
    """RMS norm whose stored weight is the offset from one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class PlainNorm(nn.Module):
    """RMS norm with an ordinary weight (the drafter's norms, and the gated norm of GDN)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).type_as(x)


def linear(n_in: int, n_out: int) -> nn.Linear:
    """A linear map without bias."""
    return nn.Linear(n_in, n_out, bias=False)


def rope(x: Tensor, position: Tensor, theta: float, share: float) -> Tensor:
    """Rotate the first ``share`` of the head; x [..., t, d], position broadcastable to [..., t]."""
    size = int(x.shape[-1] * share)
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=x.device)
    angle = position.float()[..., None] * theta ** (-steps / size)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., : size // 2].float(), x[..., size // 2 : size].float()
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)
    return torch.cat([turned, x[..., size:]], -1)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, inter)
        self.up_proj = linear(hidden, inter)
        self.down_proj = linear(inter, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class InvertUnitLower(torch.autograd.Function):
    """(I + L)^-1 for strictly lower L [..., c, c], by doubling blocks (stable, matmuls only)."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        row = torch.arange(size, device=lower.device)
        x = torch.eye(size, device=lower.device, dtype=lower.dtype).expand_as(lower)
        block = 1
        while block < size:
            low = (row // block) % 2 == 1
            pair = row // (2 * block)
            mask = low[:, None] & ~low[None, :] & (pair[:, None] == pair[None, :])
            part = lower * mask
            x = x - part if block == 1 else x - x @ part @ x
            block *= 2
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        turned = x.transpose(-1, -2)
        return -(turned @ grads[0] @ turned)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """Gated delta rule over whole sequences in fp32, chunk by chunk.

    q, k [b, heads, t, d] (normalised, q scaled), v [b, heads, t, d], g and beta [b, heads, t].
    """
    b, heads, t, d = q.shape
    pad = -t % chunk
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
    n = (t + pad) // chunk
    q, k, v = (x.reshape(b, heads, n, chunk, d) for x in (q, k, v))
    g = g.reshape(b, heads, n, chunk).cumsum(-1)
    beta = beta.reshape(b, heads, n, chunk, 1)
    row = torch.arange(chunk, device=q.device)
    upper = row[:, None] < row[None, :]
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(upper, float("-inf")).exp()
    kb = k * beta
    lower = ((kb @ k.transpose(-1, -2)) * decay).masked_fill(row[:, None] <= row[None, :], 0.0)
    inverse: Tensor = InvertUnitLower.apply(lower)  # type: ignore[no-untyped-call]
    value = inverse @ (v * beta)
    key_decay = inverse @ (kb * g.exp()[..., None])
    local = (q @ k.transpose(-1, -2)) * decay
    q = q * g.exp()[..., None]
    k = (k * (g[..., -1:] - g).exp()[..., None]).transpose(-1, -2)
    last = g[..., -1].exp()[..., None, None]
    state = q.new_zeros(b, heads, d, d)
    out: list[Tensor] = []
    for i in range(n):
        new = value[:, :, i] - key_decay[:, :, i] @ state
        out.append(q[:, :, i] @ state + local[:, :, i] @ new)
        state = state * last[:, :, i] + k[:, :, i] @ new
    return torch.stack(out, 2).reshape(b, heads, n * chunk, d)[:, :, :t]


class GatedDeltaNet(nn.Module):
    """The linear-attention mixer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        channels = 2 * s.key_dim + s.value_dim
        self.in_proj_qkv = linear(s.hidden, channels)
        self.in_proj_z = linear(s.hidden, s.value_dim)
        self.in_proj_b = linear(s.hidden, s.value_heads)
        self.in_proj_a = linear(s.hidden, s.value_heads)
        self.conv1d = nn.Conv1d(channels, channels, s.conv, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(s.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(s.value_heads))
        self.norm = PlainNorm(s.lin_dim, s.eps)
        self.out_proj = linear(s.value_dim, s.hidden)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(log decay, write strength), fp32, [..., value heads]."""
        a, b = self.in_proj_a(x).float(), self.in_proj_b(x).float()
        return -self.A_log.float().exp() * F.softplus(a + self.dt_bias.float()), b.sigmoid()

    def split(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels [..., c] to q, k, v [..., value heads, d] in fp32, normalised."""
        s = self.s
        q, k, v = torch.split(u.float(), [s.key_dim, s.key_dim, s.value_dim], -1)
        shape = (*u.shape[:-1], -1, s.lin_dim)
        q, k, v = q.reshape(shape), k.reshape(shape), v.reshape(shape)
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * s.lin_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        times = s.value_heads // s.key_heads
        return q.repeat_interleave(times, -2), k.repeat_interleave(times, -2), v

    def finish(self, out: Tensor, x: Tensor) -> Tensor:
        """Gated norm and output projection; out [..., value heads, d]."""
        z = self.in_proj_z(x).float().reshape(out.shape)
        y = self.norm(out.float()) * F.silu(z)
        mixed: Tensor = self.out_proj(y.flatten(-2).to(x.dtype))
        return mixed

    def forward(self, x: Tensor) -> Tensor:
        u = self.in_proj_qkv(x)
        width = self.s.conv
        padded = F.pad(u, (0, 0, width - 1, 0))
        taps = self.conv1d.weight[:, 0].to(u.dtype)
        t = u.shape[1]
        u = F.silu(sum((padded[:, j : j + t] * taps[:, j] for j in range(width)), u.new_zeros(())))
        q, k, v = (y.transpose(1, 2) for y in self.split(u))
        g, beta = (y.transpose(1, 2) for y in self.gates(x))
        with torch.autocast(x.device.type, enabled=False):
            out = delta_rule(q, k, v, g, beta, 64)
        return self.finish(out.transpose(1, 2), x)


class Attention(nn.Module):
    """Full attention with query/key norms, partial rope and an output gate."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = linear(s.hidden, s.heads * s.head_dim * 2)
        self.k_proj = linear(s.hidden, s.kv_heads * s.head_dim)
        self.v_proj = linear(s.hidden, s.kv_heads * s.head_dim)
        self.o_proj = linear(s.heads * s.head_dim, s.hidden)
        self.q_norm = OffsetNorm(s.head_dim, s.eps)
        self.k_norm = OffsetNorm(s.head_dim, s.eps)

    def project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [b, heads, t, d], k and v [b, kv heads, t, d], gate [b, t, heads * d]."""
        s = self.s
        b, t, _ = x.shape
        q, gate = self.q_proj(x).view(b, t, s.heads, 2 * s.head_dim).chunk(2, -1)
        k = self.k_proj(x).view(b, t, s.kv_heads, s.head_dim)
        v = self.v_proj(x).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2)
        q = rope(self.q_norm(q).transpose(1, 2), position, s.theta, s.rotary)
        k = rope(self.k_norm(k).transpose(1, 2), position, s.theta, s.rotary)
        return q, k, v, gate.reshape(b, t, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, mask: Tensor | None) -> Tensor:
        """Scaled dot product over all keys given; causal when there is no mask."""
        times = self.s.heads // self.s.kv_heads
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out = out.transpose(1, 2).flatten(2)
        mixed: Tensor = self.o_proj(out * gate.sigmoid())
        return mixed

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, torch.arange(x.shape[1], device=x.device))
        return self.attend(q, k, v, gate, None)


class Layer(nn.Module):
    """One decoder layer of the target."""

    self_attn: Attention
    linear_attn: GatedDeltaNet

    def __init__(self, s: Shape, full: bool) -> None:
        super().__init__()
        self.input_layernorm = OffsetNorm(s.hidden, s.eps)
        self.post_attention_layernorm = OffsetNorm(s.hidden, s.eps)
        self.mlp = Mlp(s.hidden, s.inter)
        if full:
            self.self_attn = Attention(s)
        else:
            self.linear_attn = GatedDeltaNet(s)
        self.full = full

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.self_attn if self.full else self.linear_attn
        x = x + mixer(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList([Layer(s, s.full(i)) for i in range(s.layers)])
        self.norm = OffsetNorm(s.hidden, s.eps)

    def forward(self, ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """Hidden after the final norm [b, t, h], and the residual stream after tapped layers."""
        x = self.embed_tokens(ids)
        kept: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i in taps:
                kept.append(x)
        return self.norm(x), kept


class Mtp(nn.Module):
    """The multi-token prediction head: one full-attention layer used at every depth."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.fc = linear(2 * s.hidden, s.hidden)
        self.pre_fc_norm_embedding = OffsetNorm(s.hidden, s.eps)
        self.pre_fc_norm_hidden = OffsetNorm(s.hidden, s.eps)
        self.layers = nn.ModuleList([Layer(s, True)])
        self.norm = OffsetNorm(s.hidden, s.eps)

    def depth(
        self, emb: Tensor, hidden: Tensor, number: int, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """State z [b, t, h] of chain depth ``number`` (1, 2, ...) for every row at once.

        Row t of depth 1 sees the depth-1 keys of rows <= t; a deeper row sees the same and its
        own chain's entries, which is what serving sees. ``cache`` holds each depth's keys.
        """
        layer = cast(Layer, self.layers[0])
        fused = torch.cat([self.pre_fc_norm_embedding(emb), self.pre_fc_norm_hidden(hidden)], -1)
        x = self.fc(fused)
        t = x.shape[1]
        row = torch.arange(t, device=x.device)
        q, k, v, gate = layer.self_attn.project(layer.input_layernorm(x), row + (number - 1))
        cache.append((k, v))
        if number == 1:
            mask = None
        else:
            own = torch.eye(t, dtype=torch.bool, device=x.device)
            mask = torch.cat([row[:, None] >= row[None, :], *[own] * (number - 1)], 1)
        keys = torch.cat([c[0] for c in cache], 2)
        values = torch.cat([c[1] for c in cache], 2)
        x = x + layer.self_attn.attend(q, keys, values, gate, mask)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = self.norm(x)
        return out


class Target(nn.Module):
    """Body, head and MTP."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.model = Body(s)
        self.lm_head = linear(s.hidden, s.vocab)
        self.mtp = Mtp(s)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in fp32, outside autocast."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.lm_head.weight.float())

    def initialise(self, seed: int) -> None:
        """Weights at the start of training."""
        g = torch.Generator().manual_seed(seed)
        deep = 0.02 / (2 * self.s.layers) ** 0.5
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    p.copy_(torch.randn(p.shape, generator=g) * deep)
                elif name.endswith("conv1d.weight"):
                    p.copy_((torch.rand(p.shape, generator=g) * 2 - 1) * 0.5)
                elif name.endswith("A_log"):
                    p.copy_((1 + 15 * torch.rand(p.shape, generator=g)).log())
                elif name.endswith("dt_bias"):
                    dt = torch.exp(torch.rand(p.shape, generator=g) * 4.6 - 6.9)
                    p.copy_(dt + torch.log(-torch.expm1(-dt)))
                elif p.dim() == 2:
                    p.copy_(torch.randn(p.shape, generator=g) * 0.02)


# ------------------------------------------------------------------ generation


@dataclass
class Decoder:
    """Greedy or sampled decoding of many rows, one position a step, all rows in step.

    Every row starts at position 0; a row is fed its prompt as long as that lasts and its own
    tokens afterwards, so rows of different prompt lengths need no padding.
    """

    model: Target
    rows: int
    length: int
    dtype: torch.dtype
    state: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.model.s
        device = self.model.lm_head.weight.device
        channels = 2 * s.key_dim + s.value_dim
        for i in range(s.layers):
            if s.full(i):
                shape = (self.rows, s.kv_heads, self.length, s.head_dim)
                self.state.append(
                    {
                        "k": torch.zeros(shape, dtype=self.dtype, device=device),
                        "v": torch.zeros(shape, dtype=self.dtype, device=device),
                    }
                )
            else:
                self.state.append(
                    {
                        "conv": torch.zeros(
                            self.rows, s.conv, channels, dtype=self.dtype, device=device
                        ),
                        "s": torch.zeros(
                            self.rows * s.value_heads, s.lin_dim, s.lin_dim, device=device
                        ),
                    }
                )

    def mix_linear(self, m: GatedDeltaNet, state: dict[str, Tensor], x: Tensor) -> Tensor:
        """One step of the gated delta rule; x [rows, h]."""
        s = self.model.s
        state["conv"] = torch.cat([state["conv"][:, 1:], m.in_proj_qkv(x)[:, None]], 1)
        u = F.silu((state["conv"] * m.conv1d.weight[:, 0].T.to(x.dtype)).sum(1))
        flat = (self.rows * s.value_heads, s.lin_dim)
        q, k, v = (y.reshape(flat) for y in m.split(u))
        g, beta = (y.reshape(-1, 1) for y in m.gates(x))
        memory = state["s"]
        memory.mul_(g.exp()[..., None])
        delta = (v - torch.bmm(k[:, None], memory)[:, 0]) * beta
        memory.baddbmm_(k[:, :, None], delta[:, None])
        out = torch.bmm(q[:, None], memory).view(self.rows, s.value_heads, s.lin_dim)
        return m.finish(out, x)

    def mix_full(self, m: Attention, state: dict[str, Tensor], x: Tensor, t: int) -> Tensor:
        """One step of full attention; x [rows, h]."""
        s = self.model.s
        q, k, v, gate = m.project(x[:, None], torch.tensor([t], device=x.device))
        state["k"][:, :, t : t + 1] = k
        state["v"][:, :, t : t + 1] = v
        keys, values = state["k"][:, :, : t + 1], state["v"][:, :, : t + 1]
        grouped = q.view(self.rows, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
        score = (grouped.to(keys.dtype) @ keys.transpose(-1, -2)).float() * s.head_dim**-0.5
        out = (score.softmax(-1).to(values.dtype) @ values).reshape(self.rows, -1)
        mixed: Tensor = m.o_proj(out.to(x.dtype) * gate[:, 0].sigmoid())
        return mixed

    def step(self, ids: Tensor, t: int) -> Tensor:
        """Logits [rows, v] after the token at position t."""
        x = self.model.model.embed_tokens(ids).to(self.dtype)
        for i, layer in enumerate(cast(list[Layer], self.model.model.layers)):
            y = layer.input_layernorm(x)
            if layer.full:
                x = x + self.mix_full(layer.self_attn, self.state[i], y, t)
            else:
                x = x + self.mix_linear(layer.linear_attn, self.state[i], y)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.linear(self.model.model.norm(x), self.model.lm_head.weight).float()


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def draw(logits: Tensor, how: Sampling, generator: torch.Generator) -> Tensor:
    """Tokens [rows] from logits [rows, v]: temperature, then top-k, then top-p."""
    if how.temperature == 0:
        return logits.argmax(-1)
    scaled = logits / how.temperature
    if not how.top_k:
        noise = torch.rand(scaled.shape, generator=generator, device=scaled.device)
        return (scaled.softmax(-1) / -noise.clamp_min(1e-20).log()).argmax(-1)
    values, ids = scaled.topk(how.top_k, -1)
    p = values.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p > how.top_p, 0.0)
    pick = torch.multinomial(p, 1, generator=generator)
    return ids.gather(-1, pick)[:, 0]


@torch.no_grad()
def generate(
    model: Target,
    prompts: Tensor,
    lengths: Tensor,
    total: int,
    how: Sampling,
    seed: int,
    dtype: torch.dtype,
) -> Tensor:
    """Sequences [rows, total]: prompts [rows, longest] of the given lengths, then own tokens."""
    rows = prompts.shape[0]
    decoder = Decoder(model, rows, total, dtype)
    generator = torch.Generator(device=prompts.device).manual_seed(seed)
    out = torch.zeros(rows, total, dtype=torch.long, device=prompts.device)
    out[:, : prompts.shape[1]] = prompts[:, :total]
    for t in range(total - 1):
        new = draw(decoder.step(out[:, t], t), how, generator)
        out[:, t + 1] = torch.where(lengths > t + 1, out[:, t + 1], new)
    return out


# --------------------------------------------------------------------- DFlash2


@dataclass(frozen=True)
class DraftShape:
    """The numbers of the drafter's config that the code needs."""

    vocab: int = 8192
    hidden: int = 256
    inter: int = 768
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 512
    theta: float = 100_000.0
    eps: float = 1e-6
    block: int = 8
    taps: tuple[int, ...] = (1, 4, 6)
    mask_id: int = 8180
    conv_kernel: int = 2
    conv_group: int = 16
    rank: int = 64
    top_k: int = 8

    @classmethod
    def from_config(cls, c: dict[str, Any]) -> DraftShape:
        """From a ``DFlash2DraftModel`` config."""
        d = c["dflash_config"]
        return cls(
            c["vocab_size"],
            c["hidden_size"],
            c["intermediate_size"],
            c["num_hidden_layers"],
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
            c["sliding_window"],
            c["rope_theta"],
            c["rms_norm_eps"],
            d["block_size"],
            tuple(d["target_layer_ids"]),
            d["mask_token_id"],
            d["conv_kernel_size"],
            d["conv_group_size"],
            d["selector_rank"],
            d["selector_top_k"],
        )


class BlockConv(nn.Module):
    """Grouped dynamic depthwise convolution along the rows of one block, before and after f."""

    def __init__(self, d: DraftShape) -> None:
        super().__init__()
        self.d = d
        self.base_kernel = nn.Parameter(torch.zeros(2, d.conv_kernel, d.hidden))
        self.kernel_projection = linear(d.hidden, 2 * d.conv_kernel * d.hidden // d.conv_group)

    def kernels(self, x: Tensor) -> Tensor:
        """[side, ..., r, tap, h] from the sublayer's input x [..., r, h]."""
        d = self.d
        c: Tensor = self.kernel_projection(x).unflatten(
            -1, (2, d.conv_kernel, d.hidden // d.conv_group)
        )
        c = c.repeat_interleave(d.conv_group, -1) + self.base_kernel.to(c.dtype)
        return c.movedim(-3, 0)

    def apply_side(self, kernel: Tensor, u: Tensor) -> Tensor:
        """Convolve u [..., r, h] with kernel [..., r, tap, h]; zero before the first row."""
        out = kernel[..., 0, :] * u
        for tap in range(1, self.d.conv_kernel):
            out = out + kernel[..., tap, :] * F.pad(u, (0, 0, tap, 0))[..., : u.shape[-2], :]
        return out


class DraftAttention(nn.Module):
    """Attention of block rows over context features and their own block, not causal."""

    def __init__(self, d: DraftShape) -> None:
        super().__init__()
        self.d = d
        self.q_proj = linear(d.hidden, d.heads * d.head_dim)
        self.k_proj = linear(d.hidden, d.kv_heads * d.head_dim)
        self.v_proj = linear(d.hidden, d.kv_heads * d.head_dim)
        self.o_proj = linear(d.heads * d.head_dim, d.hidden)
        self.q_norm = PlainNorm(d.head_dim, d.eps)
        self.k_norm = PlainNorm(d.head_dim, d.eps)

    def keys(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [b, heads, t, d] of rows x [b, t, h] at position [b, t] or [t]."""
        d = self.d
        k = self.k_norm(self.k_proj(x).unflatten(-1, (d.kv_heads, d.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (d.kv_heads, d.head_dim)).transpose(1, 2)
        k = rope(k, position[..., None, :], d.theta, 1.0)
        times = d.heads // d.kv_heads
        return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)

    def forward(self, u: Tensor, context: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """u [b, m, h], context [b, t, h], position [b, m], mask [b, 1, m, t + m]; m = n * r."""
        d = self.d
        q = self.q_norm(self.q_proj(u).unflatten(-1, (d.heads, d.head_dim))).transpose(1, 2)
        q = rope(q, position[:, None], d.theta, 1.0)
        ck, cv = self.keys(context, torch.arange(context.shape[1], device=u.device))
        bk, bv = self.keys(u, position)
        keys, values = torch.cat([ck, bk], 2), torch.cat([cv, bv], 2)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class DraftLayer(nn.Module):
    """One drafter layer: both sublayers are wrapped in block convolutions."""

    def __init__(self, d: DraftShape) -> None:
        super().__init__()
        self.d = d
        self.input_layernorm = PlainNorm(d.hidden, d.eps)
        self.post_attention_layernorm = PlainNorm(d.hidden, d.eps)
        self.self_attn = DraftAttention(d)
        self.mlp = Mlp(d.hidden, d.inter)
        self.attention_conv = BlockConv(d)
        self.mlp_conv = BlockConv(d)

    def forward(self, x: Tensor, context: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """x [b, n, r, h]."""
        b, n, r, _ = x.shape
        y = self.input_layernorm(x)
        before, after = self.attention_conv.kernels(y)
        u = self.attention_conv.apply_side(before, y)
        a = self.self_attn(u.flatten(1, 2), context, position, mask).view(b, n, r, -1)
        x = x + self.attention_conv.apply_side(after, a)
        y = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.kernels(y)
        m = self.mlp(self.mlp_conv.apply_side(before, y))
        return x + self.mlp_conv.apply_side(after, m)


class Selector(nn.Module):
    """Scores a candidate by its unary logit and a low-rank edge from its predecessor."""

    def __init__(self, d: DraftShape) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(d.vocab, d.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(d.vocab, d.rank))
        self.hidden_projection = linear(d.hidden, d.rank)

    def forward(self, hidden: Tensor, unary: Tensor, cand: Tensor, previous: Tensor) -> Tensor:
        """Scores [..., k]; hidden [..., h], unary and cand [..., k], previous [...]."""
        gate: Tensor = self.hidden_projection(hidden).float()
        left = F.embedding(previous, self.predecessor_codebook).float() * gate
        right = F.embedding(cand, self.successor_codebook).float()
        return unary + (right * left[..., None, :]).sum(-1)


class DFlash2(nn.Module):
    """The block drafter: features of the target's layers in, states of masked rows out."""

    def __init__(self, d: DraftShape) -> None:
        super().__init__()
        self.d = d
        self.fc = linear(len(d.taps) * d.hidden, d.hidden)
        self.hidden_norm = PlainNorm(d.hidden, d.eps)
        self.norm = PlainNorm(d.hidden, d.eps)
        self.layers = nn.ModuleList([DraftLayer(d) for _ in range(d.layers)])
        self.candidate_selector = Selector(d)

    def forward(self, embed: Tensor, ids: Tensor, taps: list[Tensor], anchors: Tensor) -> Tensor:
        """States [b, n, r, h] after the final norm for a block at each anchor.

        embed [v, h] the target's table, ids [b, t], taps [b, t, h] each, anchors [b, n].
        Row k of a block stands at position anchor + k and predicts the token there; row 0 holds
        the anchor's own token. Context rows are those before the anchor.
        """
        d = self.d
        b, n = anchors.shape
        t = ids.shape[1]
        context = self.hidden_norm(self.fc(torch.cat(taps, -1)))
        rows = torch.arange(d.block, device=ids.device)
        first = F.embedding(ids.gather(1, anchors), embed)
        mask_row = embed[d.mask_id].expand(b, n, d.block - 1, -1)
        x = torch.cat([first[:, :, None], mask_row], 2).to(context.dtype)
        position = (anchors[:, :, None] + rows).flatten(1)
        owner = anchors.repeat_interleave(d.block, 1)
        key = torch.arange(t, device=ids.device)
        seen = (key < owner[..., None]) & (key > position[..., None] - d.window)
        block = torch.arange(n * d.block, device=ids.device) // d.block
        own = (block[:, None] == block[None, :]).expand(b, -1, -1)
        mask = torch.cat([seen, own], -1)[:, None]
        for layer in self.layers:
            x = layer(x, context, position, mask)
        out: Tensor = self.norm(x)
        return out

    def initialise(self, seed: int) -> None:
        """Identity convolutions, selector without effect, the rest small and random."""
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name.endswith("base_kernel"):
                    p.zero_()
                    p[:, 0] = 1.0
                elif name.endswith(("kernel_projection.weight", "successor_codebook")):
                    p.zero_()
                elif p.dim() == 2:
                    p.copy_(torch.randn(p.shape, generator=g) * (p.shape[1] ** -0.5 * 0.5))


@torch.no_grad()
def selector_walk(
    draft: DFlash2, states: Tensor, head: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """(argmax, walk) drafts, each [b, n, block - 1]; states [b, n, block, h], first [b, n]."""
    rows = states[:, :, 1:]
    unary, cand = F.linear(rows.float(), head.float()).topk(draft.d.top_k, -1)
    previous = first
    walked: list[Tensor] = []
    for k in range(rows.shape[2]):
        score = draft.candidate_selector(rows[:, :, k], unary[:, :, k], cand[:, :, k], previous)
        previous = cand[:, :, k].gather(-1, score.argmax(-1, keepdim=True))[..., 0]
        walked.append(previous)
    return cand[..., 0], torch.stack(walked, -1)
