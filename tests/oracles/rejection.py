"""Chain rejection for one request, written as the rule reads."""

from __future__ import annotations


def verify_one(
    tokens: list[int],
    laws: list[dict[int, float]],
    p: list[list[float]],
    accept_u: list[float],
    final_u: float,
) -> tuple[int, int]:
    """(accepted, emitted token). laws[i]: q by id; a token of -1 is not drafted."""
    for i, token in enumerate(tokens):
        q = laws[i] if token >= 0 else {}
        if token >= 0 and accept_u[i] < min(1.0, p[i][token] / q[token]):
            continue
        residual = [max(mass - laws[i].get(v, 0.0), 0.0) for v, mass in enumerate(p[i])]
        return i, _draw(residual, final_u)
    return len(tokens), _draw(p[len(tokens)], final_u)


def _draw(weights: list[float], u: float) -> int:
    goal, running = u * sum(weights), 0.0
    for index, weight in enumerate(weights):
        running += weight
        if running > goal:
            return index
    raise AssertionError("nothing to draw from")
