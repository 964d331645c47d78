"""Small checkpoints of zeros, written without torch: headers and configs that look real.

`tiny` has the layout of the flat `qwen3_5_text` text model, `draft` that of a DFlash2 drafter; the
shapes are those of TINY and DRAFT in the cases. `recipe_text` is a recipe over them.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]
WIDTH = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8}


def write_tensors(path: Path, shapes: Shapes, dtype: str = "BF16") -> None:
    """One safetensors file of zeros."""
    header: dict[str, Any] = {}
    position = 0
    for name, shape in sorted(shapes.items()):
        end = position + WIDTH[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(position))


def write_json(path: Path, value: object) -> None:
    """Plain JSON."""
    path.write_text(json.dumps(value), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; a value of `...` removes the key."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content |= changes
    write_json(path, {k: v for k, v in content.items() if v is not ...})


def attention(hidden: int, prefix: str, gate: int) -> Shapes:
    """A full-attention layer with 4 heads of 64, 2 of keys and values; `gate` 2 doubles q."""
    return {
        f"{prefix}self_attn.q_proj.weight": (256 * gate, hidden),
        f"{prefix}self_attn.k_proj.weight": (128, hidden),
        f"{prefix}self_attn.v_proj.weight": (128, hidden),
        f"{prefix}self_attn.o_proj.weight": (hidden, 256),
        f"{prefix}self_attn.q_norm.weight": (64,),
        f"{prefix}self_attn.k_norm.weight": (64,),
    }


def block(hidden: int, inner: int, prefix: str) -> Shapes:
    """MLP and the two norms of a layer."""
    return {
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


def delta(hidden: int, prefix: str) -> Shapes:
    """A gated DeltaNet layer: 2 key heads and 4 value heads of 64."""
    own = {
        "in_proj_qkv.weight": (512, hidden),
        "in_proj_z.weight": (256, hidden),
        "in_proj_b.weight": (4, hidden),
        "in_proj_a.weight": (4, hidden),
        "conv1d.weight": (512, 1, 4),
        "A_log": (4,),
        "dt_bias": (4,),
        "norm.weight": (64,),
        "out_proj.weight": (hidden, 256),
    }
    return {f"{prefix}linear_attn.{name}": shape for name, shape in own.items()}


def tiny(folder: Path, *, hidden: int = 256, inner: int = 512, tied: bool = False) -> Path:
    """A base: 4 layers, vocabulary 512, MTP, two shards and an index, tokenizer and template."""
    folder.mkdir(parents=True, exist_ok=True)
    first: Shapes = {"model.embed_tokens.weight": (512, hidden)}
    for i in range(4):
        prefix = f"model.layers.{i}."
        first |= block(hidden, inner, prefix)
        first |= attention(hidden, prefix, 2) if i % 2 else delta(hidden, prefix)
    second: Shapes = {"model.norm.weight": (hidden,)}
    if not tied:
        second["lm_head.weight"] = (512, hidden)
    mtp = attention(hidden, "layers.0.", 2) | block(hidden, inner, "layers.0.")
    mtp |= {"fc.weight": (hidden, 2 * hidden), "norm.weight": (hidden,)}
    mtp |= {f"pre_fc_norm_{x}.weight": (hidden,) for x in ("embedding", "hidden")}
    second |= {f"mtp.{name}": shape for name, shape in mtp.items()}
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map: dict[str, str] = {}
    for name, shapes in zip(names, (first, second), strict=True):
        write_tensors(folder / name, shapes)
        weight_map |= dict.fromkeys(shapes, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(folder / "config.json", tiny_config(hidden, inner, tied))
    write_json(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95, "eos_token_id": [498]},
    )
    write_json(
        folder / "tokenizer.json",
        {
            "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(490)}, "merges": []},
            "added_tokens": [{"id": i, "content": f"<{i}>", "special": True} for i in (498, 499)],
        },
    )
    write_json(folder / "tokenizer_config.json", {"eos_token": "<498>"})
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    return folder


def tiny_config(hidden: int, inner: int, tied: bool) -> dict[str, Any]:
    """config.json of `tiny`."""
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": tied,
        "mtp_num_hidden_layers": 1,
    }


def draft(folder: Path, *, hidden: int = 256) -> Path:
    """A DFlash2 drafter of 2 layers for `tiny`, block 4, taps 0, 2 and 3."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes: Shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.predecessor_codebook": (512, 32),
        "candidate_selector.successor_codebook": (512, 32),
        "candidate_selector.hidden_projection.weight": (32, hidden),
    }
    for i in range(2):
        prefix = f"layers.{i}."
        shapes |= attention(hidden, prefix, 1) | block(hidden, 512, prefix)
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"{prefix}{conv}.base_kernel"] = (2, 2, hidden)
            shapes[f"{prefix}{conv}.kernel_projection.weight"] = (2 * 2 * hidden // 16, hidden)
    write_tensors(folder / "model.safetensors", shapes)
    write_json(
        folder / "config.json",
        {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            "is_causal": False,
            "hidden_size": hidden,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 512,
            "num_target_layers": 4,
            "rope_theta": 1e4,
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 64,
            "dflash_config": {
                "block_size": 4,
                "target_layer_ids": [0, 2, 3],
                "mask_token_id": 499,
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 32,
                "selector_top_k": 8,
            },
        },
    )
    return folder


def write_rows(path: Path, count: int) -> Path:
    """A prompt file of so many rows."""
    rows = [
        {"id": f"r{i}", "messages": [{"role": "user", "content": f"q{i}"}]} for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


HEAD = """
name: fake
threads: 1
device: cpu
base: {path: base}
drafter: {path: drafter}
prompts:
  calibration: {path: calibration.jsonl}
  development: {path: development.jsonl}
  heldout: {path: heldout.jsonl}
  texts: {path: texts.jsonl}
"""


def house(folder: Path) -> Path:
    """A folder with base, drafter, prompt files and recipe.yaml; the recipe's path."""
    tiny(folder / "base")
    draft(folder / "drafter")
    for name in ("calibration", "development", "heldout", "texts"):
        write_rows(folder / f"{name}.jsonl", 300)
    (folder / "recipe.yaml").write_text(HEAD, encoding="utf-8")
    return folder / "recipe.yaml"
