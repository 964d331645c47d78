"""The block drafters' layers, selector and head: what they hold and how they are loaded.

Axes: b requests, i block rows, h hidden, v vocabulary, r selector rank.
Does not cover the drafting pass (`dflash`). In: a `Taken` source. Out: modules.
Invariant: a drafter inherits nothing from its target but the embedding and, without a head of its
own, the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts.errors import TrimtabError
from artifacts.packing import is_packed
from artifacts.runtime.config import DrafterConfig
from artifacts.runtime.draft_head import DraftHead
from artifacts.runtime.layers import FullAttention, Mlp, Norm
from artifacts.runtime.linear import Linear
from artifacts.runtime.loading import Taken
from artifacts.runtime.selector import DynamicConv
from artifacts.runtime.target import Target


@dataclass
class DraftLayer:
    """One layer; the convolutions are DFlash2's. window: context tokens seen, the query counted."""

    input_norm: Norm
    attention: FullAttention
    post_norm: Norm
    mlp: Mlp
    attention_conv: DynamicConv | None
    mlp_conv: DynamicConv | None
    window: int | None
    causal: bool


@dataclass
class Selector:
    """DFlash2's candidate selector; its tables are indexed by target ids."""

    gate: Linear
    predecessor_vr: Tensor
    successor_vr: Tensor


def convolved(conv: DynamicConv | None, normed: Tensor) -> tuple[Tensor, Tensor | None]:
    """(the sublayer's input after side 0, side 1's coefficients); both come from `normed`."""
    if conv is None:
        return normed, None
    kernel = conv.coefficients(normed)
    return DynamicConv.apply(normed, kernel[0]), kernel[1]


def conv_after(y: Tensor, kernel: Tensor | None) -> Tensor:
    return y if kernel is None else DynamicConv.apply(y, kernel)


def seen_keys(
    positions_bi: Tensor, length_b: Tensor, low: int, limit: int, layer: DraftLayer
) -> tuple[Tensor, Tensor | None]:
    """What each block row sees: of the context [b, 1 or i, limit - low], of the block [.., i]."""
    at = torch.arange(low, limit, device=positions_bi.device)
    seen = at < length_b.view(-1, 1, 1)
    own: Tensor | None = None
    size = positions_bi.shape[1]
    row = torch.arange(size, device=positions_bi.device)
    if layer.window is not None:
        seen = seen & (at > positions_bi.unsqueeze(-1) - layer.window)
        if layer.window < size:
            own = (row > row.unsqueeze(1) - layer.window).unsqueeze(0)
    if layer.causal:
        before = (row <= row.unsqueeze(1)).unsqueeze(0)
        own = before if own is None else own & before
    return seen, own


def load_layer(taken: Taken, config: DrafterConfig, index: int) -> DraftLayer:
    p = f"layers.{index}"
    h, eps = config.hidden_size, config.eps
    convs: list[DynamicConv | None] = [None, None]
    if config.selector is not None:
        taps, group = config.selector.conv_kernel, config.selector.conv_group
        convs = [
            DynamicConv(
                taken.tensor(f"{p}.{name}.base_kernel", (2, taps, h), dtype=torch.float32),
                taken.linear(f"{p}.{name}.kernel_projection", 2 * taps * (h // group), h),
                group,
            )
            for name in ("attention_conv", "mlp_conv")
        ]
    return DraftLayer(
        Norm.load(taken, f"{p}.input_layernorm", h, eps, offset=False),
        FullAttention.load(taken, f"{p}.self_attn", config.attention, h),
        Norm.load(taken, f"{p}.post_attention_layernorm", h, eps, offset=False),
        Mlp.load(taken, f"{p}.mlp", h, config.intermediate_size),
        convs[0],
        convs[1],
        config.windows[index],
        config.causal[index],
    )


def load_head(taken: Taken, target: Target) -> DraftHead:
    """The drafter's own head and map if it has one, else the target's."""
    own = taken.has("lm_head.weight") or is_packed(taken.source, "lm_head")
    if taken.has("t2d"):
        taken.taken.add("t2d")  # the inverse of d2t, read only in training
    if not own:
        if taken.has("d2t"):
            raise TrimtabError("drafter: it holds a map d2t but no lm_head that it belongs to")
        return DraftHead.full(target)
    name = "lm_head.weight_shape" if is_packed(taken.source, "lm_head") else "lm_head.weight"
    rows = (
        int(taken.source.get(name)[0])
        if name.endswith("shape")
        else taken.source.info(name).shape[0]
    )
    linear = taken.linear("lm_head", rows, target.config.hidden_size)
    if not taken.has("d2t"):
        return DraftHead(linear, None, target.config.vocab_size)
    count = taken.source.info("d2t").shape[0]
    offsets = taken.tensor("d2t", (count,), dtype=torch.int64)
    ids = offsets + torch.arange(count, device=offsets.device)
    return DraftHead(linear, ids, target.config.vocab_size)


def load_selector(taken: Taken, config: DrafterConfig) -> Selector | None:
    if config.selector is None:
        return None
    rank, name = config.selector.rank, "candidate_selector"
    shape = (config.vocab_size, rank)
    return Selector(
        taken.linear(f"{name}.hidden_projection", rank, config.hidden_size),
        taken.tensor(f"{name}.predecessor_codebook", shape),
        taken.tensor(f"{name}.successor_codebook", shape),
    )
