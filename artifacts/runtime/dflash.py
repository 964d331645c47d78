"""The block drafters: DFlash (v1) and DFlash2.

Axes: b requests, t context tokens, i block rows, s = block - 1 draft positions, k candidates,
h hidden, m key/value heads, d head dimension, l layers.
One pass drafts a block: rows [anchor, mask, ...] at positions p.., keys are the context (one fused
feature per committed token before p, shared by all layers) and the block's own rows; row i >= 1
predicts the token at its own position p + i. Norms are plain, unlike the target's.
Does not cover sampling parameters beyond temperature, or the target's taps.
Source: vLLM 0.33 `qwen3_dflash.py`, `qwen3_dflash2.py`; z-lab/dflash. Invariant: context rows pass
k and v only (no input norm, no convolution, not observed) and never change once written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from artifacts.checkpoint import TensorSource
from artifacts.errors import TrimtabError
from artifacts.runtime.config import DrafterConfig
from artifacts.runtime.dflash_parts import (
    DraftLayer,
    Selector,
    conv_after,
    convolved,
    load_head,
    load_layer,
    load_selector,
    seen_keys,
)
from artifacts.runtime.draft_head import DraftHead, DraftIds
from artifacts.runtime.layers import Norm
from artifacts.runtime.linear import Linear
from artifacts.runtime.loading import Taken
from artifacts.runtime.ops import Rope, two_part_attention
from artifacts.runtime.proposal import Draft
from artifacts.runtime.selector import independent_rows, selector_walk
from artifacts.runtime.state import KvCache, place
from artifacts.runtime.target import Target


class ContextKV:
    """Keys and values of the committed tokens, one cache per layer, and each row's length."""

    def __init__(self, layers: list[KvCache], lengths: list[int]) -> None:
        self.layers = layers
        self.lengths = lengths

    def truncate(self, length_b: Sequence[int] | Tensor) -> None:
        """Forget tokens at and beyond length_b."""
        lengths = [int(n) for n in length_b]
        if any(n > now for n, now in zip(lengths, self.lengths, strict=True)):
            raise ValueError(f"cannot truncate {self.lengths} to {lengths}")
        self.lengths = lengths

    def select(self, rows: Sequence[int] | Tensor) -> ContextKV:
        """The given batch rows, in that order, as a context of its own (copied)."""
        index = torch.tensor([int(r) for r in rows], device=self.layers[0].key_bmsd.device)
        lengths = [self.lengths[int(r)] for r in rows]
        return ContextKV([layer.rows(index) for layer in self.layers], lengths)


class Drafter:
    """A loaded drafter bound to its target's embedding and, unless it has its own, its head."""

    def __init__(
        self,
        config: DrafterConfig,
        target: Target,
        fc: Linear,
        hidden_norm: Norm,
        layers: list[DraftLayer],
        norm: Norm,
        head: DraftHead,
        selector: Selector | None,
    ) -> None:
        self.config = config
        self.target = target
        self.fc = fc
        self.hidden_norm = hidden_norm
        self.layers = layers
        self.norm = norm
        self.head = head
        self.selector = selector
        a = config.attention
        self.rope = Rope(a.rotary_dim, a.rope_theta, target.device)
        start = a.heads * a.head_dim
        self._context_weight = torch.cat([x.attention.qkv.weight[start:] for x in layers])

    @classmethod
    def load(cls, source: TensorSource, target: Target) -> Drafter:
        """Build a drafter from all tensors of `source`, packed or dense per matrix.

        A drafter with an lm_head of its own keeps it, with `d2t` as its map (target id = row +
        d2t[row]); one without uses the target's.
        Raises: TrimtabError for a config that does not fit the target (missing or wrong tap ids,
        mask id, widths), a missing or unread tensor, a wrong shape, an own head without a map.
        """
        config = DrafterConfig.from_dict(source.config, target=target.config)
        taken = Taken(source, "drafter", dtype=target.dtype, device=target.device)
        h, eps = config.hidden_size, config.eps
        fc = taken.linear("fc", h, len(config.tap_ids) * h)
        hidden_norm = Norm.load(taken, "hidden_norm", h, eps, offset=False)
        layers = [load_layer(taken, config, i) for i in range(config.num_layers)]
        norm = Norm.load(taken, "norm", h, eps, offset=False)
        head = load_head(taken, target)
        selector = load_selector(taken, config)
        taken.finish()
        return cls(config, target, fc, hidden_norm, layers, norm, head, selector)

    @property
    def block_size(self) -> int:
        """Rows of a block, the anchor included."""
        return self.config.block_size

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """The target layers whose outputs it reads, ascending."""
        return self.config.tap_ids

    def linears(self) -> list[Linear]:
        """Its matrices, for `observe`; a shared head is not among them."""
        out = [self.fc]
        for layer in self.layers:
            out += [*layer.attention.linears(), *layer.mlp.linears()]
            out += [c.projection for c in (layer.attention_conv, layer.mlp_conv) if c]
        return out + ([self.selector.gate] if self.selector else [])

    @torch.no_grad()
    def fuse(self, taps: Tensor, *, observe: bool | Tensor = True) -> Tensor:
        """One context feature per token, [..., h] from the concatenated taps [..., taps * h]."""
        return self.hidden_norm(self.fc(taps.to(self.target.dtype), observe=observe))

    def new_context(self, batch: int, capacity: int) -> ContextKV:
        """An empty context for `batch` rows of up to `capacity` tokens."""
        a = self.config.attention
        layers = [
            KvCache.empty(
                batch,
                a.kv_heads,
                capacity,
                a.head_dim,
                dtype=self.target.dtype,
                device=self.target.device,
            )
            for _ in self.layers
        ]
        return ContextKV(layers, [0] * batch)

    @torch.no_grad()
    def extend(
        self, context: ContextKV, c_bth: Tensor, lengths_b: Sequence[int] | Tensor | None = None
    ) -> None:
        """Append the features of t more tokens to each row; lengths_b: valid ones of each row."""
        b, t, _ = c_bth.shape
        counts = [t] * b if lengths_b is None else [int(n) for n in lengths_b]
        where = place(context.lengths, t, counts=None, device=self.target.device)
        cos, sin = self.rope.at(where.positions_bt, below=where.limit)
        a = self.config.attention
        both = torch.nn.functional.linear(c_bth, self._context_weight)
        both = both.view(b, t, len(self.layers), 2, a.kv_heads, a.head_dim)
        for i, (layer, cache) in enumerate(zip(self.layers, context.layers, strict=True)):
            key = layer.attention.keys(both[:, :, i, 0], self.rope, cos, sin)
            cache.append(key, both[:, :, i, 1].transpose(1, 2), where)
        context.lengths = [n + m for n, m in zip(context.lengths, counts, strict=True)]

    def context(self, c_bth: Tensor, lengths_b: Sequence[int] | Tensor | None = None) -> ContextKV:
        """The context of whole sequences from position 0, for replay."""
        context = self.new_context(c_bth.shape[0], c_bth.shape[1])
        self.extend(context, c_bth, lengths_b)
        return context

    @torch.no_grad()
    def block(
        self,
        anchor_b: Tensor,
        position_b: Sequence[int] | Tensor,
        context: ContextKV,
        context_len_b: Sequence[int] | Tensor | None = None,
        *,
        rows: Tensor | None = None,
    ) -> Tensor:
        """One drafting pass: final-norm hidden [b, s, h] of the mask rows.

        Args:
            anchor_b: int64, the last committed token of each request.
            position_b: its position p.
            context: holds the tokens before p (more is allowed, it is not looked at).
            context_len_b: how many context tokens are seen, by default p.
            rows: int64 [b], the context row of each request (default: row = request); several
                requests may share one.
        """
        size, device = self.block_size, self.target.device
        anchor_b = anchor_b.to(device)
        position = torch.as_tensor(position_b, dtype=torch.int64, device=device)
        length = (
            position
            if context_len_b is None
            else torch.as_tensor(context_len_b, dtype=torch.int64, device=device)
        )
        ids = torch.full((anchor_b.shape[0], size), self.config.mask_id, device=device)
        ids[:, 0] = anchor_b
        positions = position.unsqueeze(1) + torch.arange(size, device=device)
        cos, sin = self.rope.at(positions, below=int(position.max()) + size)
        limit = int(length.max())
        x = self.target.embedding(ids)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        for layer, cache in zip(self.layers, context.layers, strict=True):
            x = self._layer(layer, x, (cos, sin), positions, cache, length, limit, rows)
        return self.norm(x[:, 1:])

    def _layer(
        self,
        layer: DraftLayer,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        positions_bi: Tensor,
        cache: KvCache,
        length_b: Tensor,
        limit: int,
        rows: Tensor | None,
    ) -> Tensor:
        normed = layer.input_norm(x)
        u, after = convolved(layer.attention_conv, normed)
        q, k, v, _ = layer.attention.project(u, self.rope, *rotary)
        low = 0
        if layer.window is not None:
            low = min(max(0, int(positions_bi[:, 0].min()) - layer.window + 1), limit)
        key, value = cache.key_bmsd[:, :, low:limit], cache.value_bmsd[:, :, low:limit]
        if rows is not None:
            key, value = key[rows], value[rows]
        seen, own = seen_keys(positions_bi, length_b, low, limit, layer)
        mixed = two_part_attention(q, (key, value, seen), (k, v, own))
        x = x + conv_after(layer.attention.finish(mixed, None), after)
        normed = layer.post_norm(x)
        u, after = convolved(layer.mlp_conv, normed)
        return x + conv_after(layer.mlp(u), after)

    def candidates(
        self, hidden_bsh: Tensor, allowed_v: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(target ids [b, s, K], unary scores fp32) of the K best raw logits, best first.

        allowed_v: bool over target ids; the others are never candidates while K allowed ones exist.
        """
        if self.selector is None or self.config.selector is None:
            raise TrimtabError(f"{self.config.architecture} has no candidate selector")
        logits = self.head.allowed(self.head.logits(hidden_bsh), allowed_v)
        values, ids = logits.topk(self.config.selector.top_k, dim=-1)
        unary = values * self.config.output_multiplier
        if self.config.softcap:
            unary = torch.tanh(unary / self.config.softcap) * self.config.softcap
        unary = unary.masked_fill(values == float("-inf"), float("-inf"))
        return self.head.target_ids(DraftIds(ids)), unary

    @torch.no_grad()
    def walk(
        self,
        anchor_b: Tensor,
        hidden_bsh: Tensor,
        temperature: float = 0.0,
        uniforms: Tensor | None = None,
        allowed_ids: Tensor | None = None,
    ) -> Draft:
        """Tokens and q from a block's hidden rows: the selector's walk, or v1's independent rows.

        uniforms: float64 [b, s] in [0, 1), only read when temperature > 0.
        allowed_ids: bool [v]; ids that may be drafted (mask id and padding left out).
        """
        if self.selector is None:
            logits = self.head.allowed(self.head.logits(hidden_bsh), allowed_ids)
            return independent_rows(
                logits, self.head.all_ids(), temperature=temperature, uniforms_bs=uniforms
            )
        ids, unary = self.candidates(hidden_bsh, allowed_ids)
        return selector_walk(
            anchor_b.to(self.target.device),
            ids,
            unary,
            self.selector.gate(hidden_bsh),
            self.selector.predecessor_vr,
            self.selector.successor_vr,
            temperature=temperature,
            uniforms_bs=uniforms,
        )
