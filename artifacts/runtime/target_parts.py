"""Building the target's blocks and head from a checkpoint's tensors.

Covers the prefix of the body, the check of quantization_config against the tensors, one block, the
head or its tie. Does not cover the forward pass (`target`). In: a `Taken` source. Out: modules.
Invariant: what the config declares, what the shards hold and what is built are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from artifacts.checkpoint import TensorSource
from artifacts.errors import TrimtabError
from artifacts.names import head_module, linear_modules
from artifacts.packing import is_packed
from artifacts.quant_lookup import quantization_config, scheme_for
from artifacts.runtime.config import TargetConfig
from artifacts.runtime.layers import FullAttention, LinearAttention, Mlp, Norm
from artifacts.runtime.linear import Embedding, Linear
from artifacts.runtime.loading import Taken


@dataclass
class Block:
    """One decoder layer: x += mixer(input_norm(x)); x += mlp(post_norm(x))."""

    input_norm: Norm
    mixer: FullAttention | LinearAttention
    post_norm: Norm
    mlp: Mlp


def body_prefix(source: TensorSource) -> str:
    """`model.language_model.` or `model.`, by where the embedding lies."""
    found = [
        p
        for p in ("model.", "model.language_model.")
        if f"{p}embed_tokens.weight" in source or f"{p}embed_tokens.weight_packed" in source
    ]
    if len(found) != 1:
        raise TrimtabError(
            "target: expected one of model.embed_tokens and model.language_model.embed_tokens, "
            f"found {len(found)}"
        )
    return found[0]


def check_declared(source: TensorSource) -> None:
    """Raises: TrimtabError when quantization_config and the tensors of the body disagree."""
    if quantization_config(source.config) is None:
        return
    wrong = [
        module
        for module in linear_modules(source)
        if not module.startswith(("mtp.", "model.visual."))
        and (scheme_for(source.config, module) is not None) != is_packed(source, module)
    ]
    if wrong:
        raise TrimtabError(
            f"target: quantization_config and the tensors disagree about {', '.join(wrong[:4])}"
            f"{f' and {len(wrong) - 4} more' if len(wrong) > 4 else ''}",
            hint="list what is not packed in `ignore`, under the names of the checkpoint",
        )


def load_block(taken: Taken, name: str, config: TargetConfig, index: int) -> Block:
    h, offset = config.hidden_size, config.offset_norm
    mixer: FullAttention | LinearAttention
    if config.layer_types[index] == "full_attention":
        mixer = FullAttention.load(taken, f"{name}.self_attn", config.attention, h)
    else:
        assert config.linear_attention is not None
        mixer = LinearAttention.load(
            taken, f"{name}.linear_attn", config.linear_attention, h, config.eps
        )
    return Block(
        Norm.load(taken, f"{name}.input_layernorm", h, config.eps, offset=offset),
        mixer,
        Norm.load(taken, f"{name}.post_attention_layernorm", h, config.eps, offset=offset),
        Mlp.load(taken, f"{name}.mlp", h, config.intermediate_size),
    )


def load_head(taken: Taken, config: TargetConfig, embedding: Embedding) -> Linear:
    """lm_head, or the embedding's table when flag and tensors say that they are tied."""
    if head_module(taken.source) == "lm_head":
        return taken.linear("lm_head", config.vocab_size, config.hidden_size)
    return Linear("lm_head", embedding.dense())
