"""Gates pass only on a finite figure with its bound on the right side and a large enough sample."""

from __future__ import annotations

import json
import math

import pytest

from pipeline.gates import Figure, Gate, Gates, coverage_gate, judge, judge_all


def gate(bound: str = "point", side: str = "at_most") -> Gate:
    return Gate(
        statistic="kl",
        side=side,  # type: ignore[arg-type]
        unit="tokens",
        threshold=0.5,
        bound=bound,  # type: ignore[arg-type]
        minimum_sample=100,
    )


@pytest.mark.parametrize(
    ("bound", "side", "figure", "passed", "reason"),
    [
        ("point", "at_most", Figure(point=0.5, sample=100), True, "at most 0.5"),
        ("point", "at_most", Figure(point=0.51, sample=100), False, "must be at most 0.5"),
        ("point", "at_least", Figure(point=0.5, sample=100), True, "at least 0.5"),
        ("point", "at_least", Figure(point=0.49, sample=100), False, "must be at least 0.5"),
        (
            "point",
            "at_most",
            Figure(point=0.1, sample=99),
            False,
            "measured on 99 tokens, the gate",
        ),
        ("point", "at_most", None, False, "kl was not measured"),
        ("point", "at_most", Figure(point=math.nan, sample=100), False, "kl is nan"),
        ("point", "at_most", Figure(point=-math.inf, sample=100), False, "kl is -inf"),
        ("upper", "at_most", Figure(point=0.1, sample=100), False, "has no upper bound"),
        ("upper", "at_most", Figure(point=0.1, upper=0.6, sample=100), False, "upper 0.6"),
        ("upper", "at_most", Figure(point=0.9, upper=0.4, sample=100), True, "upper 0.4"),
        ("lower", "at_least", Figure(point=0.9, lower=0.4, sample=100), False, "lower 0.4"),
    ],
)
def test_verdicts(bound: str, side: str, figure: Figure | None, passed: bool, reason: str) -> None:
    verdict = judge("g", gate(bound, side), figure)
    assert verdict.passed is passed
    assert reason in verdict.reason
    json.dumps(verdict.as_dict(), allow_nan=False)


def test_every_gate_is_judged_in_order() -> None:
    gates = {"b": gate(), "a": coverage_gate(0.9, 10)}
    figures = {"kl": Figure(point=0.1, sample=100)}
    verdicts = judge_all(gates, figures)
    assert [(v.gate, v.passed) for v in verdicts] == [("b", True), ("a", False)]


def test_bounds_of_one_statistic_have_no_weaker_point() -> None:
    gates = Gates()
    assert gates.lm_head_kl.statistic == gates.lm_head_kl_upper.statistic
    assert gates.lm_head_kl_upper.threshold >= gates.lm_head_kl.threshold
    assert gates.mtp_acceptance_lower.threshold <= gates.mtp_acceptance.threshold
