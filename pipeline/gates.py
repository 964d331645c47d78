"""Gates: which figures a build must reach, where their defaults stand, and how they are judged.

Does: declare every gate once, with its default threshold, bound and minimum sample; say which gates
apply to a recipe; judge measured figures. Does not: measure anything (the stage `validate` does).

Input: `Gates` from the recipe and figures by statistic. Output: one `Verdict` a gate.

Invariant: a gate passes only if its figure was measured, on at least the minimum sample, is finite,
and its stated bound is on the right side; anything else fails and says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Part = Literal["always", "lm_head", "mtp", "drafter", "draft_vocab", "quantized", "stock"]


class Section(BaseModel):
    """Base of every part of a recipe: unknown keys refused, types exact, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Gate(Section):
    """One demand on one figure."""

    statistic: str = Field(description="Name of the figure that is judged (fixed).")
    side: Literal["at_most", "at_least"] = Field(
        description="On which side of the threshold the figure must be (fixed)."
    )
    unit: str = Field(description="What the sample is counted in (fixed).")
    part: Part = Field(
        default="always", description="The gate applies when this part is built (fixed)."
    )
    threshold: float = Field(description="The value the figure is compared with, in its own unit.")
    bound: Literal["point", "lower", "upper"] = Field(
        default="point",
        description="What is compared: the estimate, or an end of its 95 % bootstrap interval.",
    )
    minimum_sample: int = Field(
        ge=1, description="Smallest sample, in `unit`, on which the figure counts."
    )


FIXED = ("statistic", "side", "unit", "part")


def _gate(
    statistic: str,
    side: Literal["at_most", "at_least"],
    threshold: float,
    sample: int,
    unit: str,
    part: Part,
    bound: Literal["point", "lower", "upper"] = "point",
) -> Gate:
    return Gate(
        statistic=statistic,
        side=side,
        threshold=threshold,
        minimum_sample=sample,
        unit=unit,
        part=part,
        bound=bound,
    )


class Gates(Section):
    """Every gate that can be judged; a recipe may change threshold, bound and minimum_sample."""

    structure: Gate = Field(
        default=_gate("structure_problems", "at_most", 0, 1, "builds", "always"),
        description="Problems found in files, headers, names, scales, config and tokenizer.",
    )
    lm_head_kl: Gate = Field(
        default=_gate("lm_head_kl_ratio", "at_most", 0.65, 20_000, "states", "lm_head"),
        description="KL to the 16-bit head: this head's over plain round-to-nearest's.",
    )
    lm_head_kl_upper: Gate = Field(
        default=_gate("lm_head_kl_ratio", "at_most", 0.70, 20_000, "states", "lm_head", "upper"),
        description="The same ratio's upper bootstrap bound by document.",
    )
    body_perplexity: Gate = Field(
        default=_gate("body_excess_ratio", "at_most", 1.0, 20_000, "tokens", "quantized"),
        description="Excess perplexity of the body over 16 bits: GPTQ's over round-to-nearest's.",
    )
    target_perplexity: Gate = Field(
        default=_gate("target_perplexity_ratio", "at_most", 1.05, 20_000, "tokens", "always"),
        description="Held-out perplexity of the whole quantized target over the 16-bit one's.",
    )
    target_kl: Gate = Field(
        default=_gate("target_kl", "at_most", 0.10, 20_000, "tokens", "always"),
        description="Mean KL of the quantized target to the 16-bit one, nats a token.",
    )
    mtp_acceptance: Gate = Field(
        default=_gate("mtp_tokens_per_step_ratio", "at_least", 0.98, 300, "prompts", "mtp"),
        description="Greedy tokens per step with MTP: quantized over 16-bit, paired by prompt.",
    )
    mtp_acceptance_lower: Gate = Field(
        default=_gate(
            "mtp_tokens_per_step_ratio", "at_least", 0.96, 300, "prompts", "mtp", "lower"
        ),
        description="The same ratio's lower bootstrap bound by prompt.",
    )
    mtp_sampled_acceptance: Gate = Field(
        default=_gate("mtp_sampled_ratio", "at_least", 0.95, 100, "prompts", "mtp"),
        description="Sampled acceptance with MTP: quantized over 16-bit, paired by prompt.",
    )
    drafter_acceptance: Gate = Field(
        default=_gate("drafter_tokens_per_step_ratio", "at_least", 0.98, 300, "prompts", "drafter"),
        description="Greedy tokens per step with the drafter: quantized over 16-bit, paired.",
    )
    drafter_acceptance_lower: Gate = Field(
        default=_gate(
            "drafter_tokens_per_step_ratio", "at_least", 0.96, 300, "prompts", "drafter", "lower"
        ),
        description="The same ratio's lower bootstrap bound by prompt.",
    )
    drafter_sampled_acceptance: Gate = Field(
        default=_gate("drafter_sampled_ratio", "at_least", 0.95, 100, "prompts", "drafter"),
        description="Sampled acceptance with the drafter: quantized over 16-bit, paired.",
    )
    loops: Gate = Field(
        default=_gate("loop_share_increase", "at_most", 0.10, 100, "outputs", "always"),
        description="Share of sampled outputs that end in a loop, minus the 16-bit target's share.",
    )
    distinct: Gate = Field(
        default=_gate("distinct_ratio", "at_least", 0.90, 100, "outputs", "always"),
        description="Distinct n-grams of sampled outputs over the 16-bit target's.",
    )
    lossless: Gate = Field(
        default=_gate("greedy_differences", "at_most", 0, 1, "continuations", "always"),
        description="Greedy texts with a drafter that differ from those without.",
    )
    consumer_logits: Gate = Field(
        default=_gate("transformers_logit_difference", "at_most", 1e-3, 1, "tokens", "stock"),
        description="Largest difference of logits between transformers and our runtime, fp32; "
        "not with an int8 embedding, which stock transformers does not load.",
    )

    @model_validator(mode="before")
    @classmethod
    def _merge(cls, given: Any) -> Any:
        """Lay what a recipe says of a gate over that gate's defaults."""
        if not isinstance(given, Mapping):
            return given
        merged: dict[str, Any] = dict(given)
        for name, value in given.items():
            field = cls.model_fields.get(name)
            if field is None or not isinstance(value, Mapping):
                continue
            fixed = [
                key for key in FIXED if key in value and value[key] != getattr(field.default, key)
            ]
            if fixed:
                raise PydanticCustomError(
                    "fixed_key",
                    "{gate}.{key}: is fixed; threshold, bound and minimum_sample can be set",
                    {"gate": name, "key": fixed[0]},
                )
            merged[name] = {**field.default.model_dump(), **value}
        return merged


COVERAGE = "draft_vocab_coverage"  # its threshold is `draft_vocab.floor`, so it stands in no Gates


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured figure: estimate, ends of its 95 % interval (None if not made), sample size."""

    point: float
    sample: int
    lower: float | None = None
    upper: float | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judged gate: what `gates.json` holds, one object a gate."""

    gate: str
    statistic: str
    side: str
    threshold: float
    bound: str
    minimum_sample: int
    unit: str
    value: float | None
    sample: int
    passed: bool
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def coverage_gate(floor: float, minimum_sample: int = 20_000) -> Gate:
    """The gate of the draft vocabulary: coverage of held-out own output, threshold from `floor`."""
    return _gate(COVERAGE, "at_least", floor, minimum_sample, "tokens", "draft_vocab")


def judge(name: str, gate: Gate, figure: Figure | None) -> Verdict:
    """Judge one figure; a missing one, a small sample, a missing bound or a NaN fails."""
    value = None if figure is None else getattr(figure, gate.bound)
    sample = 0 if figure is None else figure.sample
    if figure is None:
        passed, reason = False, f"{gate.statistic} was not measured"
    elif sample < gate.minimum_sample:
        passed = False
        reason = f"measured on {sample} {gate.unit}, the gate asks for {gate.minimum_sample}"
    elif value is None:
        passed, reason = False, f"{gate.statistic} has no {gate.bound} bound"
    else:
        passed, reason = _compare(gate, value)
    finite = value is not None and math.isfinite(value)
    return Verdict(
        gate=name,
        statistic=gate.statistic,
        side=gate.side,
        threshold=gate.threshold,
        bound=gate.bound,
        minimum_sample=gate.minimum_sample,
        unit=gate.unit,
        value=value if finite else None,
        sample=sample,
        passed=passed,
        reason=reason,
    )


def judge_all(gates: Mapping[str, Gate], figures: Mapping[str, Figure]) -> list[Verdict]:
    """One verdict a gate, in the gates' order."""
    return [judge(name, gate, figures.get(gate.statistic)) for name, gate in gates.items()]


def _compare(gate: Gate, value: float) -> tuple[bool, str]:
    if not math.isfinite(value):
        return False, f"{gate.statistic} is {value}"
    good = value <= gate.threshold if gate.side == "at_most" else value >= gate.threshold
    relation = "at most" if gate.side == "at_most" else "at least"
    text = f"{gate.bound} {value:.4g}, must be {relation} {gate.threshold:g}"
    return good, text
