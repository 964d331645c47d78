"""Do config and shards say the same? The packed set against the declared set, under every name.

In: a TensorSource with its config. Out: problems, one line each. Does not cover the values of codes
and scales (`structure`). Needs no torch.
Invariant: an empty list means that each supported consumer will read every Linear and embedding as
what it is stored as.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from artifacts.checkpoint import TensorSource
from artifacts.errors import TrimtabError
from artifacts.names import (
    fused_groups,
    is_embedding,
    linear_modules,
    matches,
    packed_modules,
    role,
    runtime_names,
)
from artifacts.quant_lookup import FORMAT, METHOD, quantization_config, scheme_for
from artifacts.scheme import Scheme, is_packed, packed_scheme


def plain_embeddings(source: TensorSource) -> list[str]:
    """Lookup tables that are stored as they are, sorted."""
    found = {name.rpartition(".")[0] for name in source.names() if name.endswith(".weight")}
    return sorted(name for name in found if is_embedding(name))


def expanded_ignore(source: TensorSource) -> list[str]:
    """Every Linear and embedding that is not packed, by its checkpoint name, sorted."""
    modules = {*linear_modules(source), *plain_embeddings(source)}
    return sorted(name for name in modules if not is_packed(source, name))


DRAFTER_FUSED = (("q_proj", "qkv_proj"), ("gate_proj", "gate_up_proj"))


def _readings(source: TensorSource, module: str) -> list[tuple[str, str]]:
    """(name, class) pairs under which supported consumers look a module up."""
    classes = ["Linear"]
    if is_embedding(module):
        classes = ["Embedding", "VocabParallelEmbedding"]
    elif role(module) == "lm_head":
        classes = ["Linear", "ParallelLMHead"]
    names = runtime_names(module)
    if "dflash_config" in source.config:
        names += _drafter_names(source.config, module)
    return [(name, class_name) for name in names for class_name in classes]


def _drafter_names(config: Mapping[str, Any], module: str) -> list[str]:
    """vLLM's names of a drafter's module: layers counted after the target's, q/k/v fused."""
    shift = int(config.get("num_target_layers") or 0)
    name = re.sub(
        r"^(model\.)?layers\.(\d+)\.",
        lambda match: f"model.layers.{int(match[2]) + shift}.",
        module,
    )
    names = [name if name.startswith("model.") else f"model.{name}"]
    for member, fused in DRAFTER_FUSED:
        if role(name) == member:
            names.append(name.removesuffix(member) + fused)
    return names


def _text(scheme: Scheme | None) -> str:
    return "plain 16-bit" if scheme is None else str(scheme)


def _disagreement(
    source: TensorSource, config: Mapping[str, Any], module: str, stored: Scheme | None, inputs: int
) -> str | None:
    readings = _readings(source, module)
    for name, class_name in readings:
        try:
            declared = scheme_for(config, name, class_name)
        except TrimtabError as error:
            return f"{module}: {error.message}"
        if declared is not None and declared.group_size == inputs:
            declared = Scheme(declared.bits, -1)  # one group a row is stored as one scale a row
        if declared != stored:
            other = (name, class_name) != readings[0]
            seen = f" (looked up as {name!r}, class {class_name})" if other else ""
            return f"{module}: stored as {_text(stored)}, the config says {_text(declared)}{seen}"
    return None


def disagreements(source: TensorSource, config: Mapping[str, Any]) -> list[str]:
    """Modules whose stored and declared schemes differ, and fused groups of mixed scheme."""
    modules = sorted({*linear_modules(source), *packed_modules(source), *plain_embeddings(source)})
    problems: list[str] = []
    schemes: dict[str, Scheme | None] = {}
    for module in modules:
        inputs = 0
        schemes[module] = None
        if is_packed(source, module):
            try:
                schemes[module], (_, inputs) = packed_scheme(source, module)
            except TrimtabError as error:
                problems.append(error.message)
                continue
            if f"{module}.weight" in source:
                problems.append(f"{module}: both weight and weight_packed are stored")
        problem = _disagreement(source, config, module, schemes[module], inputs)
        if problem:
            problems.append(problem)
    for group in fused_groups(schemes):
        if len({schemes[name] for name in group}) > 1:
            parts = ", ".join(f"{name}: {_text(schemes[name])}" for name in group)
            problems.append(f"members of one fused module differ: {parts}")
    return problems


def _orphans(source: TensorSource) -> list[str]:
    return [
        f"{name}: belongs to no weight_packed"
        for name in source.names()
        if name.endswith((".weight_scale", ".weight_shape"))
        and not is_packed(source, name.rpartition(".")[0])
    ]


def _unmatched(source: TensorSource, quantization: Mapping[str, Any]) -> list[str]:
    """Targets and ignore entries that select nothing: a misspelt one protects nothing."""
    modules = sorted({name.rpartition(".")[0] for name in source.names()})
    known = {name for module in modules for name in runtime_names(module)}
    classes = {"Linear", "Embedding", "ParallelLMHead", "VocabParallelEmbedding"}
    entries = [("ignore entry", entry) for entry in quantization.get("ignore") or []]
    for group in quantization["config_groups"].values():
        entries += [("target", target) for target in group["targets"]]
    return [
        f"quantization_config: {kind} {entry!r} matches nothing"
        for kind, entry in entries
        if entry not in classes and not any(matches(entry, name) for name in known)
    ]


def check_agreement(source: TensorSource) -> list[str]:
    """Where config and shards disagree, one line each; empty if they agree exactly.

    The quantized set is what has `weight_packed`. For every Linear and embedding, the config must
    say the stored scheme under the checkpoint's name and under each name of a supported consumer;
    members of a fused module share one scheme; every entry of the config selects something.
    """
    quantization = quantization_config(source.config)
    if quantization is None:
        return [
            f"{module}: is packed, and config.json has no quantization_config"
            for module in packed_modules(source)
        ] + _orphans(source)
    if quantization.get("quant_method") != METHOD or quantization.get("format") != FORMAT:
        return [
            f"quantization_config: method {quantization.get('quant_method')!r}, format "
            f"{quantization.get('format')!r}; wanted {METHOD!r}, {FORMAT!r}"
        ]
    problems = disagreements(source, source.config)
    return problems + _orphans(source) + _unmatched(source, quantization)
