"""The plan: each thing that can be wrong is one line, all at once, before any work."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline import checks_recipe, skeleton
from pipeline import recipe as recipes
from pipeline.plan import Plan, examine
from pipeline.plan_view import show
from pipeline.problems import Problems
from pipeline.recipe import Recipe
from pipeline.schemes import check_fit, check_fused, check_ignore, like, plan_base, plan_drafter
from pipeline.stage import BaseStage
from tests.pipeline import fakes

Spoil = Callable[[Path], str | None]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A folder with a base, a drafter, prompts and a recipe, nothing wrong with any."""
    fakes.house(tmp_path)
    return tmp_path


def plan_of(house: Path, extra: str = "") -> Plan:
    text = (house / "recipe.yaml").read_text() + extra
    loaded = recipes.parse(text, name="recipe.yaml", folder=house)
    return examine(loaded, house / "work", {})


def lines(plan: Plan) -> list[str]:
    return [problem.line().replace(str(plan.recipe.base.path), "BASE") for problem in
            plan.problems.found]  # fmt: skip


def test_a_good_recipe_has_no_problem(house: Path) -> None:
    plan = plan_of(house)
    assert lines(plan) == []
    assert not (house / "work").exists(), "a plan writes nothing"


def retitle(path: Path, **names: str | None) -> None:
    """Rename (or with None drop) tensors in a safetensors header; their bytes stay."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for old, new in names.items():
        entry = header.pop(old)
        if new is not None:
            header[new] = entry
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


def config(**changes: Any) -> Spoil:
    return lambda house: fakes.edit_json(house / "base" / "config.json", **changes)


def inner(**changes: Any) -> Spoil:
    """Changes below the drafter's dflash_config."""

    def spoil(house: Path) -> None:
        path = house / "drafter" / "config.json"
        content = json.loads(path.read_text())
        content["dflash_config"] |= changes
        content["dflash_config"] = {
            k: v for k, v in content["dflash_config"].items() if v is not ...
        }
        fakes.write_json(path, content)

    return spoil


def drafter(**changes: Any) -> Spoil:
    return lambda house: fakes.edit_json(house / "drafter" / "config.json", **changes)


def remove(name: str) -> Spoil:
    return lambda house: (house / name).unlink()


def cut(name: str, keep: Callable[[bytes], bytes]) -> Spoil:
    def spoil(house: Path) -> None:
        path = house / name
        path.write_bytes(keep(path.read_bytes()))

    return spoil


SHARD = "base/model-00002-of-00002.safetensors"


def text(extra: str) -> Spoil:
    return lambda house: extra


def edit_recipe(old: str, new: str) -> Spoil:
    def spoil(house: Path) -> None:
        path = house / "recipe.yaml"
        path.write_text(path.read_text().replace(old, new))

    return spoil


def rows(name: str, count: int, extra: str = "") -> Spoil:
    def spoil(house: Path) -> str:
        fakes.write_rows(house / f"{name}.jsonl", count)
        return extra

    return spoil


def tie(house: Path) -> None:
    shutil.rmtree(house / "base")
    fakes.tiny(house / "base", tied=True)


def retie(house: Path) -> None:
    tie(house)
    fakes.edit_json(house / "base" / "config.json", tie_word_embeddings=False)


def narrow(house: Path) -> None:
    shutil.rmtree(house / "base")
    fakes.tiny(house / "base", inner=320)


def no_mtp(house: Path) -> None:
    index = house / "base" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {
        name: shard for name, shard in content["weight_map"].items() if not name.startswith("mtp.")
    }
    fakes.write_json(index, content)
    fakes.write_tensors(house / SHARD, {"model.norm.weight": (256,), "lm_head.weight": (512, 256)})


def no_layer_tensor(house: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    index = house / "base" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["spare"] = content["weight_map"].pop(name)
    fakes.write_json(index, content)
    retitle(house / "base" / "model-00001-of-00002.safetensors", **{name: "spare"})


PROBLEMS: dict[str, tuple[Spoil, str]] = {
    "missing shard": (remove(SHARD), "base: BASE: shard model-00002-of-00002.safetensors is miss"),
    "shard short by a byte": (
        cut(SHARD, lambda data: data[:-1]),
        f"base: BASE/{Path(SHARD).name}: truncated: ",
    ),
    "shard's length zeroed": (
        cut(SHARD, lambda data: bytes(8) + data[8:]),
        f"base: BASE/{Path(SHARD).name}: header length 0 is not possible",
    ),
    "index names an unknown tensor": (
        lambda house: retitle(house / SHARD, **{"model.norm.weight": "model.form.weight"}),
        "base: BASE: the index places 'model.norm.weight' in model-00002-of-00002.safetensors",
    ),
    "no config": (remove("base/config.json"), "base: BASE/config.json: missing"),
    "no base": (lambda house: shutil.rmtree(house / "base"), "base: BASE: not a folder"),
    "group size of the body": (
        narrow,
        "target.group_size: model.layers.0.mlp.down_proj (and 3 more like it): K 320, group size "
        "128 does not divide it",
    ),
    "group size of lm_head": (
        text("lm_head: {group_size: 96}"),
        "lm_head.group_size: lm_head: K 256, group size 96 does not divide it",
    ),
    "group size of mtp": (
        text("mtp: {group_size: 96}"),
        "mtp.group_size: mtp.fc: K 512, group size 96 does not divide it",
    ),
    "group size of the embedding": (
        text("embedding: {format: int8, group_size: 96}"),
        "embedding.group_size: model.embed_tokens: K 256, group size 96 does not divide it",
    ),
    "group size of the drafter": (
        edit_recipe("drafter}", "drafter, group_size: 512}"),
        "drafter.group_size: fc: K 768, group size 512 does not divide it",
    ),
    "tensor parallel": (
        text("tensor_parallel: 4"),
        "tensor_parallel: model.layers.1.self_attn.o_proj (and 1 more like it): K 256 over 4 cards "
        "is 64, group size 128 does not divide it",
    ),
    "fused members differ": (
        text("target: {ignore: ['re:.*q_proj$', 're:.*in_proj_[ab]$']}"),
        "target.ignore: members of one fused module differ in scheme: "
        "model.layers.1.self_attn.q_proj 16 bits, model.layers.1.self_attn.k_proj int4 g128",
    ),
    "ignore matches nothing": (
        text("target: {ignore: ['re:layers.*in_proj_[ab]$']}"),
        "target.ignore: 're:layers.*in_proj_[ab]$' matches no matrix of the decoder layers",
    ),
    "tied with a head": (
        config(tie_word_embeddings=True),
        "base: BASE: tie_word_embeddings is true, and there is a lm_head.weight",
    ),
    "untied without a head": (
        retie,
        "base: BASE: tie_word_embeddings is false, and there is no lm_head.weight",
    ),
    "no tied flag": (
        config(tie_word_embeddings=...),
        "base: BASE: config.json has no tie_word_embeddings, at the root or in text_config",
    ),
    "two tied flags": (
        config(text_config={"tie_word_embeddings": True}),
        "base: BASE: config.json has tie_word_embeddings [False, True]: one true or false is",
    ),
    "quantized tied head": (
        tie,
        "lm_head.bits: is 4, but the base's head is tied to its embedding",
    ),
    "mtp not declared": (
        config(mtp_num_hidden_layers=0),
        "base: BASE: has 15 mtp.* tensors, but config.json does not declare mtp_num_hidden_layers",
    ),
    "mtp declared and dropped": (
        no_mtp,
        "base: BASE: mtp_num_hidden_layers is 1, but there are no mtp.* tensors",
    ),
    "mtp wanted and dropped": (no_mtp, "mtp: the base has no mtp.* tensors (write `mtp: null`"),
    "vocabulary": (
        config(vocab_size=600),
        "base: BASE: model.embed_tokens.weight is [512, 256], config.json says [600, 256]",
    ),
    "too few layers": (
        config(num_hidden_layers=5),
        "base: BASE: num_hidden_layers is 5; layers [4] have no tensors",
    ),
    "a tensor of a layer": (
        no_layer_tensor,
        "base: BASE: layer 3 has no mlp.up_proj.weight, which other layers of its kind have",
    ),
    "model type": (
        config(model_type="gpt9"),
        "base: BASE: config.json: model_type 'gpt9' is not supported by the runtime",
    ),
    "quantized already": (
        config(quantization_config={"quant_method": "compressed-tensors"}),
        "base: BASE: is quantized already (set target.source to imported",
    ),
    "imported and not packed": (
        text("target: {source: imported}"),
        "target.source: is imported, but BASE holds no packed matrix",
    ),
    "original without import": (
        text("signs: {original: {path: base}}"),
        "signs.original: is read only when target.source is imported",
    ),
    "no tokenizer": (
        remove("base/tokenizer.json"),
        "base: BASE: there is no tokenizer.json; every text would encode to nothing",
    ),
    "empty tokenizer": (
        lambda house: fakes.write_json(house / "base" / "tokenizer.json", {"model": {"vocab": {}}}),
        "base: BASE: tokenizer.json has an empty vocabulary",
    ),
    "torn tokenizer": (
        cut("base/tokenizer.json", lambda data: data[:50]),
        "base: BASE/tokenizer.json: not readable as JSON",
    ),
    "tokenizer too large": (
        lambda house: fakes.write_json(
            house / "base" / "tokenizer.json", {"model": {"vocab": {"a": 512}}}
        ),
        "base: BASE: tokenizer.json has id 512, vocab_size is 512",
    ),
    "no template": (remove("base/chat_template.jinja"), "base: BASE: there is no chat template"),
    "greedy generation config": (
        lambda house: fakes.edit_json(house / "base" / "generation_config.json", do_sample=False),
        "traffic.sampling: generation_config.json decodes greedily",
    ),
    "no generation config": (
        remove("base/generation_config.json"),
        "traffic.sampling: generation_config.json decodes greedily",
    ),
    "no taps": (
        inner(target_layer_ids=...),
        "drafter: DRAFT: dflash_config.target_layer_ids is None; it has no default",
    ),
    "tap outside": (
        inner(target_layer_ids=[0, 2, 4]),
        "drafter: DRAFT: target_layer_ids [4] are outside the target's 4 layers (0 to 3)",
    ),
    "taps out of order": (
        inner(target_layer_ids=[2, 0, 3]),
        "drafter: DRAFT: target_layer_ids [2, 0, 3] are not ascending and distinct",
    ),
    "fc too narrow": (
        inner(target_layer_ids=[0, 2]),
        "drafter: DRAFT: fc.weight is [256, 768], 2 taps of 256 need [256, 512]",
    ),
    "mask outside": (
        inner(mask_token_id=512),
        "drafter: DRAFT: mask_token_id 512 is outside the target's vocabulary of 512 ids",
    ),
    "no mask": (
        inner(mask_token_id=...),
        "drafter: DRAFT: mask_token_id is None; it has no default",
    ),
    "block of one": (
        inner(block_size=1),
        "drafter: DRAFT: block_size is 1, must be a whole number of at least 2",
    ),
    "selector": (
        inner(selector_rank=...),
        "drafter: DRAFT: dflash_config.selector_rank is None; has no default",
    ),
    "codebook": (
        inner(selector_rank=16),
        "drafter: DRAFT: candidate_selector.predecessor_codebook is [512, 32], must be [512, 16]",
    ),
    "hidden size": (
        drafter(hidden_size=128),
        "drafter: DRAFT: hidden_size is 128, the target's is 256",
    ),
    "vocabulary of the drafter": (
        drafter(vocab_size=513),
        "drafter: DRAFT: vocab_size is 513, the target's is 512",
    ),
    "other target": (
        drafter(num_target_layers=64),
        "drafter: DRAFT: num_target_layers is 64, the target has 4 layers",
    ),
    "architecture": (
        drafter(architectures=["Qwen3ForCausalLM"]),
        "drafter: DRAFT: architectures is ['Qwen3ForCausalLM'], must be one of",
    ),
    "no dflash config": (
        drafter(dflash_config=...),
        "drafter: DRAFT: config.json has no dflash_config",
    ),
    "more layers than tensors": (
        drafter(num_hidden_layers=3),
        "drafter: DRAFT: layers.2.self_attn.q_proj.weight and 14 more missing",
    ),
    "no drafter": (
        lambda house: shutil.rmtree(house / "drafter"),
        "drafter: DRAFT: not a folder",
    ),
    "prompts missing": (remove("heldout.jsonl"), "prompts.heldout: HOUSE/heldout.jsonl: no such"),
    "prompts not JSON": (
        cut("texts.jsonl", lambda _: b'{"text": "a"}\nplain\n'),
        "prompts.texts: HOUSE/texts.jsonl: line 2 is not a JSON object",
    ),
    "no prompts": (rows("texts", 0), "prompts.texts: texts.jsonl has no rows"),
    "prompts short of the gate": (
        rows("heldout", 40),
        "gates.mtp_acceptance: asks for 300 prompts, prompts.heldout gives 40",
    ),
    "states short of the gate": (
        text("capture: {heldout_rows: 1000}"),
        "gates.lm_head_kl: asks for 20000 states, capture.heldout_rows gives 1000",
    ),
    "traffic prompts": (
        text("traffic: {prompts: 301}"),
        "traffic.prompts: is 301, prompts.calibration gives 300",
    ),
    "draft vocabulary too large": (
        text("draft_vocab: {rows: 513}"),
        "draft_vocab: draft vocabulary size 513 is not between 1 and the vocabulary of 512",
    ),
    "forced ids": (
        text("draft_vocab: {force: [512]}"),
        "draft_vocab.force: has ids [512], the vocabulary has 512 ids",
    ),
    "too many forced ids": (
        text(f"draft_vocab: {{rows: 64, force: {list(range(64))}}}"),
        "draft_vocab: draft vocabulary size 64",
    ),
    "no count file": (
        text("draft_vocab: {own_counts: counts.safetensors}"),
        "draft_vocab.own_counts: HOUSE/counts.safetensors: no such file",
    ),
}


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_problem_is_found(house: Path, name: str) -> None:
    spoil, expected = PROBLEMS[name]
    extra = spoil(house) or ""
    found = [
        line.replace(str(house / "drafter"), "DRAFT").replace(str(house), "HOUSE")
        for line in lines(plan_of(house, extra))
    ]
    assert any(line.startswith(expected) for line in found), found
    assert not any("\n" in line for line in found)


def test_short_limit_is_named_with_both_numbers(house: Path) -> None:
    recipe = (house / "recipe.yaml").read_text()
    short = recipe.replace("calibration.jsonl}", "calibration.jsonl, limit: 400}")
    (house / "recipe.yaml").write_text(short)
    assert (
        "prompts.calibration.limit: 300/400 rows in calibration.jsonl" in lines(plan_of(house))[0]
    )
    allowed = short.replace("limit: 400}", "limit: 400, allow_shortfall: true}")
    (house / "recipe.yaml").write_text(allowed)
    assert lines(plan_of(house)) == []


def test_all_problems_are_found_at_once(house: Path) -> None:
    for spoil in (config(tie_word_embeddings=...), inner(mask_token_id=600), rows("heldout", 3)):
        spoil(house)
    (house / "base" / "tokenizer.json").unlink()
    found = "\n".join(lines(plan_of(house, "lm_head: {group_size: 96}")))
    for text_ in ("tie_word_embeddings", "mask_token_id 600", "tokenizer.json", "group size 96"):
        assert text_ in found
    assert "prompts.heldout gives 3" in found


def test_default_ignore_may_match_nothing(house: Path) -> None:
    loaded = recipes.load(house / "recipe.yaml")
    assert "in_proj" in loaded.target.ignore[0]
    problems = Problems()
    source = skeleton.read("drafter", loaded.drafter or loaded.base, problems)
    assert source is not None  # a drafter has no in_proj_a, as a dense target has none
    check_ignore(source, loaded, problems)
    assert problems.found == []


def test_every_tensor_is_planned_once(house: Path) -> None:
    loaded = recipes.load(house / "recipe.yaml")
    for where, source, plan in (
        ("base", loaded.base, plan_base),
        ("drafter", loaded.drafter or loaded.base, plan_drafter),
    ):
        checkpoint = skeleton.read(where, source, Problems())
        assert checkpoint is not None
        planned = plan(checkpoint, loaded)
        names = [p.name if p.name in checkpoint else f"{p.name}.weight" for p in planned]
        assert sorted(names) == checkpoint.names()
        assert sum(p.before for p in planned) == sum(
            checkpoint.info(name).nbytes for name in checkpoint.names()
        )


def test_packed_sizes_are_exact(house: Path) -> None:
    loaded = recipes.load(house / "recipe.yaml")
    checkpoint = skeleton.read("base", loaded.base, Problems())
    assert checkpoint is not None
    by_name = {p.name: p for p in plan_base(checkpoint, loaded)}
    down = by_name["model.layers.0.mlp.down_proj"]  # [256, 512], int4 g128
    assert down.after == 256 * 512 // 2 + 256 * 4 * 2 + 16
    assert by_name["model.layers.0.linear_attn.in_proj_a"].scheme is None
    assert by_name["mtp.fc"].section == "mtp"
    assert by_name["lm_head"].reason == "gptq"
    assert like("model.layers.12.mlp.up_proj") == "model.layers.*.mlp.up_proj"


def test_good_plans_of_the_fakes_have_no_misfit(house: Path) -> None:
    loaded = recipes.load(house / "recipe.yaml")
    checkpoint = skeleton.read("base", loaded.base, Problems())
    assert checkpoint is not None
    problems = Problems()
    planned = plan_base(checkpoint, loaded)
    check_fit(planned, 2, problems)
    check_fused(planned, problems)
    assert problems.found == []


def test_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    problems = Problems()
    checks_recipe.check_room(tmp_path / "not" / "there", 1 << 60, 0, "cpu", problems)
    assert "disk: the stages to do write about 1.15e+06 TB" in problems.found[0].line()
    monkeypatch.setattr(checks_recipe, "memory_limits", lambda: (8 << 30, 1 << 30))
    problems = Problems()
    checks_recipe.check_room(tmp_path, 0, 2 << 30, "cpu", problems)
    assert not problems.found
    assert "1.07 GB are free now" in problems.notes[0].line()
    checks_recipe.check_room(tmp_path, 0, 9 << 30, "cpu", problems)
    assert problems.found[0].line().startswith("memory: the largest stage needs about 9.66 GB")
    problems = Problems()
    checks_recipe.check_room(tmp_path, 0, 9 << 30, "cuda", problems)
    assert not problems.found


def test_stages_own_checks_are_heard_unless_not_wanted(house: Path) -> None:
    class Picky(BaseStage):
        name = "picky"

        def check(self, recipe: Recipe, problems: Problems) -> None:
            problems.add("picky", "does not like this")

    class Idle(Picky):
        name = "idle"

        def wanted(self, recipe: Recipe) -> str:
            return "nobody asked"

        def check(self, recipe: Recipe, problems: Problems) -> None:
            raise AssertionError("not wanted")

    loaded = recipes.load(house / "recipe.yaml")
    plan = examine(loaded, house / "work", {"picky": Picky(), "idle": Idle()})
    assert [p.line() for p in plan.problems.found] == ["picky: does not like this"]
    assert {step.name: step.state for step in plan.steps} == {
        "picky": "to do",
        "idle": "not wanted",
    }


def test_the_plan_is_shown_whole(house: Path) -> None:
    plan = plan_of(house)
    out = io.StringIO()
    show(plan, Console(file=out, width=200))
    shown = out.getvalue()
    for text_ in (
        "model.layers.*.mlp.down_proj",
        "int4 g128 (gptq)",
        "kept: target.ignore",
        "kept: embedding.format is keep",
        "on disk, and in memory",
        "calibration 300",
        "note: drafter: taps the target's last layer",
        "no problems found",
    ):
        assert text_ in shown, text_
