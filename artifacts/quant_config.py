"""`quantization_config`, made from what the shards hold.

Covers the smallest dictionary that every supported reader takes (compressed-tensors 0.17 to 0.20,
transformers 5.17, vLLM 0.27 and later): no nulls, no act-order, no observer. It is also the door to
looking up a module's scheme (`quant_lookup`) and to the check against shards (`agreement`). Does
not cover other formats than symmetric `pack-quantized` integers.
Invariant: what `from_contents` returns agrees exactly with the shards, or it raises.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from artifacts.agreement import (
    check_agreement,
    disagreements,
    expanded_ignore,
    plain_embeddings,
)
from artifacts.checkpoint import TensorSource
from artifacts.errors import TrimtabError
from artifacts.names import is_embedding, linear_modules, matches, packed_modules, role
from artifacts.quant_lookup import FORMAT, METHOD, quantization_config, scheme_for
from artifacts.scheme import Scheme, packed_scheme

__all__ = [
    "build",
    "check_agreement",
    "expanded_ignore",
    "from_contents",
    "quantization_config",
    "scheme_for",
]


def build(groups: Mapping[str, tuple[list[str], Scheme]], ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` of named groups (targets, scheme) and ignore entries.

    The dictionary goes through compressed-tensors' own schema and must come back equal, so a
    reader's defaults add nothing to it. Raises TrimtabError when the schema refuses it.
    """
    from compressed_tensors.quantization import QuantizationConfig

    small: dict[str, Any] = {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            name: {"targets": list(targets), "weights": _weights(scheme)}
            for name, (targets, scheme) in groups.items()
        },
        "ignore": list(ignore),
    }
    try:
        full = QuantizationConfig.model_validate(small).model_dump(mode="json")
    except ValueError as error:
        raise TrimtabError(f"quantization_config is not valid: {error}") from error
    different = _differences(small, full)
    if different:
        raise TrimtabError(f"compressed-tensors reads another quantization_config: {different}")
    return small


def _weights(scheme: Scheme) -> dict[str, Any]:
    base = {"num_bits": scheme.bits, "type": "int", "symmetric": True}
    if scheme.group_size == -1:
        return {**base, "strategy": "channel"}
    return {**base, "strategy": "group", "group_size": scheme.group_size}


def _differences(small: Any, full: Any, where: str = "") -> list[str]:
    """Where a value of `small` is not found again in `full`."""
    if isinstance(small, dict) and isinstance(full, dict):
        return [
            line
            for key, value in small.items()
            for line in _differences(value, full.get(key), f"{where}.{key}".lstrip("."))
        ]
    return [] if small == full else [f"{where}: {small!r} is read as {full!r}"]


def _section(module: str) -> str:
    """The part of a checkpoint that gets a config group of its own."""
    if module.startswith("mtp."):
        return "mtp"
    if role(module) == "lm_head":
        return "lm_head"
    return "embedding" if is_embedding(module) else "body"


SECTION_TARGETS = {
    "mtp": r"re:^mtp\..*",
    "lm_head": "re:.*lm_head$",
    "embedding": "re:.*embed_tokens$",
}


def _by_name(module: str) -> str:
    """A pattern for this module alone, whatever prefix a consumer gives it."""
    plain = re.sub(r"^(model\.)?(language_model\.)?", "", module)
    return f"re:(?!mtp\\.)(.*\\.)?{re.escape(plain)}$"


def _exact(module: str) -> str:
    return f"re:^{re.escape(module)}$"


def _patterns(chosen: Iterable[str], others: Iterable[str]) -> list[str]:
    """Few patterns that match all of `chosen` and none of `others`: by part, by role, by name."""
    left, others = sorted(chosen), sorted(others)
    patterns: list[str] = []
    candidates = [
        r"re:^mtp\..*",
        "re:.*lm_head$",
        "re:.*embed_tokens$",
        r"re:(.*\.)?visual\..*",
        *(f"re:(.*\\.)?{re.escape(part)}$" for part in sorted({role(name) for name in left})),
        *(_exact(name) if name.startswith("mtp.") else _by_name(name) for name in left),
    ]
    for pattern in candidates:
        if any(matches(pattern, name) for name in left) and not any(
            matches(pattern, name) for name in others
        ):
            patterns.append(pattern)
            left = [name for name in left if not matches(pattern, name)]
    return patterns


def _targets(section: str, members: list[str], others: list[str]) -> list[str]:
    """The section's usual pattern if it selects only its members, else patterns made for them."""
    whole = SECTION_TARGETS.get(section)
    if whole and not any(matches(whole, name) for name in others):
        return [whole]
    return _patterns(members, others)


def from_contents(source: TensorSource) -> dict[str, Any] | None:
    """The quantization_config that describes exactly what a source holds, or None if all is plain.

    The body's most common scheme is the group for "Linear"; lm_head, MTP and embedding get groups
    of their own by regex, as do body matrices of another scheme. What is not packed is ignored by
    regex, so that one config serves every naming. Raises TrimtabError if that cannot be expressed.
    """
    schemes = {name: packed_scheme(source, name)[0] for name in packed_modules(source)}
    if not schemes:
        return None
    plain = [name for name in linear_modules(source) if name not in schemes]
    sections: dict[tuple[str, Scheme], list[str]] = defaultdict(list)
    for name, scheme in schemes.items():
        sections[_section(name), scheme].append(name)
    body = Counter(scheme for name, scheme in schemes.items() if _section(name) == "body")
    main = max(body, key=lambda scheme: (body[scheme], str(scheme))) if body else None
    groups: dict[str, tuple[list[str], Scheme]] = {}
    count: Counter[str] = Counter()
    for section, scheme in sorted(sections, key=lambda key: (key != ("body", main), str(key))):
        count[section] += 1
        name = section if count[section] == 1 else f"{section}_{count[section]}"
        members = sections[section, scheme]
        if (section, scheme) == ("body", main):
            groups[name] = (["Linear"], scheme)
        else:
            others = [other for other in (*schemes, *plain) if other not in members]
            groups[name] = (_targets(section, members, others), scheme)
    embeddings = [name for name in plain_embeddings(source) if name not in schemes]
    ignore = _patterns([*plain, *embeddings], schemes)
    result = build(groups, ignore)
    problems = disagreements(source, {**source.config, "quantization_config": result})
    if problems:
        raise TrimtabError(
            f"no quantization_config describes this checkpoint: {problems[0]}",
            hint="give all members of the module one scheme",
        )
    return result
