"""From a model's generation_config to the settings that its traffic is sampled with.

Does: temperature, top_k, top_p and stop ids, with absent fields off, and the refusal of what the
runtime does not compute. Does not: sample. Imports no torch, since plans are made without it;
`artifacts.runtime.sampling` refuses the same fields when a build is served.

Input: parsed JSON. Output: a dict that stands in the traffic's header.

Invariant: no library's default ever enters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifacts.errors import TrimtabError

SAMPLING_FIELDS = ("temperature", "top_k", "top_p")
# Fields that change the law of the output and that the runtime does not compute, with the value
# at which they do nothing.
NEUTRAL: dict[str, float | int | None] = {
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
}
GREEDY: dict[str, float | int | None] = {"temperature": 0.0, "top_k": None, "top_p": None}


def resolve_sampling(
    generation_config: Mapping[str, Any], override: Mapping[str, Any] | None = None
) -> dict[str, float | int | None]:
    """Temperature, top_k and top_p to sample with; None means off, never a library's default.

    Args:
        generation_config: the model's generation_config.json.
        override: the recipe's `traffic.sampling`, which replaces the config's settings as a whole.

    Raises:
        TrimtabError: the config only decodes greedily and there is no override, a field is unknown
            or out of range, or the config has a setting that the runtime does not compute.
    """
    if override is None:
        if generation_config.get("do_sample") is not True:
            raise TrimtabError(
                "generation_config.json decodes greedily (do_sample is "
                f"{generation_config.get('do_sample')!r}); traffic must be sampled",
                hint="set traffic.sampling in the recipe, for instance temperature: 0.7",
            )
        for name, neutral in NEUTRAL.items():
            value = generation_config.get(name)
            if value is not None and value != neutral:
                raise TrimtabError(
                    f"generation_config.json: {name} = {value!r} is not computed here",
                    hint="set traffic.sampling in the recipe to sample without it",
                )
        given: Mapping[str, Any] = {k: generation_config.get(k) for k in SAMPLING_FIELDS}
        if given["temperature"] is None:
            given = {**given, "temperature": 1.0}  # off: the logits as they are
    else:
        given = override
    unknown = sorted(set(given) - set(SAMPLING_FIELDS))
    if unknown:
        raise TrimtabError(
            f"traffic.sampling: {unknown[0]!r} is none of {', '.join(SAMPLING_FIELDS)}"
        )
    temperature, top_k, top_p = (given.get(name) for name in SAMPLING_FIELDS)
    temperature = 1.0 if temperature is None else temperature
    if temperature < 0 or (override is None and temperature == 0):
        raise TrimtabError(f"sampling: temperature {temperature} is not positive")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 0):
        raise TrimtabError(f"sampling: top_k {top_k!r} is not a positive integer")
    if top_p is not None and not 0 < top_p <= 1:
        raise TrimtabError(f"sampling: top_p {top_p!r} is not in (0, 1]")
    return {
        "temperature": float(temperature),
        "top_k": top_k or None,  # 0 means off in generation_config
        "top_p": None if top_p is None or top_p == 1 else float(top_p),
    }


def resolve_stop_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> list[int]:
    """The ids that end an output: generation_config's eos ids, else the config's.

    Raises:
        TrimtabError: neither names one.
    """
    for part in (generation_config, config, config.get("text_config") or {}):
        eos = part.get("eos_token_id")
        if eos is not None:
            return sorted({int(i) for i in (eos if isinstance(eos, list) else [eos])})
    raise TrimtabError("neither generation_config.json nor config.json names an eos_token_id")
