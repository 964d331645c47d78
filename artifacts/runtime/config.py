"""What the runtime reads from a config.json: the target's and the drafter's shape.

Does: turns a config (nested `qwen3_5`, flat `qwen3_5_text`, dense `qwen3` or `llama`; drafters
`DFlashDraftModel`, `DFlash2DraftModel`) into a frozen dataclass, and refuses what the forward
passes do not compute. Does not read weights and guesses nothing from paths.

Input: the parsed JSON. Output: `TargetConfig`, `DrafterConfig`. Invariant: a config that is
accepted is computed exactly; a field that would change the result and is not implemented raises.
Sources of the field meanings: transformers 5.17 `models/qwen3_5`, vLLM 0.32 `qwen3_dflash2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from artifacts.errors import TrimtabError
from artifacts.runtime.config_fields import (
    AttentionConfig,
    LinearAttentionConfig,
    attention_shape,
    integer,
    layer_types_of,
    linear_attention_shape,
    optional_float,
    refuse,
)

_HYBRID = ("qwen3_5", "qwen3_5_text")
_DENSE = ("qwen3", "llama")
_V1, _V2 = "DFlashDraftModel", "DFlash2DraftModel"


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A target's shape. `layer_types` holds `full_attention` or `linear_attention` per layer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    eps: float
    offset_norm: bool
    attention: AttentionConfig
    linear_attention: LinearAttentionConfig | None
    mtp_layers: int
    max_positions: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> TargetConfig:
        """Read a target's config.json.

        Raises: TrimtabError for an unknown model type, a missing field, or a variant that the
        forward pass does not compute (mixture of experts, scaled rope, biases, other activations).
        """
        kind = str(config.get("model_type", ""))
        if kind not in _HYBRID + _DENSE:
            raise TrimtabError(
                f"config.json: model_type {kind!r} is not supported by the runtime",
                hint=f"supported are {', '.join(_HYBRID + _DENSE)}",
            )
        text = config["text_config"] if kind == "qwen3_5" else config
        if not isinstance(text, Mapping):
            raise TrimtabError("config.json: text_config is not an object")
        hybrid = kind in _HYBRID
        refuse(text, "hidden_act", ("silu", "swish"), "silu")
        refuse(text, "attention_bias", (False,), False)
        refuse(text, "mlp_bias", (False,), False)
        refuse(text, "use_sliding_window", (False,), False)
        refuse(text, "mtp_use_dedicated_embeddings", (False,), False)
        layers = integer(text, "num_hidden_layers")
        linear = linear_attention_shape(text) if hybrid else None
        return cls(
            model_type=kind,
            vocab_size=integer(text, "vocab_size"),
            hidden_size=integer(text, "hidden_size"),
            intermediate_size=integer(text, "intermediate_size"),
            num_layers=layers,
            layer_types=layer_types_of(text, layers, hybrid=hybrid),
            eps=float(text.get("rms_norm_eps", 1e-6)),
            offset_norm=hybrid,
            attention=attention_shape(
                text,
                qk_norm=kind != "llama",
                offset_norm=hybrid,
                output_gate=hybrid and bool(text.get("attn_output_gate", True)),
                partial=0.25 if hybrid else 1.0,
            ),
            linear_attention=linear,
            mtp_layers=int(text.get("mtp_num_hidden_layers", 0) or 0),
            max_positions=int(text.get("max_position_embeddings", 0) or 0),
        )


@dataclass(frozen=True, kw_only=True)
class SelectorConfig:
    """DFlash2's additions: dynamic convolution and candidate selector."""

    conv_kernel: int
    conv_group: int
    rank: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A DFlash (v1, `selector` None) or DFlash2 drafter's shape.

    `tap_ids` are ascending 0-based target layers: id L means the residual stream after layer L,
    that is `hidden_states[L + 1]` of transformers. `windows` holds each layer's sliding window in
    tokens, counted with the query itself (None: all context); `causal` whether a block's rows see
    only rows before them, by layer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    block_size: int
    tap_ids: tuple[int, ...]
    mask_id: int
    eps: float
    attention: AttentionConfig
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    selector: SelectorConfig | None
    output_multiplier: float
    softcap: float | None
    embedding_scale: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, target: TargetConfig) -> DrafterConfig:
        """Read a drafter's config.json for use with `target`.

        Raises: TrimtabError for a missing `target_layer_ids` or `mask_token_id` (there is no
        default for either), ids outside the target's layers, unsorted or repeated ids, a mask id
        outside the vocabulary, or shapes that do not fit the target.
        """
        name = _architecture_of(config)
        inner = config.get("dflash_config") or {}
        refuse(config, "hidden_act", ("silu", "swish"), "silu")
        refuse(config, "attention_bias", (False,), False)
        refuse(inner, "sample_from_anchor", (False,), False)
        refuse(inner, "use_aux_hidden_state", (True,), True)
        refuse(inner, "attention_sink_bias", (False, None), None)
        refuse(inner, "attention_value_scale", (None, 1.0), None)
        taps = _tap_ids_of(inner, target)
        vocab = integer(config, "vocab_size")
        hidden = integer(config, "hidden_size")
        if (hidden, vocab) != (target.hidden_size, target.vocab_size):
            raise TrimtabError(
                f"drafter config: hidden_size {hidden} and vocab_size {vocab} do not fit the "
                f"target's {target.hidden_size} and {target.vocab_size}"
            )
        layers = integer(config, "num_hidden_layers")
        windows, causal = _drafter_layers(config, inner, layers)
        return cls(
            architecture=name,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=integer(config, "intermediate_size"),
            num_layers=layers,
            block_size=_block_size_of(config, inner),
            tap_ids=taps,
            mask_id=_mask_id_of(config, inner, vocab),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            attention=attention_shape(
                config, qk_norm=True, offset_norm=False, output_gate=False, partial=1.0
            ),
            windows=windows,
            causal=causal,
            selector=_selector_shape(inner, hidden) if name == _V2 else None,
            output_multiplier=float(inner.get("output_multiplier", 1.0)),
            softcap=optional_float(inner.get("final_logit_softcapping")),
            embedding_scale=float(inner.get("input_embedding_scale", 1.0)),
        )


def _architecture_of(config: Mapping[str, Any]) -> str:
    names = list(config.get("architectures") or [])
    if len(names) != 1 or names[0] not in (_V1, _V2):
        raise TrimtabError(
            f"drafter config: architectures {names!r} is neither [{_V1}] nor [{_V2}]"
        )
    return str(names[0])


def _tap_ids_of(inner: Mapping[str, Any], target: TargetConfig) -> tuple[int, ...]:
    ids = inner.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise TrimtabError(
            f"drafter config: dflash_config.target_layer_ids is {ids!r}; "
            "the runtime has no default",
            hint="take the list from the drafter's original config.json (0-based layer outputs)",
        )
    wrong = [i for i in ids if not 0 <= i < target.num_layers]
    if wrong:
        raise TrimtabError(
            f"drafter config: target_layer_ids {wrong} outside the target's layers "
            f"0..{target.num_layers - 1} (id L is the output of layer L)"
        )
    if ids != sorted(set(ids)):
        raise TrimtabError(
            f"drafter config: target_layer_ids {ids} must be ascending and distinct: readers "
            "disagree about the order of fc's inputs otherwise"
        )
    return tuple(ids)


def _mask_id_of(config: Mapping[str, Any], inner: Mapping[str, Any], vocab: int) -> int:
    value = inner.get("mask_token_id", config.get("mask_token_id"))
    if type(value) is not int or not 0 <= value < vocab:
        raise TrimtabError(
            f"drafter config: mask_token_id is {value!r}, it must be an id below {vocab}"
        )
    return value


def _block_size_of(config: Mapping[str, Any], inner: Mapping[str, Any]) -> int:
    found = {int(c["block_size"]) for c in (config, inner) if c.get("block_size") is not None}
    if len(found) != 1 or min(found) < 2:
        raise TrimtabError(
            f"drafter config: block_size must be one number of 2 or more, found {sorted(found)}"
        )
    return found.pop()


def _drafter_layers(
    config: Mapping[str, Any], inner: Mapping[str, Any], layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality by layer; the default rule is vLLM's: sliding layers are causal."""
    use = bool(config.get("use_sliding_window", config.get("sliding_window") is not None))
    window = config.get("sliding_window")
    if inner.get("use_swa"):
        use, window = True, inner.get("swa_window_size", window)
    default = ["sliding_attention" if use and inner.get("use_swa") else "full_attention"] * layers
    types = list(config.get("layer_types") or default)
    if len(types) != layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise TrimtabError(f"drafter config: layer_types {types!r} for {layers} layers")
    sliding = [t == "sliding_attention" for t in types]
    if any(sliding) and (type(window) is not int or window < 1):
        raise TrimtabError(f"drafter config: sliding_window is {window!r} with sliding layers")
    causal = config.get("is_causal", inner.get("causal"))
    return (
        tuple(window if s else None for s in sliding),
        tuple(s if causal is None else bool(causal) for s in sliding),
    )


def _selector_shape(inner: Mapping[str, Any], hidden: int) -> SelectorConfig:
    result = SelectorConfig(
        conv_kernel=integer(inner, "conv_kernel_size"),
        conv_group=integer(inner, "conv_group_size"),
        rank=integer(inner, "selector_rank"),
        top_k=integer(inner, "selector_top_k"),
    )
    if hidden % result.conv_group:
        raise TrimtabError(
            f"drafter config: conv_group_size {result.conv_group} does not divide {hidden}"
        )
    return result
