"""Does a drafter's config fit its tensors and its target? Header level, no torch.

Covers the fields that a consumer would otherwise guess: tap layers, mask token, block, widths. Does
not cover loading (`runtime.config` reads the same fields and refuses the same faults).
Invariant: no default is assumed for any of these fields.
"""

from __future__ import annotations

from typing import Any

from artifacts.checkpoint import TensorSource


def _text(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **(config.get("text_config") or {})}


def check_drafter_config(drafter: TensorSource, target: TensorSource) -> list[str]:
    """Problems of `target_layer_ids`, `mask_token_id`, `block_size`, vocabulary and `fc`."""
    config, host = drafter.config, _text(target.config)
    nested = config.get("dflash_config")
    if not isinstance(nested, dict):
        return ["config.json: dflash_config is missing"]
    problems = _taps(nested, host)
    mask = nested.get("mask_token_id", config.get("mask_token_id"))
    vocab, layers = host.get("vocab_size"), host.get("num_hidden_layers")
    if type(mask) is not int or not 0 <= mask < int(vocab or 0):
        problems.append(f"mask_token_id {mask!r} is not an id of the target's {vocab}")
    if config.get("vocab_size") != vocab:
        problems.append(f"vocab_size {config.get('vocab_size')!r}, the target's is {vocab}")
    if "num_target_layers" in config and config["num_target_layers"] != layers:
        problems.append(f"num_target_layers {config['num_target_layers']}, the target has {layers}")
    block = nested.get("block_size", config.get("block_size"))
    if type(block) is not int or block < 2:
        problems.append(f"block_size {block!r} is not a whole number above 1")
    taps = nested.get("target_layer_ids")
    if isinstance(taps, list):
        problems += _fusion(drafter, len(taps), host, config)
    return problems


def _taps(nested: dict[str, Any], host: dict[str, Any]) -> list[str]:
    """Tap ids: present, whole, each a layer of the target, ascending (the order fc expects)."""
    taps, layers = nested.get("target_layer_ids"), int(host.get("num_hidden_layers") or 0)
    if not isinstance(taps, list) or not taps:
        return ["dflash_config.target_layer_ids is missing; it is never guessed"]
    wrong = [tap for tap in taps if type(tap) is not int or not 0 <= tap < layers]
    if wrong:
        return [f"target_layer_ids has {wrong[0]!r}, the target's layers are 0..{layers - 1}"]
    if taps != sorted(set(taps)):
        return [f"target_layer_ids {taps} are not ascending and distinct"]
    return []


def _fusion(
    drafter: TensorSource, taps: int, host: dict[str, Any], config: dict[str, Any]
) -> list[str]:
    """`fc` maps all taps side by side to the drafter's width."""
    from artifacts.checkpoint import small_ints

    wanted = (config.get("hidden_size"), taps * int(host.get("hidden_size") or 0))
    if "fc.weight" in drafter:
        shape = drafter.info("fc.weight").shape
    elif "fc.weight_shape" in drafter:
        shape = small_ints(drafter, "fc.weight_shape")
    else:
        return ["fc is missing"]
    return [] if shape == wanted else [f"fc is {list(shape)}, {taps} taps need {list(wanted)}"]
