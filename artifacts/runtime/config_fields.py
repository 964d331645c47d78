"""Reading single fields of a config.json for the runtime: strict, with errors that name the field.

Covers positive integers, refused variants, rope, and the attention shapes that target
and drafters share. Does not cover whole configs (`config`). In: the parsed JSON. Out: values and
shape dataclasses. Invariant: nothing is defaulted that would change what the model computes, except
where transformers' own config class has that default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from artifacts.errors import TrimtabError


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """One full-attention layer's shape; `rotary_dim` of each head's `head_dim` are rotated."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    eps: float
    qk_norm: bool
    offset_norm: bool
    output_gate: bool


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """One gated DeltaNet layer's shape; `gate_activation` is applied to z in the gated norm."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    gate_activation: str

    @property
    def channels(self) -> int:
        """Rows of in_proj_qkv, channels of the convolution: q, then k, then v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TrimtabError(f"config.json: {key} is {value!r}, it must be a positive integer")
    return value


def optional_float(value: Any) -> float | None:
    return float(value) if value else None


def refuse(config: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any) -> None:
    value = config.get(key, default)
    if value not in allowed:
        raise TrimtabError(
            f"config.json: {key} = {value!r} is not computed by the runtime; "
            f"allowed: {', '.join(repr(a) for a in allowed)}"
        )


def _rope(config: Mapping[str, Any], head_dim: int, partial: float) -> tuple[float, int]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", None):
        raise TrimtabError(
            f"config.json: rope_type {kind!r} is not computed by the runtime, only 'default'"
        )
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise TrimtabError("config.json: rope_theta is missing")
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", partial))
    rotary = int(head_dim * float(factor))
    if rotary < 2 or rotary % 2 or rotary > head_dim:
        raise TrimtabError(f"config.json: partial_rotary_factor {factor} gives {rotary} dimensions")
    return float(theta), rotary


def attention_shape(
    config: Mapping[str, Any],
    *,
    qk_norm: bool,
    offset_norm: bool,
    output_gate: bool,
    partial: float,
) -> AttentionConfig:
    heads = integer(config, "num_attention_heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or integer(config, "hidden_size") // heads)
    if heads % kv_heads:
        raise TrimtabError(f"config.json: {heads} attention heads over {kv_heads} key/value heads")
    theta, rotary = _rope(config, head_dim, partial)
    return AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary,
        rope_theta=theta,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        qk_norm=qk_norm,
        offset_norm=offset_norm,
        output_gate=output_gate,
    )


def linear_attention_shape(config: Mapping[str, Any]) -> LinearAttentionConfig:
    gate = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
    name = str(config.get("output_gate_type", "swish"))
    if name not in gate:
        raise TrimtabError(f"config.json: output_gate_type {name!r} is neither swish nor sigmoid")
    result = LinearAttentionConfig(
        key_heads=integer(config, "linear_num_key_heads"),
        value_heads=integer(config, "linear_num_value_heads"),
        key_dim=integer(config, "linear_key_head_dim"),
        value_dim=integer(config, "linear_value_head_dim"),
        conv_kernel=integer(config, "linear_conv_kernel_dim"),
        gate_activation=gate[name],
    )
    if result.value_heads % result.key_heads:
        raise TrimtabError(
            f"config.json: {result.value_heads} linear value heads "
            f"over {result.key_heads} key heads"
        )
    return result


def layer_types_of(config: Mapping[str, Any], layers: int, *, hybrid: bool) -> tuple[str, ...]:
    types = config.get("layer_types")
    if types is None and hybrid:
        every = int(config.get("full_attention_interval", 4))
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    types = tuple(types or ["full_attention"] * layers)
    allowed = {"full_attention"} | ({"linear_attention"} if hybrid else set())
    if len(types) != layers or not set(types) <= allowed:
        raise TrimtabError(
            f"config.json: layer_types {types!r} must name {layers} layers from {sorted(allowed)}"
        )
    return types
