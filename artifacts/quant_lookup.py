"""Reading a `quantization_config`: which scheme it declares for a module.

Covers finding it in a model's config, the precedence of `ignore`, names, regexes and classes, and
refusing schemes other than symmetric integers by group or channel. Does not cover making one
(`quant_config`) or comparing it with shards (`agreement`). Needs no torch.
Invariant: one answer for one (config, name, class), or an error; never a guess.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from artifacts.errors import TrimtabError
from artifacts.names import matches, matches_any
from artifacts.scheme import Scheme

FORMAT = "pack-quantized"
METHOD = "compressed-tensors"


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of a model's config, at its root or in `text_config`; or itself."""
    if "config_groups" in config:
        return dict(config)
    found = config.get("quantization_config")
    if found is None and isinstance(config.get("text_config"), Mapping):
        found = config["text_config"].get("quantization_config")
    return dict(found) if found else None


def _scheme(group: Mapping[str, Any], name: str) -> Scheme:
    """The scheme of one config group; TrimtabError for one that we cannot read."""
    weights = group.get("weights") or {}
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "channel" if weights.get("group_size") == -1 else "group"
    supported = (
        weights.get("type", "int") == "int"
        and weights.get("symmetric", True)
        and strategy in ("group", "channel")
        and not group.get("input_activations")
        and not group.get("output_activations")
        and weights.get("actorder") in (None, False, "weight", "static")
    )
    if not supported:
        raise TrimtabError(
            f"config group {name!r}: {weights} is not symmetric integer weights by group or "
            "channel",
            hint="only W4A16 and W8A16 pack-quantized checkpoints are supported",
        )
    size = -1 if strategy == "channel" else int(weights.get("group_size") or 0)
    return Scheme(int(weights.get("num_bits", 8)), size)


def _rank(target: str, module: str, class_name: str) -> int | None:
    """0 for an exact name, 1 for a regex, 2 for a class name, None if the target does not match."""
    if not matches(target, module, class_name):
        return None
    if target.startswith("re:"):
        return 1
    return 0 if target == module else 2


def scheme_for(config: Mapping[str, Any], module: str, class_name: str = "Linear") -> Scheme | None:
    """The scheme that a config declares for a module, or None if the module stays as it is.

    `ignore` wins over all targets; an exact name wins over a regex, a regex over a class name.
    `config` is a model's config or a quantization_config. Raises TrimtabError when two groups with
    different schemes match at the same rank, or for a scheme that is not supported.
    """
    quantization = quantization_config(config)
    if quantization is None:
        return None
    if matches_any(quantization.get("ignore") or [], module, class_name):
        return None
    found: dict[int, dict[Scheme, str]] = defaultdict(dict)
    for name, group in quantization["config_groups"].items():
        for target in group["targets"]:
            rank = _rank(target, module, class_name)
            if rank is not None:
                found[rank].setdefault(_scheme(group, name), name)
    if not found:
        return None
    best = found[min(found)]
    if len(best) > 1:
        raise TrimtabError(
            f"{module}: config groups {', '.join(best.values())} match it alike and differ",
            hint="make the targets of the groups disjoint",
        )
    return next(iter(best))
