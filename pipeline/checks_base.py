"""What can be wrong with a base checkpoint, found from config, headers and small files alone.

Does: tied flag against tensors, layers against config, MTP against its declaration, shapes, dtypes,
tokenizer, chat template, source of the sampling. Does not: raise; every finding becomes a problem.

Source of the layouts: reference "A.3 Weight keys and shapes" and "B.1 Keys and shapes" (Qwen3.5
family: the hidden size H, vocabulary V, `mtp.fc` [H, 2H]).
"""

from __future__ import annotations

import re
from typing import Any

from artifacts.errors import TrimtabError
from artifacts.names import packed_modules, strip_prefix
from pipeline.problems import Problems
from pipeline.recipe import Recipe
from pipeline.skeleton import Skeleton

WEIGHT_DTYPES = ("BF16", "F16", "F32")
MTP_TENSORS = (
    "fc.weight",
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.self_attn.q_norm.weight",
    "layers.0.self_attn.k_norm.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
)


def check_base(base: Skeleton, recipe: Recipe, problems: Problems) -> None:
    """Everything about the base except group sizes (see `schemes`)."""
    before = len(problems.found)
    _check_head(base, recipe, problems)
    _check_layers(base, problems)
    _check_mtp(base, recipe, problems)
    _check_format(base, recipe, problems)
    check_tokenizer(base, problems)
    _check_sampling(base, recipe, problems)
    if base.stray:
        problems.note(
            base.where, f"{base.label}: {', '.join(base.stray)} belong to no index; never read"
        )
    if len(problems.found) == before:
        _check_supported(base, problems)


def integer(base: Skeleton, key: str) -> int | None:
    """A positive whole number of the text config, None if it is not there."""
    value = base.text_config.get(key)
    return value if type(value) is int and value > 0 else None


def tied_flag(config: dict[str, Any]) -> tuple[bool | None, str]:
    """The tied flag from root and text_config; the second value says what is wrong with it."""
    text = config.get("text_config")
    places = [config, text] if isinstance(text, dict) else [config]
    flags = [p["tie_word_embeddings"] for p in places if "tie_word_embeddings" in p]
    if not flags:
        return None, "config.json has no tie_word_embeddings, at the root or in text_config"
    if any(type(flag) is not bool for flag in flags) or len(set(flags)) > 1:
        return None, f"config.json has tie_word_embeddings {flags}: one true or false is needed"
    return flags[0], ""


def _check_head(base: Skeleton, recipe: Recipe, problems: Problems) -> None:
    tied, wrong = tied_flag(base.config)
    head = {"lm_head.weight", "lm_head.weight_packed"} & set(base.infos)
    if wrong:
        problems.add(base.where, f"{base.label}: {wrong}", "set it to what the tensors say")
    elif tied and head:
        problems.add(
            base.where,
            f"{base.label}: tie_word_embeddings is true, and there is a lm_head.weight",
            "the flag or the tensor is wrong; set the flag to false if the head is its own",
        )
    elif tied is False and not head:
        problems.add(
            base.where,
            f"{base.label}: tie_word_embeddings is false, and there is no lm_head.weight",
            "the flag is wrong, or the shard with the head is missing",
        )
    elif tied and recipe.lm_head.bits < 16:
        problems.add(
            "lm_head.bits",
            f"is {recipe.lm_head.bits}, but the base's head is tied to its embedding",
            "set lm_head.bits to 16",
        )
    vocab, hidden = integer(base, "vocab_size"), integer(base, "hidden_size")
    for key, value in (("vocab_size", vocab), ("hidden_size", hidden)):
        if value is None:
            problems.add(base.where, f"{base.label}: config.json has no {key}")
    tables = [n for n in base.infos if n.endswith("embed_tokens.weight") and "mtp." not in n]
    if not tables:
        problems.add(base.where, f"{base.label}: there is no embed_tokens.weight")
    for name in [*tables, *(head & {"lm_head.weight"})]:
        shape = base.info(name).shape
        if vocab and hidden and shape != (vocab, hidden):
            problems.add(
                base.where,
                f"{base.label}: {name} is {list(shape)}, config.json says {[vocab, hidden]}",
            )


def _check_layers(base: Skeleton, problems: Problems) -> None:
    """As many layers as declared, each with the tensors that layers of its kind have."""
    layers: dict[int, set[str]] = {}
    for name in base.infos:
        found = re.match(r"model\.layers\.(\d+)\.(.+)", strip_prefix(name))
        if found:
            leaf = re.sub(r"weight_(packed|scale|shape)$", "weight", found[2])
            layers.setdefault(int(found[1]), set()).add(leaf)
    count = integer(base, "num_hidden_layers")
    if count is None:
        problems.add(base.where, f"{base.label}: config.json has no num_hidden_layers")
        return
    missing = sorted(set(range(count)) - set(layers))
    extra = sorted(set(layers) - set(range(count)))
    if missing or extra:
        problems.add(
            base.where,
            f"{base.label}: num_hidden_layers is {count}; "
            + (f"layers {missing} have no tensors" if missing else f"there are layers {extra} too"),
        )
    kinds: dict[bool, set[str]] = {}
    linear = {i: any(n.startswith("linear_attn.") for n in names) for i, names in layers.items()}
    for i, names in layers.items():
        kinds.setdefault(linear[i], set()).update(names)
    for i, names in sorted(layers.items()):
        lacking = sorted(kinds[linear[i]] - names)
        if lacking:
            problems.add(
                base.where,
                f"{base.label}: layer {i} has no {lacking[0]}, which other layers of its kind have",
            )


def _check_mtp(base: Skeleton, recipe: Recipe, problems: Problems) -> None:
    tensors = {name for name in base.infos if name.startswith("mtp.")}
    declared = base.text_config.get("mtp_num_hidden_layers", 0) or 0
    if recipe.mtp is not None and not tensors:
        problems.add(
            "mtp", "the base has no mtp.* tensors", "write `mtp: null`, or take a base that has one"
        )
    elif tensors and not declared:
        problems.add(
            base.where,
            f"{base.label}: has {len(tensors)} mtp.* tensors, but config.json does not declare "
            "mtp_num_hidden_layers",
            "no consumer would load them",
        )
    if declared and not tensors:
        problems.add(
            base.where,
            f"{base.label}: mtp_num_hidden_layers is {declared}, but there are no mtp.* tensors",
            "an earlier save dropped them; take the original checkpoint",
        )
    if tensors and recipe.mtp is None:
        problems.note("mtp", f"is null: the base's {len(tensors)} mtp.* tensors stay as they are")
    if not tensors or any("experts" in name for name in tensors):
        return
    plain = {re.sub(r"weight_(packed|scale|shape)$", "weight", name) for name in tensors}
    lacking = [name for name in MTP_TENSORS if f"mtp.{name}" not in plain]
    if lacking:
        problems.add(base.where, f"{base.label}: mtp.{lacking[0]} is missing")
    hidden = integer(base, "hidden_size")
    if (
        hidden
        and "mtp.fc.weight" in base
        and base.info("mtp.fc.weight").shape
        != (
            hidden,
            2 * hidden,
        )
    ):
        shape = list(base.info("mtp.fc.weight").shape)
        problems.add(
            base.where,
            f"{base.label}: mtp.fc.weight is {shape}, must be {[hidden, 2 * hidden]}",
        )


def _check_format(base: Skeleton, recipe: Recipe, problems: Problems) -> None:
    packed = packed_modules(base)
    if recipe.target.source == "quantize" and (packed or "quantization_config" in base.config):
        problems.add(
            base.where,
            f"{base.label}: is quantized already",
            "set target.source to imported, or base to the 16-bit checkpoint",
        )
    elif recipe.target.source == "imported" and not packed:
        problems.add(
            "target.source",
            f"is imported, but {base.label} holds no packed matrix",
            "set target.source to quantize, or base to a published W4A16 checkpoint",
        )
    if recipe.signs.original is not None and recipe.target.source != "imported":
        problems.add("signs.original", "is read only when target.source is imported")
    for name in base.names():
        info = base.info(name)
        if len(info.shape) == 2 and name.endswith(".weight") and info.dtype not in WEIGHT_DTYPES:
            problems.add(
                base.where,
                f"{base.label}: {name} is {info.dtype}, must be one of {', '.join(WEIGHT_DTYPES)}",
            )
            break


def check_tokenizer(base: Skeleton, problems: Problems) -> None:
    """tokenizer.json that knows something, ids inside the vocabulary, and a chat template."""
    try:
        tokenizer = base.json("tokenizer.json")
        settings = base.json("tokenizer_config.json") or {}
    except TrimtabError as error:
        problems.add_error(base.where, error)
        return
    if tokenizer is None:
        problems.add(
            base.where,
            f"{base.label}: there is no tokenizer.json; every text would encode to nothing",
            "fetch the tokenizer's files from the model's repository",
        )
        return
    ids = token_ids(tokenizer)
    vocab = integer(base, "vocab_size")
    if not ids:
        problems.add(base.where, f"{base.label}: tokenizer.json has an empty vocabulary")
    elif vocab and max(ids) >= vocab:
        problems.add(
            base.where,
            f"{base.label}: tokenizer.json has id {max(ids)}, vocab_size is {vocab}",
        )
    templates = ("chat_template.jinja", "chat_template.json")
    if not settings.get("chat_template") and not any(base.has(name) for name in templates):
        problems.add(
            base.where,
            f"{base.label}: there is no chat template (chat_template.jinja, or in "
            "tokenizer_config.json)",
            "prompts are rendered by the model's own template",
        )


def token_ids(tokenizer: Any) -> set[int]:
    """All ids of a tokenizer.json: its model's vocabulary and the added tokens."""
    if not isinstance(tokenizer, dict):
        return set()
    model = tokenizer.get("model") or {}
    vocab = model.get("vocab") or {}
    ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    return ids | {token["id"] for token in tokenizer.get("added_tokens") or []}


def _check_sampling(base: Skeleton, recipe: Recipe, problems: Problems) -> None:
    """The traffic's sampling must be known: from generation_config.json or from the recipe."""
    from calibration.traffic import resolve_sampling

    if recipe.traffic.sampling is not None:
        return
    try:
        resolve_sampling(base.json("generation_config.json") or {})
    except TrimtabError as error:
        problems.add_error("traffic.sampling", error)


def _check_supported(base: Skeleton, problems: Problems) -> None:
    """The runtime's own reading of the config, once nothing else is wrong."""
    from artifacts.runtime.config import TargetConfig

    try:
        TargetConfig.from_dict(base.config)
    except TrimtabError as error:
        problems.add(base.where, f"{base.label}: {error.message}", error.hint)
