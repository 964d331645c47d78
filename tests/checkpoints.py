"""Small checkpoints for the tests, built in seconds from a fixed seed.

`tiny` writes TINY (and TINY-TIED, TINY-VL by arguments), `tiny_moe` TINY-MOE, `dense` a small
Qwen3 or Llama, `draft` DRAFT (DFlash2, or v1). Shapes and names are those of the real layouts. The
weights are random but sane: each sublayer adds about half of the residual's size, logits have a
standard deviation near 3, gated DeltaNet decays are slow enough for its state to matter.

It does not use the project's own reading and writing code, so that tests of that code have an
independent source. Invariant: same arguments, same bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

TOKENIZER_LENGTH = 500
MASK_ID = 499
EOS_ID = 498
SPECIAL_TOKENS = {
    490: "<tool_call>",
    491: "</tool_call>",
    492: "<|reserved_0|>",
    493: "<think>",
    494: "</think>",
    495: "<|endoftext|>",
    496: "<|im_start|>",
    497: "<|reserved_1|>",
    498: "<|im_end|>",
    499: "<|mask|>",
}
NOT_SPECIAL = {"<think>", "</think>", "<tool_call>", "</tool_call>"}

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}
{{- '<think>\\n' }}
{%- endif %}
{%- endif %}
"""

GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.95,
    "eos_token_id": [EOS_ID, 495],
    "pad_token_id": 495,
}

_TOKENIZER_TEXT = """\
A small vessel lay in the harbour while the crew was writing down what the weather had been. The
captain asked for the rudder, the tab and the lines to be checked before the wind turned again.
Nobody wanted to wait until the morning, so they began at once and worked through the night: first
the sails, then the ropes, and in the end the engine, which had been repaired twice in one year.
When the function returns, the result is a list of numbers and the name of the file that was read.
def read(path): with open(path) as stream: return [line.strip() for line in stream if line.strip()]
The answer is not always the same; it depends on the question, on the model and on the temperature.
"""


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """TINY's flat `qwen3_5_text` config; `overrides` replace or add fields."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "mamba_ssm_dtype": "float32",
        "dtype": "bfloat16",
        "eos_token_id": EOS_ID,
        "pad_token_id": 495,
    }
    config.update(overrides)
    interval = config["full_attention_interval"]
    config.setdefault(
        "layer_types",
        [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention"
            for i in range(config["num_hidden_layers"])
        ],
    )
    return config


class _Draw:
    """Seeded bf16 matrices: `scale` is the output's standard deviation for unit inputs."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        x = torch.randn(*shape, generator=self.generator) * std + mean
        return x.to(torch.bfloat16)

    def matrix(self, n: int, k: int, scale: float = 1.0) -> torch.Tensor:
        return self.normal(n, k, std=scale / math.sqrt(k))

    def uniform(self, *shape: int, low: float, high: float) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator) * (high - low) + low


def _attention(draw: _Draw, config: dict[str, Any], prefix: str, *, offset: bool) -> Tensors:
    h, hd = config["hidden_size"], config["head_dim"]
    nh, nkv = config["num_attention_heads"], config["num_key_value_heads"]
    mean = 0.0 if offset else 1.0
    gated = offset
    return {
        f"{prefix}.q_proj.weight": draw.matrix(nh * hd * (2 if gated else 1), h),
        f"{prefix}.k_proj.weight": draw.matrix(nkv * hd, h),
        f"{prefix}.v_proj.weight": draw.matrix(nkv * hd, h),
        f"{prefix}.o_proj.weight": draw.matrix(h, nh * hd, 0.8),
        f"{prefix}.q_norm.weight": draw.normal(hd, std=0.2, mean=mean + 0.3),
        f"{prefix}.k_norm.weight": draw.normal(hd, std=0.2, mean=mean + 0.3),
    }


def _mlp(draw: _Draw, h: int, intermediate: int, prefix: str) -> Tensors:
    return {
        f"{prefix}.gate_proj.weight": draw.matrix(intermediate, h),
        f"{prefix}.up_proj.weight": draw.matrix(intermediate, h),
        f"{prefix}.down_proj.weight": draw.matrix(h, intermediate, 1.0),
    }


def _linear_attention(draw: _Draw, config: dict[str, Any], prefix: str) -> Tensors:
    h = config["hidden_size"]
    nv = config["linear_num_value_heads"]
    kd = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    vd = nv * config["linear_value_head_dim"]
    channels = 2 * kd + vd
    return {
        f"{prefix}.in_proj_qkv.weight": draw.matrix(channels, h),
        f"{prefix}.in_proj_z.weight": draw.matrix(vd, h),
        f"{prefix}.in_proj_b.weight": draw.matrix(nv, h),
        f"{prefix}.in_proj_a.weight": draw.matrix(nv, h),
        f"{prefix}.conv1d.weight": draw.normal(
            channels, 1, config["linear_conv_kernel_dim"], std=0.6
        ),
        f"{prefix}.A_log": draw.uniform(nv, low=0.02, high=0.8).log().to(torch.bfloat16),
        f"{prefix}.dt_bias": draw.normal(nv, std=0.5),
        f"{prefix}.norm.weight": draw.normal(config["linear_value_head_dim"], std=0.1, mean=1.0),
        f"{prefix}.out_proj.weight": draw.matrix(h, vd, 0.8),
    }


def _norms(draw: _Draw, h: int, prefix: str, *, mean: float) -> Tensors:
    names = ("input_layernorm", "post_attention_layernorm")
    return {f"{prefix}.{n}.weight": draw.normal(h, std=0.1, mean=mean) for n in names}


def tiny_tensors(config: dict[str, Any], *, seed: int = 0, mtp: bool = True) -> Tensors:
    """All tensors of a flat qwen3_5_text checkpoint with `config`'s shapes, bf16."""
    draw = _Draw(seed)
    h, v = config["hidden_size"], config["vocab_size"]
    out: Tensors = {"model.embed_tokens.weight": draw.normal(v, h, std=1.0)}
    for i, kind in enumerate(config["layer_types"]):
        p = f"model.layers.{i}"
        out |= _norms(draw, h, p, mean=0.0)
        if kind == "full_attention":
            out |= _attention(draw, config, f"{p}.self_attn", offset=True)
        else:
            out |= _linear_attention(draw, config, f"{p}.linear_attn")
        out |= _mlp(draw, h, config["intermediate_size"], f"{p}.mlp")
    out["model.norm.weight"] = draw.normal(h, std=0.1)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = draw.matrix(v, h, 3.0)
    if mtp:
        out["mtp.fc.weight"] = draw.matrix(h, 2 * h)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            out[f"mtp.{name}.weight"] = draw.normal(h, std=0.1)
        p = "mtp.layers.0"
        out |= _norms(draw, h, p, mean=0.0)
        out |= _attention(draw, config, f"{p}.self_attn", offset=True)
        out |= _mlp(draw, h, config["intermediate_size"], f"{p}.mlp")
    return out


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: Tensors, *, shards: int
) -> None:
    """config.json, shards and index; `mtp.*` in a shard of its own; one plain file for shards=1."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    body = [n for n in tensors if not n.startswith("mtp.")]
    extra = [n for n in tensors if n.startswith("mtp.")]
    if shards == 1 and not extra:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    size = math.ceil(len(body) / shards)
    groups = [body[i : i + size] for i in range(0, len(body), size)]
    files = {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups)}
    if extra:
        files["model-mtp.safetensors"] = extra
    for file, names in files.items():
        save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "pt"})
    write_json(
        folder / "model.safetensors.index.json",
        {
            "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
            "weight_map": {n: f for f, names in sorted(files.items()) for n in names},
        },
    )


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of 500 ids: tokenizer.json, its config and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(SPECIAL_TOKENS),
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TOKENIZER_TEXT.splitlines(), trainer)
    tokenizer.add_tokens(
        [
            AddedToken(text, special=text not in NOT_SPECIAL, normalized=False)
            for _, text in sorted(SPECIAL_TOKENS.items())
        ]
    )
    if tokenizer.get_vocab_size() != TOKENIZER_LENGTH:
        raise AssertionError(f"tokenizer has {tokenizer.get_vocab_size()} ids")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "bos_token": None,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_extras(folder: Path) -> None:
    write_tokenizer(folder)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)


def _visual(draw: _Draw) -> Tensors:
    return {
        "model.visual.patch_embed.proj.weight": draw.normal(32, 3, 2, 4, 4, std=0.1),
        "model.visual.merger.linear_fc1.weight": draw.matrix(64, 32),
        "model.visual.merger.linear_fc1.bias": draw.normal(64, std=0.02),
    }


def tiny(
    folder: Path,
    *,
    tied: bool = False,
    vl: bool = False,
    mtp: bool = True,
    shards: int = 2,
    seed: int = 0,
    tensors: Tensors | None = None,
    **overrides: Any,
) -> Path:
    """TINY in `folder`; TINY-TIED with `tied`, TINY-VL with `vl`; `overrides` change the config.

    `tensors`, in the flat names, replace the drawn ones of the same name (hand-wired weights).
    """
    config = tiny_config(tie_word_embeddings=tied, **overrides)
    drawn = tiny_tensors(config, seed=seed, mtp=mtp) | (tensors or {})
    if vl:
        head = "model."
        drawn = {
            (f"model.language_model.{n[len(head) :]}" if n.startswith(head) else n): t
            for n, t in drawn.items()
        } | _visual(_Draw(seed + 1))
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": {k: v for k, v in config.items() if k != "architectures"},
            "vision_config": {"model_type": "qwen3_5", "depth": 0, "hidden_size": 32},
            "tie_word_embeddings": tied,
            "image_token_id": 492,
            "video_token_id": 497,
        }
    write_checkpoint(folder, config, drawn, shards=shards)
    _write_extras(folder)
    return folder


def tiny_moe(folder: Path, *, experts: int = 8, seed: int = 0) -> Path:
    """TINY-MOE: TINY's attention with 8 experts, top-2, and a shared expert in each block."""
    config = tiny_config(
        architectures=["Qwen3_5MoeForCausalLM"],
        model_type="qwen3_5_moe_text",
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        mtp_num_hidden_layers=0,
    )
    draw = _Draw(seed + 7)
    h, inner = config["hidden_size"], 128
    out = {n: t for n, t in tiny_tensors(config, seed=seed, mtp=False).items() if ".mlp." not in n}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}.mlp"
        out[f"{p}.gate.weight"] = draw.matrix(experts, h)
        for e in range(experts):
            out |= _mlp(draw, h, inner, f"{p}.experts.{e}")
        out |= _mlp(draw, h, inner, f"{p}.shared_expert")
        out[f"{p}.shared_expert_gate.weight"] = draw.matrix(1, h)
    write_checkpoint(folder, config, out, shards=2)
    _write_extras(folder)
    return folder


def dense(folder: Path, *, kind: str = "qwen3", seed: int = 0, **overrides: Any) -> Path:
    """A small dense model: `kind` is qwen3 (q/k norms) or llama (none); plain norms, untied."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if kind == "qwen3" else "LlamaForCausalLM"],
        "model_type": kind,
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eos_token_id": EOS_ID,
    }
    config.update(overrides)
    draw = _Draw(seed + 11)
    h, v = config["hidden_size"], config["vocab_size"]
    out: Tensors = {"model.embed_tokens.weight": draw.normal(v, h, std=1.0)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}"
        out |= _norms(draw, h, p, mean=1.0)
        heads = _attention(draw, config, f"{p}.self_attn", offset=False)
        out |= {n: t for n, t in heads.items() if kind == "qwen3" or "_norm" not in n}
        out |= _mlp(draw, h, config["intermediate_size"], f"{p}.mlp")
    out["model.norm.weight"] = draw.normal(h, std=0.1, mean=1.0)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = draw.matrix(v, h, 3.0)
    write_checkpoint(folder, config, out, shards=1)
    _write_extras(folder)
    return folder


def draft_config(*, version: int = 2, **overrides: Any) -> dict[str, Any]:
    """DRAFT's config; keys of `dflash_config` among the overrides go there, None removes a key."""
    inner: dict[str, Any] = {"target_layer_ids": [0, 2, 3], "mask_token_id": MASK_ID}
    config: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel" if version == 2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "is_causal": False,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 64,
        "use_sliding_window": True,
        "vocab_size": 512,
        "num_target_layers": 4,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if version == 2:
        inner |= {
            "block_size": 4,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 32,
            "selector_top_k": 8,
        }
    else:
        config["block_size"] = 4
    for key, value in overrides.items():
        place = inner if key in inner else config
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    config["dflash_config"] = inner
    return config


def draft_tensors(config: dict[str, Any], *, seed: int = 0, taps: int = 3) -> Tensors:
    """All tensors of a DFlash (v1) or DFlash2 checkpoint with `config`'s shapes, bf16."""
    draw = _Draw(seed + 101)
    h = config["hidden_size"]
    inner = config["dflash_config"]
    out: Tensors = {
        "fc.weight": draw.matrix(h, taps * h, 0.5),
        "hidden_norm.weight": draw.normal(h, std=0.1, mean=1.0),
        "norm.weight": draw.normal(h, std=0.1, mean=1.0),
    }
    for i in range(config["num_hidden_layers"]):
        p = f"layers.{i}"
        out |= _norms(draw, h, p, mean=1.0)
        out |= _attention(draw, config, f"{p}.self_attn", offset=False)
        out |= _mlp(draw, h, config["intermediate_size"], f"{p}.mlp")
        if "selector_rank" not in inner:
            continue
        taps_conv, groups = inner["conv_kernel_size"], h // inner["conv_group_size"]
        for conv in ("attention_conv", "mlp_conv"):
            base = draw.normal(2, taps_conv, h, std=0.3)
            base[:, 0] += 1
            out[f"{p}.{conv}.base_kernel"] = base
            out[f"{p}.{conv}.kernel_projection.weight"] = draw.matrix(
                2 * taps_conv * groups, h, 0.3
            )
    if "selector_rank" in inner:
        v, r = config["vocab_size"], inner["selector_rank"]
        s = "candidate_selector"
        out[f"{s}.predecessor_codebook"] = draw.normal(v, r, std=0.7)
        out[f"{s}.successor_codebook"] = draw.normal(v, r, std=0.7)
        out[f"{s}.hidden_projection.weight"] = draw.matrix(r, h, 1.0)
    return out


def draft(
    folder: Path,
    *,
    version: int = 2,
    seed: int = 0,
    tensors: Tensors | None = None,
    **overrides: Any,
) -> Path:
    """DRAFT in `folder` (`version` 1: the same body as DFlash v1); overrides as `draft_config`."""
    config = draft_config(version=version, **overrides)
    taps = len(config["dflash_config"].get("target_layer_ids", [0, 2, 3]))
    drawn = draft_tensors(config, seed=seed, taps=taps) | (tensors or {})
    write_checkpoint(folder, config, drawn, shards=1)
    return folder
