"""A measured figure: the point, its 95 % interval and the sample it stands on.

Everything that `validate` reports is one of these, so that no figure travels without its sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from calibration.intervals import Interval


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One figure.

    Attributes:
        point: on the whole sample.
        sample: size of the sample, in the unit of the gate that judges it.
        lower, upper: ends of the 95 % bootstrap interval; None where none was made.
        detail: further plain JSON values: what the figure was made of.
    """

    point: float
    sample: int
    lower: float | None = None
    upper: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, interval: Interval, sample: int, **detail: Any) -> Measured:
        """From an interval."""
        return cls(
            point=interval.value,
            sample=sample,
            lower=interval.low,
            upper=interval.high,
            detail=detail,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        interval = {} if self.lower is None else {"lower": self.lower, "upper": self.upper}
        return {"point": self.point, "sample": self.sample, **interval, **self.detail}
