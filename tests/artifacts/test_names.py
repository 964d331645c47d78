"""Names: the matcher's table (C44), Linears, fused groups, prefixes, the head (C20)."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts.checkpoint import Checkpoint
from artifacts.errors import TrimtabError
from artifacts.names import (
    add_prefix,
    fused_groups,
    head_module,
    linear_modules,
    matches,
    packed_modules,
    runtime_names,
    strip_prefix,
)
from tests.artifacts.builds import edit_json
from tests.checkpoints import draft, tiny, tiny_moe

BODY = "model.layers.3.self_attn.q_proj"
TABLE = [
    (BODY, BODY, None, True),
    ("q_proj", BODY, None, False),
    ("model.layers.3", BODY, None, False),
    ("Linear", BODY, "Linear", True),
    ("Linear", BODY, None, False),
    ("Linear", BODY, "QKVParallelLinear", False),
    ("Embedding", "model.embed_tokens", "Embedding", True),
    ("linear", BODY, "Linear", False),
    ("re:.*q_proj$", BODY, None, True),
    ("re:.*q_proj$", BODY + ".extra", None, False),
    ("re:.*q_proj", BODY + ".extra", None, True),
    ("re:q_proj", BODY, None, False),
    ("re:model.layers", BODY, None, True),
    ("re:^layers", BODY, None, False),
    (r"re:model\.layers\.3\.", BODY, None, True),
    (r"re:model\.layers\.3\.", "model.layers.30.mlp.up_proj", None, False),
    ("re:model.layers.3.", "modelXlayersX3Xmlp", None, True),
    (r"re:^mtp\..*", "mtp.fc", None, True),
    (r"re:^mtp\..*", "model.mtp.fc", None, False),
    (r"re:.*layers\.0\..*", "mtp.layers.0.mlp.up_proj", None, True),
    ("re:.*lm_head$", "language_model.lm_head", None, True),
    ("re:Linear", "x", "Linear", False),
    (".*q_proj", BODY, None, False),
    ("re:(visual|mtp)", "visual.blocks.0", None, True),
]


@pytest.mark.parametrize(("pattern", "name", "class_name", "expected"), TABLE)
def test_c44_one_rule(pattern: str, name: str, class_name: str | None, expected: bool) -> None:
    assert matches(pattern, name, class_name) is expected


def test_c44_the_rule_is_that_of_compressed_tensors() -> None:
    import torch
    from compressed_tensors.utils.match import is_match

    classes = {"Linear": torch.nn.Linear(1, 1), "Embedding": torch.nn.Embedding(1, 1)}
    for pattern, name, class_name, expected in TABLE:
        if class_name is None or class_name in classes:
            module = classes.get(class_name or "", torch.nn.Identity())
            assert is_match(name, module, pattern) is expected, (pattern, name)


def test_linear_modules_of_the_families(tmp_path: Path) -> None:
    flat = linear_modules(Checkpoint.open(tiny(tmp_path / "tiny")))
    assert "mtp.fc" in flat and "lm_head" in flat
    assert "model.layers.0.linear_attn.in_proj_a" in flat
    wrong = [n for n in flat if "norm" in n or "conv1d" in n or "embed" in n or "A_log" in n]
    assert not wrong
    vision = linear_modules(Checkpoint.open(tiny(tmp_path / "vl", vl=True)))
    assert "model.visual.merger.linear_fc1" in vision
    assert "model.visual.patch_embed.proj" not in vision
    assert {strip_prefix(n) for n in vision if "visual" not in n} == set(flat)
    experts = linear_modules(Checkpoint.open(tiny_moe(tmp_path / "moe")))
    assert "model.layers.0.mlp.experts.7.down_proj" in experts
    drafter = linear_modules(Checkpoint.open(draft(tmp_path / "draft")))
    assert "fc" in drafter and "candidate_selector.hidden_projection" in drafter
    assert not any("codebook" in n or "base_kernel" in n for n in drafter)
    assert packed_modules(Checkpoint.open(tmp_path / "draft")) == []


def test_fused_groups() -> None:
    names = [
        "a.self_attn.v_proj",
        "a.self_attn.q_proj",
        "a.self_attn.k_proj",
        "b.self_attn.q_proj",
        "a.mlp.up_proj",
        "a.mlp.gate_proj",
        "a.mlp.down_proj",
        "a.linear_attn.in_proj_z",
        "a.linear_attn.in_proj_qkv",
        "a.linear_attn.in_proj_a",
        "a.linear_attn.in_proj_b",
    ]
    assert fused_groups(names) == [
        ("a.linear_attn.in_proj_qkv", "a.linear_attn.in_proj_z"),
        ("a.linear_attn.in_proj_b", "a.linear_attn.in_proj_a"),
        ("a.mlp.gate_proj", "a.mlp.up_proj"),
        ("a.self_attn.q_proj", "a.self_attn.k_proj", "a.self_attn.v_proj"),
    ]
    assert fused_groups(["q_proj", "k_proj"]) == [("q_proj", "k_proj")]


def test_prefixes_and_runtime_names() -> None:
    nested = "model.language_model.layers.0.mlp.up_proj"
    assert strip_prefix(nested) == "model.layers.0.mlp.up_proj"
    assert add_prefix(strip_prefix(nested)) == nested
    for same in ("mtp.fc", "lm_head", "model.visual.blocks.0.attn.qkv"):
        assert strip_prefix(same) == same == add_prefix(same)
    assert set(runtime_names("model.layers.0.mlp.up_proj")) == {
        "model.layers.0.mlp.up_proj",
        nested,
        "language_model.model.layers.0.mlp.up_proj",
    }
    assert runtime_names("mtp.fc") == ["mtp.fc"]
    assert "language_model.lm_head" in runtime_names("lm_head")
    assert "visual.blocks.0" in runtime_names("model.visual.blocks.0")
    assert "model.fc" in runtime_names("fc")


@pytest.mark.parametrize(
    ("tied_on_disk", "flag", "expected"),
    [
        (False, False, "lm_head"),
        (True, True, "model.embed_tokens"),
        (False, True, "is stored"),
        (True, False, "is not stored"),
        (False, None, "is missing"),
    ],
)
def test_c20_the_head(tmp_path: Path, tied_on_disk: bool, flag: bool | None, expected: str) -> None:
    folder = tiny(tmp_path / "t", tied=tied_on_disk)

    def change(config: dict[str, object]) -> None:
        config.pop("tie_word_embeddings")
        if flag is not None:
            config["text_config"] = {"tie_word_embeddings": flag}

    edit_json(folder / "config.json", change)
    source = Checkpoint.open(folder)
    if tied_on_disk is flag:
        assert head_module(source) == expected
    else:
        with pytest.raises(TrimtabError, match=expected):
            head_module(source)


def test_c20_a_flag_that_contradicts_itself(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "t", vl=True)
    edit_json(folder / "config.json", lambda c: c.update(tie_word_embeddings=True))
    with pytest.raises(TrimtabError, match="differs between"):
        head_module(Checkpoint.open(folder))
