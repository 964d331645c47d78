"""Loading is strict: every parameter is filled, every tensor read, nothing guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts.checkpoint import Checkpoint
from artifacts.errors import TrimtabError
from artifacts.runtime.config import DrafterConfig, TargetConfig
from artifacts.runtime.dflash import Drafter
from artifacts.runtime.draft_head import DraftHead
from artifacts.runtime.linear import Embedding
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.target import Target
from tests import checkpoints
from tests.checkpoints import Tensors
from tests.runtime.packed import dense, pack, packed, quantization_config

BODY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GDN = ("in_proj_qkv", "in_proj_z", "out_proj")
IDS = torch.randint(0, 500, (2, 17), generator=torch.Generator().manual_seed(0))


def _in_body(module: str) -> bool:
    return module.startswith("model.") and module.endswith(BODY + GDN)


def _write(folder: Path, tensors: Tensors, **config: Any) -> Checkpoint:
    checkpoints.write_checkpoint(folder, checkpoints.tiny_config(**config), tensors, shards=2)
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return checkpoints.tiny_tensors(checkpoints.tiny_config())


def _hidden(source: Checkpoint) -> torch.Tensor:
    target = Target.load(source)
    return target.logits(target.forward(IDS).hidden_bth)


def test_packed_equals_its_dense_form(tmp_path: Path, tensors: Tensors) -> None:
    mixed = packed(tensors, _in_body)
    mixed = packed(mixed, lambda m: m == "lm_head", bits=8)
    names = checkpoints.tiny_config()
    plain = _write(tmp_path / "dense", dense(mixed), **names)
    stored = _write(tmp_path / "packed", mixed)
    assert torch.equal(_hidden(stored), _hidden(plain))


def test_declared_and_stored_must_agree_in_the_body(tmp_path: Path, tensors: Tensors) -> None:
    """C06: an ignore list in other names would have bf16 read as packed."""
    mixed = packed(tensors, _in_body)
    ignore = [r"re:.*in_proj_a$", r"re:.*in_proj_b$", "re:.*lm_head$", r"re:^mtp\..*"]
    right = _write(tmp_path / "right", mixed, quantization_config=quantization_config(ignore))
    Target.load(right)
    ignore[:2] = ["re:.*in_proj_ba$"]
    wrong = _write(tmp_path / "wrong", mixed, quantization_config=quantization_config(ignore))
    with pytest.raises(TrimtabError, match="in_proj_a"):
        Target.load(wrong)


def test_fused_parts_must_agree(tmp_path: Path, tensors: Tensors) -> None:
    """C04: one by one in ignore works; a part left out, or stored unlike, names all parts."""
    names = [n.removesuffix(".weight") for n in tensors if n.startswith("mtp.") and "proj" in n]
    names += ["mtp.fc"]
    config = quantization_config([*names, "re:.*in_proj_[ab]$", "lm_head"])
    mixed = packed(tensors, _in_body)
    source = _write(tmp_path / "a", mixed, quantization_config=config)
    target = Target.load(source)
    plain = _write(tmp_path / "p", dense(mixed))
    reference = Target.load(plain)
    hidden = target.forward(IDS).hidden_bth
    z, _ = MtpHead.load(source, target).teacher_forced(IDS, hidden)
    expected, _ = MtpHead.load(plain, reference).teacher_forced(IDS, hidden)
    assert torch.equal(z, expected)
    k_proj = "mtp.layers.0.self_attn.k_proj"
    config = quantization_config(
        [*(n for n in names if n != k_proj), "re:.*in_proj_[ab]$", "lm_head"]
    )
    source = _write(tmp_path / "b", mixed, quantization_config=config)
    with pytest.raises(TrimtabError, match=r"q_proj.*k_proj.*v_proj"):
        MtpHead.load(source, target)
    source = _write(tmp_path / "c", packed(mixed, lambda m: m == k_proj))
    with pytest.raises(TrimtabError, match=r"q_proj.*k_proj.*v_proj"):
        MtpHead.load(source, target)


def test_mtp_is_read_from_its_tensors(tmp_path: Path, tensors: Tensors) -> None:
    """C21, C55: dense, packed, or packed but for fc, whatever the config says about it."""
    body = packed(tensors, _in_body)
    quiet = quantization_config(["re:.*in_proj_[ab]$", "lm_head"])
    for case, choose in (
        ("dense", lambda m: False),
        ("packed", lambda m: m.startswith("mtp.")),
        ("mixed", lambda m: m.startswith("mtp.layers")),
    ):
        variant = packed(body, choose)
        source = _write(tmp_path / case, variant, quantization_config=quiet)
        target = Target.load(source)
        head = MtpHead.load(source, target)
        plain = MtpHead.load(_write(tmp_path / f"{case}-plain", dense(variant)), target)
        hidden = target.forward(IDS).hidden_bth
        assert torch.equal(
            head.teacher_forced(IDS, hidden)[0], plain.teacher_forced(IDS, hidden)[0]
        )


@pytest.mark.parametrize(
    "name",
    ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.k_norm.weight"],
)
def test_a_missing_mtp_tensor_is_named(
    name: str, tmp_path: Path, tensors: Tensors, target: Target
) -> None:
    source = _write(tmp_path, {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(TrimtabError, match=name):
        MtpHead.load(source, target)


def test_an_unread_tensor_is_fatal(tmp_path: Path, tensors: Tensors, target: Target) -> None:
    extra = torch.zeros(2, dtype=torch.bfloat16)
    source = _write(tmp_path / "a", tensors | {"model.layers.1.self_attn.q_proj.bias": extra})
    with pytest.raises(TrimtabError, match=r"q_proj\.bias"):
        Target.load(source)
    source = _write(tmp_path / "b", tensors | {"mtp.draft_lm_head.weight": extra})
    Target.load(source)
    with pytest.raises(TrimtabError, match="draft_lm_head"):
        MtpHead.load(source, target)
    drawn = checkpoints.draft_tensors(checkpoints.draft_config()) | {"rotary.inv_freq": extra}
    folder = checkpoints.draft(tmp_path / "c", tensors=drawn)
    with pytest.raises(TrimtabError, match="inv_freq"):
        Drafter.load(Checkpoint.open(folder), target)


def test_a_wrong_shape_is_named(tmp_path: Path, tensors: Tensors) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(TrimtabError, match="down_proj"):
        Target.load(_write(tmp_path, tensors | {name: tensors[name][:, :256].contiguous()}))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_tie_flag_and_head(tied: bool, present: bool, tmp_path: Path, tensors: Tensors) -> None:
    """C20: flag and tensors must agree; the logits are those of the right matrix."""
    kept = {n: t for n, t in tensors.items() if present or n != "lm_head.weight"}
    source = _write(tmp_path, kept, tie_word_embeddings=tied)
    if tied == present:
        with pytest.raises(TrimtabError, match="tie_word_embeddings"):
            Target.load(source)
        return
    target = Target.load(source)
    hidden = target.forward(IDS).hidden_bth
    head = kept["model.embed_tokens.weight" if tied else "lm_head.weight"].float().numpy()
    expected = torch.from_numpy(hidden.numpy() @ head.T)
    torch.testing.assert_close(target.logits(hidden), expected, atol=1e-4, rtol=1e-4)


def test_tie_flag_missing(tmp_path: Path, tensors: Tensors) -> None:
    config = checkpoints.tiny_config()
    del config["tie_word_embeddings"]
    checkpoints.write_checkpoint(tmp_path, config, tensors, shards=2)
    with pytest.raises(TrimtabError, match="tie_word_embeddings"):
        Target.load(Checkpoint.open(tmp_path))


def test_packed_embedding_gathers_rows_only(tmp_path: Path, tensors: Tensors) -> None:
    """C54: equal to the dense rows bit for bit, and resident in its packed form."""
    stored = packed(tensors, lambda m: m.endswith("embed_tokens"))
    source = _write(tmp_path, stored)
    target = Target.load(source)
    table = dense(stored)["model.embed_tokens.weight"]
    ids = torch.tensor([[0, 255, 499, 505]])
    assert torch.equal(target.embedding(ids), table[ids])
    assert target.embedding.nbytes < 0.35 * tensors["model.embed_tokens.weight"].nbytes
    for wrong in (512, -1):
        with pytest.raises(IndexError):
            target.embedding(torch.tensor([wrong]))
    plain = Embedding("embed_tokens", table, torch.float32)
    with pytest.raises(IndexError):
        plain(torch.tensor([512]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"target_layer_ids": None}, "target_layer_ids"),
        ({"target_layer_ids": [4]}, "outside"),
        ({"target_layer_ids": [-1, 0]}, "outside"),
        ({"target_layer_ids": [0, 3, 2]}, "ascending"),
        ({"target_layer_ids": [0, 2, 2]}, "ascending"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": 512}, "mask_token_id"),
        ({"hidden_size": 128}, "hidden_size"),
        ({"block_size": None}, "block_size"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
    ],
)
def test_drafter_config_has_no_defaults(change: dict[str, Any], match: str) -> None:
    """C07, C29: no default tap ids or mask id; what does not fit the target is refused."""
    target = TargetConfig.from_dict(checkpoints.tiny_config())
    DrafterConfig.from_dict(checkpoints.draft_config(), target=target)
    with pytest.raises(TrimtabError, match=match):
        DrafterConfig.from_dict(checkpoints.draft_config(**change), target=target)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen3_5_moe_text"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["chunked_attention"] * 4},
        {"mtp_use_dedicated_embeddings": True},
        {"vocab_size": "512"},
    ],
)
def test_target_config_refuses_what_it_does_not_compute(change: dict[str, Any]) -> None:
    key = next(iter(change))
    with pytest.raises(TrimtabError, match=key.removesuffix("_parameters")):
        TargetConfig.from_dict(checkpoints.tiny_config(**change))


class Marker:
    """In place of an MLP: adds `by` to channel 0."""

    def __init__(self, by: int) -> None:
        self.by = by

    def linears(self) -> list[Any]:
        return []

    def __call__(self, x: torch.Tensor, observe: Any = True) -> torch.Tensor:
        out = torch.zeros_like(x)
        out[..., 0] = self.by
        return out


def test_taps_are_block_outputs(tmp_path: Path, tensors: Tensors) -> None:
    """C07: block i adds i + 1 to a marker channel; ids 0, 2, 3 read 1, 6 and 10."""
    marked = dict(tensors)
    quiet = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    marked |= {n: torch.zeros_like(t) for n, t in tensors.items() if n.endswith(quiet)}
    table = tensors["model.embed_tokens.weight"].clone()
    table[:, 0] = 0
    marked["model.embed_tokens.weight"] = table
    target = Target.load(_write(tmp_path, marked))
    for i, block in enumerate(target.blocks):
        block.mlp = Marker(i + 1)  # type: ignore[assignment]
    taps = target.forward(IDS, tap_ids=(0, 2, 3)).taps_bth
    assert taps is not None
    assert taps[..., [0, 256, 512]].unique(dim=0).unique(dim=1).flatten().tolist() == [1, 6, 10]
    for ids in ((4,), (-1,), (2, 0)):
        with pytest.raises(TrimtabError, match="tap ids"):
            target.forward(IDS, tap_ids=ids)


def test_own_head_of_a_drafter(tmp_path: Path, target: Target, drafter: Drafter) -> None:
    """C18: an own head with its map is kept, none means the target's, unequal counts fail."""
    assert drafter.head.linear.weight.data_ptr() == target.lm_head.weight.data_ptr()
    rows = torch.arange(100, 196)
    head = target.lm_head.weight[rows].to(torch.bfloat16).contiguous()
    offsets = rows - torch.arange(96)
    own = checkpoints.draft(
        tmp_path / "own", tensors={"lm_head.weight": head, "d2t": offsets}, vocab_size=512
    )
    loaded = Drafter.load(Checkpoint.open(own), target)
    assert loaded.head.linear.weight.data_ptr() != target.lm_head.weight.data_ptr()
    hidden = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0))
    assert loaded.head.logits(hidden).shape[-1] == 96
    full = drafter.head.logits(hidden)
    torch.testing.assert_close(loaded.head.logits(hidden), full[..., rows])
    ids, _ = loaded.candidates(hidden)
    assert int(ids.min()) >= 100 and int(ids.max()) < 196
    for case, broken in (
        ("no-map", {"lm_head.weight": head}),
        ("short-map", {"lm_head.weight": head, "d2t": offsets[:95].contiguous()}),
        ("no-head", {"d2t": offsets}),
    ):
        folder = checkpoints.draft(tmp_path / case, tensors=broken)
        with pytest.raises(TrimtabError, match=r"draft head|drafter"):
            Drafter.load(Checkpoint.open(folder), target)


def test_draft_vocabulary_of_the_mtp_head(tiny_folder: Path, target: Target) -> None:
    """C11, C27: sliced rows give the full head's logits; every drafted id is a target id."""
    generator = torch.Generator().manual_seed(1)
    matrix = pack(target.lm_head.weight)
    for _ in range(5):
        ids = torch.randperm(400, generator=generator)[:96] + 96
        head = DraftHead.reduced(target, matrix.slice_rows(ids), ids)
        mtp = MtpHead.load(Checkpoint.open(tiny_folder), target, head=head)
        z = torch.randn(7, 256, generator=generator)
        full = torch.nn.functional.linear(z, matrix.dense())
        torch.testing.assert_close(mtp.logits(z), full[:, ids])
        assert torch.equal(head.linear.weight, matrix.dense()[ids])
        assert torch.equal(mtp.head.argmax(z), ids[full[:, ids].argmax(-1)])
    with pytest.raises(TrimtabError, match="no map"):
        DraftHead(head.linear, None, 512)
    for wrong in (ids[:95], ids.float(), ids.clone().fill_(3), ids + 200):
        with pytest.raises(TrimtabError, match="draft head"):
            DraftHead(head.linear, wrong, 512)


def test_packed_drafter_paths_agree(tmp_path: Path, target: Target) -> None:
    """C17: context keys and values of a packed drafter, fused for all layers or one by one.

    k_proj and v_proj have 3 rows of heads times 20, so that part boundaries are no multiple of 8.
    """
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20}
    config = checkpoints.draft_config(**shape)
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "fc")
    stored = packed(checkpoints.draft_tensors(config), lambda m: m.endswith(names))
    plain = dense(stored)
    checkpoints.write_checkpoint(tmp_path / "packed", config, stored, shards=1)
    checkpoints.write_checkpoint(tmp_path / "plain", config, plain, shards=1)
    a = Drafter.load(Checkpoint.open(tmp_path / "packed"), target)
    b = Drafter.load(Checkpoint.open(tmp_path / "plain"), target)
    taps = torch.randn(1, 9, 768, generator=torch.Generator().manual_seed(2))
    c = a.fuse(taps)
    assert torch.equal(c, b.fuse(taps))
    context = a.context(c)
    for i, cache in enumerate(context.layers):
        assert torch.equal(cache.value_bmsd, b.context(c).layers[i].value_bmsd)
        value = c @ plain[f"layers.{i}.self_attn.v_proj.weight"].T
        by_hand = value.view(1, 9, 3, 20).transpose(1, 2)
        torch.testing.assert_close(cache.value_bmsd, by_hand, atol=1e-4, rtol=1e-4)
        key = a.layers[i].attention.norms
        assert key is not None
        k = key[1]((c @ plain[f"layers.{i}.self_attn.k_proj.weight"].T).view(1, 9, 3, 20))
        cos, sin = a.rope.at(torch.arange(9), below=9)
        torch.testing.assert_close(
            cache.key_bmsd, a.rope.apply(k, cos, sin).transpose(1, 2), atol=1e-4, rtol=1e-4
        )
    anchor = torch.tensor([5])
    assert torch.equal(a.block(anchor, [9], context), b.block(anchor, [9], b.context(c)))


def test_four_way_of_quantized_target_and_drafter(tmp_path: Path, tensors: Tensors) -> None:
    """C58: a drafter inherits nothing from its target's quantization."""
    drawn = checkpoints.draft_tensors(checkpoints.draft_config())
    ignore = ["re:.*in_proj_[ab]$", "lm_head", r"re:^mtp\..*"]
    for case, body in (("plain", tensors), ("int4", packed(tensors, _in_body))):
        extra = {} if body is tensors else {"quantization_config": quantization_config(ignore)}
        target = Target.load(_write(tmp_path / case, body, **extra))
        for kind, d in (("plain", drawn), ("int4", packed(drawn, lambda m: m.endswith(BODY)))):
            folder = tmp_path / f"{case}-{kind}"
            checkpoints.write_checkpoint(folder, checkpoints.draft_config(), d, shards=1)
            drafter = Drafter.load(Checkpoint.open(folder), target)
            checkpoints.write_checkpoint(
                folder / "d", checkpoints.draft_config(), dense(d), shards=1
            )
            reference = Drafter.load(Checkpoint.open(folder / "d"), target)
            taps = torch.randn(1, 4, 768, generator=torch.Generator().manual_seed(3))
            anchor = torch.tensor([9])
            pair = [
                x.walk(anchor, x.block(anchor, [4], x.context(x.fuse(taps)))).tokens_bs
                for x in (drafter, reference)
            ]
            assert torch.equal(*pair)
