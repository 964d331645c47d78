"""What can be wrong between a drafter and its target, found from configs and headers alone.

Does: taps, mask id, block size, widths, vocabulary, tensors. Does not: raise; every finding becomes
a problem. There is no default for any of these: a wrong tap costs five to ten times the acceptance
and never an error.

Source of the layouts: reference "C.1 Config", "C.3 Checkpoint keys", "D.1", "D.2". H is the hidden
size, V the vocabulary, R the selector's rank.
"""

from __future__ import annotations

from typing import Any

from artifacts.errors import TrimtabError
from pipeline.checks_base import integer
from pipeline.problems import Problems
from pipeline.skeleton import Skeleton

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")


def check_drafter(drafter: Skeleton, base: Skeleton | None, problems: Problems) -> None:
    """Everything about the drafter except group sizes (see `schemes`)."""
    before = len(problems.found)
    names = drafter.config.get("architectures")
    if names not in [[name] for name in ARCHITECTURES]:
        _add(drafter, problems, f"architectures is {names}, must be one of {list(ARCHITECTURES)}")
    inner = drafter.config.get("dflash_config")
    if not isinstance(inner, dict):
        _add(drafter, problems, "config.json has no dflash_config")
        return
    _check_taps(drafter, base, inner, problems)
    _check_mask(drafter, base, inner, problems)
    if base is not None:
        _check_widths(drafter, base, problems)
    _check_tensors(drafter, inner, problems)
    block = inner.get("block_size", drafter.config.get("block_size"))
    if type(block) is not int or block < 2:
        _add(drafter, problems, f"block_size is {block}, must be a whole number of at least 2")
    if base is not None and len(problems.found) == before:
        _check_supported(drafter, base, problems)


def _add(drafter: Skeleton, problems: Problems, text: str, hint: str = "") -> None:
    problems.add(drafter.where, f"{drafter.label}: {text}", hint)


def _check_taps(
    drafter: Skeleton, base: Skeleton | None, inner: dict[str, Any], problems: Problems
) -> None:
    taps = inner.get("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(type(i) is int for i in taps):
        _add(
            drafter,
            problems,
            f"dflash_config.target_layer_ids is {taps}; it has no default",
            "take the drafter's original config.json",
        )
        return
    if sorted(set(taps)) != taps:
        _add(drafter, problems, f"target_layer_ids {taps} are not ascending and distinct")
    layers = integer(base, "num_hidden_layers") if base is not None else None
    if layers is not None:
        outside = [i for i in taps if not 0 <= i < layers]
        if outside:
            _add(
                drafter,
                problems,
                f"target_layer_ids {outside} are outside the target's {layers} layers "
                f"(0 to {layers - 1})",
                "this drafter was trained for another target",
            )
        elif layers - 1 in taps:
            problems.note(drafter.where, f"taps the target's last layer, {layers - 1}")
        declared = drafter.config.get("num_target_layers", inner.get("num_target_layers"))
        if declared is not None and declared != layers:
            _add(
                drafter,
                problems,
                f"num_target_layers is {declared}, the target has {layers} layers",
                "this drafter was trained for another target",
            )
    hidden = integer(drafter, "hidden_size")
    width = (base and integer(base, "hidden_size")) or hidden
    fc = drafter.infos.get("fc.weight")
    if fc is not None and hidden and width and fc.shape != (hidden, len(taps) * width):
        _add(
            drafter,
            problems,
            f"fc.weight is {list(fc.shape)}, {len(taps)} taps of {width} need "
            f"{[hidden, len(taps) * width]}",
        )


def _check_mask(
    drafter: Skeleton, base: Skeleton | None, inner: dict[str, Any], problems: Problems
) -> None:
    mask = inner.get("mask_token_id", drafter.config.get("mask_token_id"))
    vocab = integer(base if base is not None else drafter, "vocab_size")
    if type(mask) is not int:
        _add(drafter, problems, f"mask_token_id is {mask}; it has no default")
    elif vocab is not None and not 0 <= mask < vocab:
        _add(
            drafter,
            problems,
            f"mask_token_id {mask} is outside the target's vocabulary of {vocab} ids",
            "this drafter was trained for another target",
        )


def _check_widths(drafter: Skeleton, base: Skeleton, problems: Problems) -> None:
    for key in ("hidden_size", "vocab_size"):
        own, target = integer(drafter, key), integer(base, key)
        if own is None:
            _add(drafter, problems, f"config.json has no {key}")
        elif target is not None and own != target:
            _add(drafter, problems, f"{key} is {own}, the target's is {target}")


def _check_tensors(drafter: Skeleton, inner: dict[str, Any], problems: Problems) -> None:
    layers = integer(drafter, "num_hidden_layers")
    if layers is None:
        _add(drafter, problems, "config.json has no num_hidden_layers")
        return
    linears = [
        *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    ]
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    norms += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    wanted = ["fc.weight", "hidden_norm.weight", "norm.weight"]
    shapes: dict[str, tuple[int, ...]] = {}
    per_layer = [*linears, *norms]
    if drafter.config.get("architectures") == ["DFlash2DraftModel"]:
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if type(inner.get(key)) is not int:
                _add(drafter, problems, f"dflash_config.{key} is {inner.get(key)}; has no default")
        per_layer += [
            f"{conv}.{leaf}"
            for conv in ("attention_conv", "mlp_conv")
            for leaf in ("base_kernel", "kernel_projection.weight")
        ]
        vocab, rank = drafter.config.get("vocab_size"), inner.get("selector_rank")
        for side in ("predecessor", "successor"):
            wanted.append(f"candidate_selector.{side}_codebook")
            if type(vocab) is int and type(rank) is int:
                shapes[wanted[-1]] = (vocab, rank)
        wanted.append("candidate_selector.hidden_projection.weight")
    wanted += [f"layers.{i}.{leaf}" for i in range(layers) for leaf in per_layer]
    lacking = [name for name in wanted if name not in drafter]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        _add(drafter, problems, f"{lacking[0]}{more} missing", "fetch the drafter again")
    for name, shape in shapes.items():
        if name in drafter and drafter.info(name).shape != shape:
            _add(
                drafter,
                problems,
                f"{name} is {list(drafter.info(name).shape)}, must be {list(shape)}",
            )


def _check_supported(drafter: Skeleton, base: Skeleton, problems: Problems) -> None:
    """The runtime's own reading of both configs, once nothing else is wrong."""
    from artifacts.runtime.config import DrafterConfig, TargetConfig

    try:
        target = TargetConfig.from_dict(base.config)
    except TrimtabError:
        return  # the base's own check reports it
    try:
        DrafterConfig.from_dict(drafter.config, target=target)
    except TrimtabError as error:
        _add(drafter, problems, error.message, error.hint)
