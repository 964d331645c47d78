"""Bootstrap intervals over documents or prompts.

Axes: g groups (documents, prompts), c columns of sums, r resamples.
Covers ratios of sums, ratios of rates, perplexity ratios and means, all paired: a resample draws
whole groups with everything measured on them. Does not cover what is measured (`metrics`).
In: one value per item and the group of each item. Out: `Interval`.
Invariant: equal inputs and seed give equal bounds, and no global random state is touched.

Method: bias-corrected and accelerated bootstrap (BCa; Efron 1987, "Better bootstrap confidence
intervals"), with the jackknife over groups for the acceleration. All statistics are functions of
column sums, so that a resample is one row of a product counts_rg @ sums_gc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from artifacts.errors import TrimtabError

RESAMPLES = 10_000
CHUNK_ELEMENTS = 1 << 22  # resamples x groups held at once

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]  # [..., c] sums -> [...]


@dataclass(frozen=True)
class Interval:
    """A figure with its bounds. value: on the whole sample; level: e.g. 0.95, two-sided."""

    value: float
    low: float
    high: float
    level: float
    groups: int

    def to_json(self) -> dict[str, float | int]:
        """A dict of plain JSON values."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "level": self.level,
            "groups": self.groups,
        }


def group_sums(columns: Sequence[ArrayLike], groups: ArrayLike) -> Floats:
    """Sums [g, c] of columns of per-item values [i], items of one group added up.

    Raises TrimtabError when lengths differ or a value is not finite.
    """
    keys = np.asarray(groups)
    _, inverse = np.unique(keys, return_inverse=True)
    count = int(inverse.max()) + 1 if len(inverse) else 0
    sums = np.zeros((count, len(columns)))
    for index, column in enumerate(columns):
        values = np.asarray(column, dtype=np.float64)
        if values.shape != keys.shape or values.ndim != 1:
            raise TrimtabError(
                f"column {index} has shape {values.shape}, the groups have {keys.shape}"
            )
        if not np.isfinite(values).all():
            raise TrimtabError(f"column {index} has a value that is not finite")
        sums[:, index] = np.bincount(inverse, weights=values, minlength=count)
    return sums


def bootstrap(
    sums_gc: Floats,
    statistic: Statistic,
    *,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """BCa interval of `statistic` of the column sums, resampling groups.

    Raises TrimtabError for fewer than two groups, when the statistic is not finite on the whole
    sample (a denominator of zero), or when it is not once a group is left out.
    """
    count = len(sums_gc)
    if count < 2:
        raise TrimtabError(
            f"an interval needs at least 2 documents or prompts, there are {count}",
            hint="measure on more",
        )
    total_c = sums_gc.sum(axis=0)
    with np.errstate(all="ignore"):
        value = float(statistic(total_c))
        if not np.isfinite(value):
            raise TrimtabError(f"the figure is {value} on the whole sample (sums {total_c})")
        generator = np.random.default_rng(seed)
        weights_g = np.full(count, 1.0 / count)
        step = max(1, CHUNK_ELEMENTS // count)
        parts = []
        for start in range(0, resamples, step):
            counts_rg = generator.multinomial(count, weights_g, size=min(step, resamples - start))
            parts.append(statistic(counts_rg.astype(np.float64) @ sums_gc))
        drawn_r = np.sort(np.concatenate(parts))
        jackknife_g = statistic(total_c - sums_gc)
    drawn_r = drawn_r[np.isfinite(drawn_r)]
    if len(drawn_r) < 0.99 * resamples or not np.isfinite(jackknife_g).all():
        raise TrimtabError(
            f"the figure hangs on a single document or prompt of {count}: without it there is none",
            hint="measure on more",
        )
    low, high = _bca(value, drawn_r, jackknife_g, level)
    return Interval(value, low, high, level, count)


def _bca(value: float, drawn_r: Floats, jackknife_g: Floats, level: float) -> tuple[float, float]:
    """The adjusted percentiles of sorted resampled values."""
    normal = NormalDist()
    size = len(drawn_r)
    below = (float((drawn_r < value).sum()) + 0.5 * float((drawn_r == value).sum())) / size
    bias = normal.inv_cdf(min(max(below, 0.5 / size), 1 - 0.5 / size))
    deviation_g = jackknife_g.mean() - jackknife_g
    spread = float((deviation_g**2).sum()) ** 1.5
    acceleration = float((deviation_g**3).sum()) / (6 * spread) if spread > 0 else 0.0
    bounds = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        z = bias + normal.inv_cdf(tail)
        quantile = normal.cdf(bias + z / (1 - acceleration * z))
        bounds.append(float(np.quantile(drawn_r, quantile)))
    return bounds[0], bounds[1]


def ratio_interval(
    num_a: ArrayLike,
    num_b: ArrayLike,
    groups: ArrayLike,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """sum(num_a) / sum(num_b) over items [i], paired by item, resampled by group."""
    return bootstrap(
        group_sums([num_a, num_b], groups),
        lambda sums: sums[..., 0] / sums[..., 1],
        level=level,
        seed=seed,
        resamples=resamples,
    )


def rate_ratio_interval(
    tokens_a: ArrayLike,
    steps_a: ArrayLike,
    tokens_b: ArrayLike,
    steps_b: ArrayLike,
    groups: ArrayLike,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """(tokens_a / steps_a) / (tokens_b / steps_b), each pooled: the ratio of tokens per step."""
    return bootstrap(
        group_sums([tokens_a, steps_a, tokens_b, steps_b], groups),
        lambda sums: (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3]),
        level=level,
        seed=seed,
        resamples=resamples,
    )


def perplexity_ratio_interval(
    nll_a: ArrayLike,
    nll_b: ArrayLike,
    tokens: ArrayLike,
    groups: ArrayLike,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """exp((sum nll_a - sum nll_b) / sum tokens): how many times a's perplexity is b's. In nats."""
    return bootstrap(
        group_sums([nll_a, nll_b, tokens], groups),
        lambda sums: np.exp((sums[..., 0] - sums[..., 1]) / sums[..., 2]),
        level=level,
        seed=seed,
        resamples=resamples,
    )


def mean_interval(
    values: ArrayLike,
    groups: ArrayLike | None = None,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """The mean of values [i], resampled by group (every item its own group when none are given)."""
    items = np.asarray(values, dtype=np.float64)
    keys = np.arange(len(items)) if groups is None else groups
    return bootstrap(
        group_sums([items, np.ones(len(items))], keys),
        lambda sums: sums[..., 0] / sums[..., 1],
        level=level,
        seed=seed,
        resamples=resamples,
    )
