"""quantization_config: what is written, what is looked up, and agreement with the shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from artifacts.checkpoint import Checkpoint, Overlay, TensorSource
from artifacts.errors import TrimtabError
from artifacts.names import linear_modules, packed_modules, role
from artifacts.packing import Scheme
from artifacts.quant_config import (
    build,
    check_agreement,
    expanded_ignore,
    from_contents,
    scheme_for,
)
from tests.artifacts.builds import KEPT_ROLES, Built, body_schemes, edit_json, quantize
from tests.checkpoints import draft, tiny

GOLDEN = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "body": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 128,
            },
        },
        "lm_head": {
            "targets": ["re:.*lm_head$"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        },
    },
    "ignore": ["re:.*embed_tokens$"],
}
# Fields that the strict schemas of compressed-tensors 0.17.0 and 0.20.1 know (extra="forbid").
READER_WEIGHTS = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic",
    "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip
READER_GROUP = {"targets", "weights", "input_activations", "output_activations", "format"}
READER_TOP = {
    "config_groups", "quant_method", "kv_cache_scheme", "format", "quantization_status",
    "global_compression_ratio", "ignore",
}  # fmt: skip


def make(tmp_path: Path, schemes: dict[str, Scheme] | None = None, **arguments: Any) -> Overlay:
    """TINY with the given matrices packed (by default the usual ones), config not yet written."""
    base = Checkpoint.open(tiny(tmp_path / "base", **arguments))
    path = tmp_path / "packed.safetensors"
    quantize(base, path, body_schemes(base) if schemes is None else schemes)
    return Overlay(base, path)


def with_config(source: Overlay, quantization: dict[str, Any] | None) -> Overlay:
    source.config = {**source.config, "quantization_config": quantization}
    return source


def test_c63_golden_config_and_strict_readers() -> None:
    groups = {
        "body": (["Linear"], Scheme(4, 128)),
        "lm_head": (["re:.*lm_head$"], Scheme(8, -1)),
    }
    made = build(groups, ["re:.*embed_tokens$"])
    assert made == GOLDEN
    assert "null" not in json.dumps(made)
    assert set(made) <= READER_TOP
    for group in made["config_groups"].values():
        assert set(group) <= READER_GROUP and set(group["weights"]) <= READER_WEIGHTS


def test_c63_the_installed_reader_sees_nothing_else() -> None:
    from compressed_tensors.quantization import QuantizationConfig

    read = QuantizationConfig.model_validate(GOLDEN)
    weights = read.config_groups["body"].weights
    assert (weights.num_bits, weights.group_size, weights.actorder) == (4, 128, None)
    full = read.model_dump(mode="json")
    small = {key: full[key] for key in GOLDEN}
    assert QuantizationConfig.model_validate(small) == read


def test_scheme_for_precedence() -> None:
    groups = {
        "body": (["Linear"], Scheme(4, 128)),
        "regex": ([r"re:.*layers\.1\..*"], Scheme(8, 64)),
        "exact": (["model.layers.1.mlp.up_proj"], Scheme(4, 32)),
    }
    config = {"quantization_config": build(groups, ["re:.*down_proj$"])}
    assert scheme_for(config, "model.layers.1.mlp.up_proj") == Scheme(4, 32)
    assert scheme_for(config, "model.layers.1.mlp.gate_proj") == Scheme(8, 64)
    assert scheme_for(config, "model.layers.2.mlp.gate_proj") == Scheme(4, 128)
    assert scheme_for(config, "model.layers.1.mlp.down_proj") is None
    assert scheme_for(config, "model.layers.2.x", "Embedding") is None
    assert scheme_for({"text_config": config}, "model.layers.2.x") == Scheme(4, 128)
    assert scheme_for({}, "model.layers.2.x") is None
    clash = build({"a": (["re:a.*"], Scheme(4, 32)), "b": (["re:.*b"], Scheme(8, 32))}, [])
    with pytest.raises(TrimtabError, match="ab: config groups a, b match it alike"):
        scheme_for(clash, "ab")


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 128},
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 4, "strategy": "tensor"},
        {"num_bits": 4, "strategy": "group", "group_size": 128, "actorder": "group"},
    ],
)
def test_other_schemes_are_refused(weights: dict[str, Any]) -> None:
    config = {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    with pytest.raises(TrimtabError, match="config group 'g'"):
        scheme_for(config, "x")


@pytest.mark.parametrize("arguments", [{}, {"vl": True}, {"tied": True}])
def test_c49_from_contents_describes_the_shards(tmp_path: Path, arguments: dict[str, Any]) -> None:
    source = make(tmp_path, **arguments)
    quantization = from_contents(source)
    assert quantization is not None
    groups = quantization["config_groups"]
    assert groups["body"]["targets"] == ["Linear"] and groups["mtp"]["targets"] == [r"re:^mtp\..*"]
    assert ("lm_head" in groups) is not bool(arguments.get("tied"))
    assert check_agreement(with_config(source, quantization)) == []
    kept = expanded_ignore(source)
    assert not set(kept) & set(packed_modules(source))
    assert {role(name) for name in kept} >= {"in_proj_a", "in_proj_b", "embed_tokens"}
    assert all(entry.startswith("re:") for entry in quantization["ignore"])


def test_c49_three_group_sizes_and_mixed_roles(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny(tmp_path / "x"))
    schemes = {n: Scheme(4, 128) for n in linear_modules(base) if role(n) not in KEPT_ROLES}
    schemes["lm_head"] = Scheme(4, 64)
    schemes |= {name: Scheme(8, -1) for name in schemes if name.startswith("mtp.")}
    schemes["model.layers.2.mlp.down_proj"] = Scheme(8, 128)
    schemes["model.embed_tokens"] = Scheme(8, 32)
    del schemes["model.layers.0.mlp.down_proj"]
    source = make(tmp_path, schemes)
    quantization = from_contents(source)
    assert quantization is not None
    assert check_agreement(with_config(source, quantization)) == []
    for name, scheme in schemes.items():
        class_name = "Embedding" if name == "model.embed_tokens" else "Linear"
        assert scheme_for(quantization, name, class_name) == scheme
    assert scheme_for(quantization, "model.layers.0.mlp.down_proj") is None


def test_from_contents_of_a_drafter_and_of_a_plain_model(tmp_path: Path) -> None:
    base = Checkpoint.open(draft(tmp_path / "d"))
    assert from_contents(base) is None and check_agreement(base) == []
    names = [name for name in linear_modules(base) if role(name) not in KEPT_ROLES]
    quantize(base, tmp_path / "p.safetensors", {name: Scheme(4, 64) for name in names})
    source = Overlay(base, tmp_path / "p.safetensors")
    quantization = from_contents(source)
    assert quantization is not None and list(quantization["config_groups"]) == ["body"]
    assert check_agreement(with_config(source, quantization)) == []
    # vLLM counts a drafter's layers after the target's: regexes with layer numbers miss them
    ignore = [r"re:(model\.)?layers\.[01]\..*kernel_projection$", "re:.*hidden_projection$"]
    lines = check_agreement(with_config(source, {**quantization, "ignore": ignore}))
    assert len(lines) == 4
    assert all("looked up as 'model.layers." in line and "kernel_proj" in line for line in lines)
    assert any("'model.layers.4.attention_conv.kernel_projection'" in line for line in lines)


def test_fused_members_of_two_schemes_cannot_be_described(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny(tmp_path / "x"))
    schemes = body_schemes(base)
    schemes["model.layers.1.self_attn.k_proj"] = Scheme(8, 128)
    with pytest.raises(TrimtabError, match=r"q_proj: int4 g128, .*k_proj: int8 g128"):
        from_contents(make(tmp_path, schemes))


def quantized(tmp_path: Path, change: Any, **arguments: Any) -> list[str]:
    """Problems after `change` of the right config of TINY."""
    source = make(tmp_path, **arguments)
    quantization = from_contents(source)
    assert quantization is not None
    change(quantization)
    return check_agreement(with_config(source, quantization))


def test_c06_ignore_entries_in_other_names(tmp_path: Path) -> None:
    def rename(quantization: dict[str, Any]) -> None:
        quantization["ignore"] = ["re:.*embed_tokens$", "re:.*in_proj_ba$"]

    lines = quantized(tmp_path, rename)
    for block in (0, 2):
        for part in "ab":
            name = f"model.layers.{block}.linear_attn.in_proj_{part}"
            assert any(line.startswith(f"{name}: stored as plain") for line in lines), name
    assert any("'re:.*in_proj_ba$' matches nothing" in line for line in lines)


def test_exact_names_fail_under_the_other_prefix(tmp_path: Path) -> None:
    def pin(quantization: dict[str, Any]) -> None:
        quantization["ignore"] = [
            "re:.*embed_tokens$",
            *(
                f"model.language_model.layers.{i}.linear_attn.in_proj_{c}"
                for i in (0, 2)
                for c in "ab"
            ),
            "re:.*visual.*",
        ]

    lines = quantized(tmp_path, pin, vl=True)
    assert any("looked up as 'model.layers.0.linear_attn.in_proj_a'" in line for line in lines)
    assert len(lines) == 4


def test_c56_plain_mtp_that_is_not_ignored(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny(tmp_path / "x"))
    schemes = {n: s for n, s in body_schemes(base).items() if not n.startswith("mtp.")}

    def forget(quantization: dict[str, Any]) -> None:
        names = [n for n in linear_modules(base) if n.startswith("mtp.") and n != "mtp.fc"]
        kept = [entry for entry in quantization["ignore"] if "mtp" not in entry]
        quantization["ignore"] = [*kept, *names]

    lines = quantized(tmp_path, forget, schemes=schemes)
    assert lines == ["mtp.fc: stored as plain 16-bit, the config says int4 g128"]


def test_c04_part_of_a_fused_module_ignored(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny(tmp_path / "x"))
    schemes = body_schemes(base)
    for part in "qv":
        del schemes[f"mtp.layers.0.self_attn.{part}_proj"]
    source = make(tmp_path, schemes)
    lines = check_agreement(with_config(source, GOLDEN))
    named = [line for line in lines if line.startswith("members of one fused module differ")]
    assert len(named) == 1
    assert all(f"mtp.layers.0.self_attn.{part}_proj" in named[0] for part in "qkv")


def test_lm_head_must_be_named(tmp_path: Path) -> None:
    """A "Linear" target covers lm_head in transformers and not in vLLM."""
    base = Checkpoint.open(tiny(tmp_path / "x"))
    schemes = {**body_schemes(base), "lm_head": Scheme(4, 128)}

    def unname(quantization: dict[str, Any]) -> None:
        quantization["config_groups"].pop("lm_head")

    lines = quantized(tmp_path, unname, schemes=schemes)
    assert any("lm_head" in line and "ParallelLMHead" in line for line in lines)


def test_wrong_group_size_orphans_and_no_config(tmp_path: Path, damaged: Built) -> None:
    folder = damaged.build / "target"
    path = folder / "config.json"

    def regroup(config: dict[str, Any]) -> None:
        weights = config["quantization_config"]["config_groups"]["body"]["weights"]
        weights["group_size"] = 64

    edit_json(path, regroup)
    lines = check_agreement(Checkpoint.open(folder))
    assert any("stored as int4 g128, the config says int4 g64" in line for line in lines)
    edit_json(path, lambda config: config.pop("quantization_config"))
    lines = check_agreement(Checkpoint.open(folder))
    assert any("lm_head: is packed, and config.json has no quantization_config" in x for x in lines)


def test_a_packed_matrix_beside_its_plain_one(tmp_path: Path) -> None:
    class Both:
        """A source with both forms of lm_head."""

        def __init__(self, source: TensorSource, base: TensorSource) -> None:
            self.source, self.base = source, base
            self.config = source.config

        def names(self) -> list[str]:
            return sorted([*self.source.names(), "lm_head.weight"])

        def __contains__(self, name: str) -> bool:
            return name in self.names()

        def info(self, name: str) -> Any:
            return (self.base if name == "lm_head.weight" else self.source).info(name)

        def get(self, name: str) -> Any:
            return (self.base if name == "lm_head.weight" else self.source).get(name)

    source = make(tmp_path)
    with_config(source, from_contents(source))
    lines = check_agreement(Both(source, Checkpoint.open(tmp_path / "base")))
    assert lines == ["lm_head: both weight and weight_packed are stored"]
