"""The structure check: a right build passes, and each damage is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from artifacts.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    load_single,
    read_header,
    write_index,
    write_single,
)
from artifacts.manifest import seal
from artifacts.packing import PackedMatrix
from artifacts.structure import check_build_structure, is_side_file
from tests.artifacts.builds import Built, edit_json, info, make
from tests.checkpoints import MASK_ID


def check(made: Built) -> list[str]:
    return check_build_structure(
        made.build, Checkpoint.open(made.base), drafter=Checkpoint.open(made.drafter)
    )


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Applies `change` to all tensors of a folder and writes them as one shard with an index."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        source = load_single(path)
        tensors |= {name: source.get(name) for name in source.names()}
        path.unlink()
    change(tensors)
    write_single(folder / "model-00001-of-00001.safetensors", tensors)
    write_index(folder)


def test_a_right_build_passes(built: Built) -> None:
    assert check(built) == []
    assert check_build_structure(built.build, None) == []


@pytest.mark.parametrize("arguments", [{"vl": True}, {"tied": True}, {"mtp": False}])
def test_other_layouts_pass(tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert check(make(tmp_path, **arguments)) == []


def target(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Built], None]:
    return lambda made: edit_tensors(made.build / "target", change)


def drafter(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Built], None]:
    return lambda made: edit_tensors(made.build / "drafter", change)


def config(part: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Built], None]:
    return lambda made: edit_json(made.build / part / "config.json", change)


def remove(name: str) -> Callable[[Built], None]:
    return lambda made: (made.build / name).unlink()


def set_scale(value: float, name: str = "lm_head") -> Callable[[Built], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.weight_scale"][3, 1] = value

    return target(change)


def empty_group(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mtp.fc.weight_packed"].view(256, 4, 16)[:, 2] = -2004318072


def wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mtp.fc.weight_shape"] = torch.tensor([512, 256])


def nudge(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[0] += 1

    return change


def four_old_shards(made: Built) -> None:
    for number in (1, 2, 3, 4):
        name = f"model-0000{number}-of-00004.safetensors"
        save_file({"model.norm.weight": torch.zeros(256)}, made.build / "target" / name)


def source_index(made: Built) -> None:
    shutil.copyfile(made.base / INDEX_NAME, made.build / "target" / INDEX_NAME)


def truncate(made: Built) -> None:
    path = sorted((made.build / "target").glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])


def lose_special(made: Built) -> None:
    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["id"] != MASK_ID]

    edit_json(made.build / "target" / "tokenizer.json", change)


def swap_merges(made: Built) -> None:
    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:20]

    edit_json(made.build / "target" / "tokenizer.json", change)


def ledger(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Built], None]:
    return lambda made: edit_json(made.build / "ledger.json", change)


def other_head(made: Built) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        source = load_single(next((made.build / "draft_vocab").glob("*.safetensors")))
        row = int(source.get("target_ids")[0])
        tensors["lm_head.weight_packed"][row, 0] ^= 1

    edit_tensors(made.build / "target", change)


DAMAGES: dict[str, tuple[Callable[[Built], Any], str]] = {
    "c51 stray": (four_old_shards, "target: model-00003-of-00004.safetensors: stray"),
    "c52 index": (source_index, "holds 'lm_head.weight_packed', which the index places in no file"),
    "c15 truncated": (truncate, "truncated"),
    "c79 totals": (
        lambda made: edit_json(
            made.build / "target" / INDEX_NAME, lambda i: i["metadata"].update(total_parameters=7)
        ),
        f"target: {INDEX_NAME}: total_parameters is 7, the headers give 3682320",
    ),
    "c03 dropped": (
        target(lambda t: t.pop("mtp.norm.weight")),
        "target: mtp.norm.weight: is in the source, not here, and no reason is given",
    ),
    "c03 lost layer": (
        target(lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.fc.")]),
        "target: mtp.fc.weight: is in the source, not here, and no reason is given",
    ),
    "c05 changed": (
        target(nudge("model.layers.0.linear_attn.in_proj_a.weight")),
        "in_proj_a.weight: kept, and its bytes differ from the source's",
    ),
    "foreign tensor": (
        target(lambda t: t.update({"model.extra.weight": torch.ones(2)})),
        "target: model.extra.weight: comes from no tensor of the source",
    ),
    "cast": (
        target(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()})),
        "model.norm.weight: F32[256] here, BF16[256] in the source",
    ),
    "c05 no record": (
        ledger(lambda entries: entries.pop(0)),
        "target: lm_head: is packed, and the ledger has no entry for it",
    ),
    "silent fallback": (
        ledger(lambda entries: entries[0].update(method="rtn")),
        "lm_head: rounded to nearest, and the ledger gives no reason",
    ),
    "record of another scheme": (
        ledger(lambda entries: entries[0].update(bits=4)),
        "lm_head: stored as int8 g128 [512, 256], the ledger says int4 g128",
    ),
    "record without codes": (
        ledger(lambda entries: entries.append({**entries[0], "name": "model.ghost"})),
        "target: model.ghost: has a ledger entry and no codes",
    ),
    "c06 config": (
        config("target", lambda c: c["quantization_config"].update(ignore=[])),
        "in_proj_a: stored as plain 16-bit, the config says int4 g128",
    ),
    "weight_shape": (target(wrong_shape), "target: mtp.fc: weight_shape says 512 rows"),
    "nan": (set_scale(float("nan")), "lm_head.weight_scale: 1 of 1024 scales NaN or infinite"),
    "inf": (set_scale(float("inf")), "1 of 1024 scales NaN or infinite, first at [3, 1]"),
    "c01 negative": (set_scale(-0.5), "lm_head.weight_scale: 1 of 1024 scales negative"),
    "c02 minus zero": (set_scale(-0.0), "1 of 1024 scales negative, first at [3, 1]"),
    "c36 zero": (set_scale(0.0), "lm_head.weight_scale: 1 of 1024 scales zero"),
    "subnormal": (set_scale(1e-39), "lm_head.weight_scale: 1 of 1024 scales subnormal"),
    "fp16 scales": (
        target(lambda t: t.update({"lm_head.weight_scale": t["lm_head.weight_scale"].half()})),
        "target: lm_head.weight_scale: F16, wanted BF16",
    ),
    "all-zero groups": (target(empty_group), "target: mtp.fc: 256 groups are all zero"),
    "c69 tokenizer": (
        remove("target/tokenizer.json"),
        "tokenizer.json: missing; without it text encodes to nothing",
    ),
    "special token": (lose_special, "tokenizer.json: added token '<|mask|>' differs"),
    "merges": (swap_merges, "encodes to other ids than in the source"),
    "c70 template": (
        remove("target/chat_template.jinja"),
        "target: no chat template: neither chat_template.jinja nor in tokenizer_config.json",
    ),
    "c70 generation": (
        remove("target/generation_config.json"),
        "target: generation_config.json: is in the source and missing here",
    ),
    "config field": (
        config("target", lambda c: c.update(rms_norm_eps=1e-5)),
        "target: config.json: rms_norm_eps is 1e-05, in the source 1e-06",
    ),
    "vocab size": (
        config("target", lambda c: c.update(vocab_size=500)),
        "target: lm_head: 512 rows, vocab_size is 500",
    ),
    "c20 tied": (
        config("target", lambda c: c.update(tie_word_embeddings=True)),
        "config.json says tie_word_embeddings true, and lm_head is stored",
    ),
    "eos id": (
        lambda made: edit_json(
            made.build / "target" / "generation_config.json", lambda g: g.update(eos_token_id=505)
        ),
        "generation_config.json: eos_token_id 505 is no id of the tokenizer",
    ),
    "c84 pickle": (
        lambda made: (made.build / "target" / "x.pt").touch(),
        "target: x.pt: a pickle",
    ),
    "c29 taps": (
        config("drafter", lambda c: c["dflash_config"].pop("target_layer_ids")),
        "drafter: dflash_config.target_layer_ids is missing; it is never guessed",
    ),
    "c07 tap": (
        config("drafter", lambda c: c["dflash_config"].update(target_layer_ids=[0, 2, 4])),
        "drafter: target_layer_ids has 4, the target's layers are 0..3",
    ),
    "tap order": (
        config("drafter", lambda c: c["dflash_config"].update(target_layer_ids=[2, 0, 3])),
        "drafter: target_layer_ids [2, 0, 3] are not ascending and distinct",
    ),
    "taps and fc": (
        config("drafter", lambda c: c["dflash_config"].update(target_layer_ids=[0, 3])),
        "drafter: fc is [256, 768], 2 taps need [256, 512]",
    ),
    "mask id": (
        config("drafter", lambda c: c["dflash_config"].update(mask_token_id=512)),
        "drafter: mask_token_id 512 is not an id of the target's 512",
    ),
    "drafter field": (
        config("drafter", lambda c: c.update(is_causal=True)),
        "drafter: config.json: is_causal is True, in the source False",
    ),
    "c68 drafter": (
        drafter(lambda t: t.pop("candidate_selector.successor_codebook")),
        "drafter: candidate_selector.successor_codebook: is in the source, not here",
    ),
    "no drafter": (
        lambda made: [path.unlink() for path in (made.build / "drafter").glob("*.safetensors")],
        "drafter: ",
    ),
    "c26 head": (other_head, "draft_vocab: cut from head"),
    "c11 map": (
        lambda made: edit_tensors_of_vocab(made, "target_ids"),
        "target_ids is missing; without it no draft id has a meaning",
    ),
    "no target": (
        lambda made: shutil.rmtree(made.build / "target"),
        "target: not a folder",
    ),
}


def edit_tensors_of_vocab(made: Built, lost: str) -> None:
    path = made.build / "draft_vocab" / "draft_head.safetensors"
    source = load_single(path)
    tensors = {name: source.get(name) for name in source.names() if name != lost}
    write_single(path, tensors, metadata=source.metadata)


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_named(damaged: Built, name: str) -> None:
    damage, expected = DAMAGES[name]
    damage(damaged)
    lines = check(damaged)
    assert any(expected in line for line in lines), lines
    assert all("\n" not in line for line in lines)


def test_a_reason_excuses_a_dropped_tensor(damaged: Built) -> None:
    edit_tensors(damaged.build / "target", lambda t: t.pop("mtp.norm.weight"))
    base, drafter_source = Checkpoint.open(damaged.base), Checkpoint.open(damaged.drafter)
    dropped = {"mtp.norm.weight": "the recipe ships no MTP"}
    assert check_build_structure(damaged.build, base, drafter=drafter_source, dropped=dropped) == []
    lines = check_build_structure(damaged.build, base, dropped={"lm_head.weight_scale": "x"})
    assert "target: lm_head.weight_scale: dropped, and yet here" in lines


def test_several_damages_are_all_reported(damaged: Built) -> None:
    for name in ("c51 stray", "c69 tokenizer", "mask id", "config field"):
        DAMAGES[name][0](damaged)
    lines = check(damaged)
    for name in ("c51 stray", "c69 tokenizer", "mask id", "config field"):
        assert any(DAMAGES[name][1] in line for line in lines), name


def test_the_manifest_is_verified_when_there_is_one(damaged: Built) -> None:
    seal(damaged.build, info())
    assert check(damaged) == []
    (damaged.build / "gates.json").unlink()
    assert check(damaged) == ["gates.json: missing"]


def test_an_imported_body(tmp_path: Path) -> None:
    """A packed base: copied triples must keep their bytes, solved ones may change."""
    made = make(tmp_path / "first")
    imported = made.build / "target"
    base = Checkpoint.open(imported)
    (tmp_path / "build").mkdir()
    shutil.copytree(imported, tmp_path / "build" / "target")
    entries = json.loads((made.build / "ledger.json").read_text())
    for entry in entries:
        entry["method"] = "copied"
    (tmp_path / "build" / "ledger.json").write_text(json.dumps(entries))
    build = tmp_path / "build"
    assert check_build_structure(build, base) == []
    edit_tensors(build / "target", nudge("lm_head.weight_packed"))
    assert check_build_structure(build, base) == [
        "target: lm_head.weight_packed: kept, and its bytes differ from the source's"
    ]
    for entry in entries:
        entry["method"] = "gptq"
    (build / "ledger.json").write_text(json.dumps(entries))
    assert check_build_structure(build, base) == []
    assert PackedMatrix.from_source(base, "lm_head").shape == (512, 256)
    assert "lm_head.weight_packed" in read_header(next((build / "target").glob("*.safe*")))[0]


def test_side_files() -> None:
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja", "LICENSE",
                 "additional_chat_templates/tools.jinja", "preprocessor_config.json"):  # fmt: skip
        assert is_side_file(name), name
    for name in ("config.json", "README.md", "picture.png", "model.safetensors",
                 "pytorch_model.bin.index.json", "onnx/config.json"):  # fmt: skip
        assert not is_side_file(name), name
