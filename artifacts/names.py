"""Tensor and module names: the one matcher, which matrices are Linears, what consumers fuse.

Covers the rule by which `targets` and `ignore` entries select modules (that of compressed-tensors
and of vLLM), the roles that names have in the supported families, fused groups, and the names under
which consumers know a module. Does not cover tensors' contents. Needs no torch.
Invariant: writer, validator and runtime all ask here, so they cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from artifacts.checkpoint import TensorSource
from artifacts.errors import TrimtabError

# A module named thus holds a lookup table, though its weight is a matrix.
EMBEDDING_ROLES = frozenset(
    {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "pos_embed", "embed_positions"}
)
# Linears by the last part of their name, for the families that the runtime knows.
LINEAR_ROLES = frozenset(
    {
        "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj",
        "gate_proj", "up_proj", "down_proj",
        "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
        "fc", "kernel_projection", "hidden_projection", "lm_head",
    }
)  # fmt: skip
# Members of one fused runtime module, in the order in which consumers stack them.
FUSED_ROLES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


def matches(pattern: str, name: str, class_name: str | None = None) -> bool:
    """Whether a `targets` or `ignore` entry selects a module.

    `re:REGEX` is `re.match` on the name: anchored at its start, open at its end. Anything else must
    equal the name, or the class name if one is given; it is never a substring.
    Source: compressed_tensors.utils.match, vllm ...compressed_tensors.utils.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern == name or (class_name is not None and pattern == class_name)


def matches_any(patterns: Iterable[str], name: str, class_name: str | None = None) -> bool:
    """Whether one of the entries selects the module."""
    return any(matches(pattern, name, class_name) for pattern in patterns)


def role(module: str) -> str:
    """The last part of a module's name."""
    return module.rpartition(".")[2]


def is_embedding(module: str) -> bool:
    """Whether the module is a lookup table by its name."""
    return role(module) in EMBEDDING_ROLES


def packed_modules(source: TensorSource) -> list[str]:
    """The modules X for which X.weight_packed exists, embeddings included, sorted."""
    suffix = ".weight_packed"
    return [name.removesuffix(suffix) for name in source.names() if name.endswith(suffix)]


def linear_modules(source: TensorSource) -> list[str]:
    """The modules X that are used as Linear, sorted: X.weight is a matrix, or X is packed.

    Not among them: embeddings (by name), convolutions and norms (their weights are not matrices),
    and tensors that are not called `.weight` (codebooks, A_log, base_kernel).
    """
    found: set[str] = set()
    for name in source.names():
        module, _, leaf = name.rpartition(".")
        if not module or is_embedding(module):
            continue
        if leaf == "weight_packed" or (leaf == "weight" and len(source.info(name).shape) == 2):
            found.add(module)
    return sorted(found)


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of module names that consumers fuse into one module, in fusion order, sorted.

    Every group holds the members that are among `names`, if there are at least two.
    """
    known = set(names)
    parents = sorted({name.rpartition(".")[0] for name in known})
    groups: list[tuple[str, ...]] = []
    for parent in parents:
        dot = f"{parent}." if parent else ""
        for roles in FUSED_ROLES:
            members = tuple(dot + part for part in roles if dot + part in known)
            if len(members) > 1:
                groups.append(members)
    return groups


def strip_prefix(name: str) -> str:
    """`model.language_model.X` as `model.X`; every other name as it is."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name


def add_prefix(name: str) -> str:
    """The inverse of `strip_prefix` for the body: `model.X` as `model.language_model.X`."""
    if name.startswith("model.") and not name.startswith(
        ("model.language_model.", "model.visual.")
    ):
        return "model.language_model." + name.removeprefix("model.")
    return name


def runtime_names(module: str) -> list[str]:
    """The names under which the supported consumers know a checkpoint's module, itself first.

    Text classes say `model.X`, transformers' VL class `model.language_model.X`, vLLM's VL class
    `language_model.model.X` and `language_model.lm_head`, drafters gain a leading `model.`;
    `mtp.*` keeps its name. Source: reference "Prefix conventions", vllm qwen3_5 mappers.
    """
    plain = strip_prefix(module)
    names = [module, plain]
    if plain.startswith("model.visual."):
        names.append(plain.removeprefix("model."))
    elif plain.startswith("model."):
        names += [add_prefix(plain), "language_model." + plain]
    elif plain == "lm_head":
        names.append("language_model.lm_head")
    elif not plain.startswith("mtp."):
        names.append("model." + plain)
    return list(dict.fromkeys(names))


def head_module(source: TensorSource) -> str:
    """The module whose matrix makes the logits: `lm_head`, or the embedding if they are tied.

    `tie_word_embeddings` must stand at the root of the config or in `text_config`, and the tensors
    must agree with it. Raises TrimtabError when it is absent, contradicts itself or the tensors.
    """
    inner = source.config.get("text_config") or {}
    places = [part for part in (source.config, inner) if "tie_word_embeddings" in part]
    flags = {bool(part["tie_word_embeddings"]) for part in places}
    if len(flags) != 1:
        raise TrimtabError(
            "config.json: tie_word_embeddings "
            + ("is missing" if not flags else "differs between the root and text_config"),
            hint="say whether the head is the embedding; it cannot be guessed",
        )
    tied = flags.pop()
    own = "lm_head.weight" in source or "lm_head.weight_packed" in source
    if tied == own:
        raise TrimtabError(
            f"config.json says tie_word_embeddings {str(tied).lower()}, and lm_head is "
            + ("stored" if own else "not stored"),
            hint="a tied head is not stored, an untied one is",
        )
    if own:
        return "lm_head"
    tables = sorted({name.rpartition(".")[0] for name in source.names()})
    found = [name for name in tables if role(name) == "embed_tokens"]
    if len(found) != 1:
        raise TrimtabError(f"one embed_tokens is needed for the tied head, found {found}")
    return found[0]
