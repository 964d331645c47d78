"""What decoding reports: one `Step` at a time, and `Stats` over all of them.

Does not cover gates or comparisons (`calibration`). Invariant: the last step of a request counts in
full, whatever a stop id or the limit cut from its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """What one step committed.

    tokens: cut at a stop id and at the limit; drafted, accepted: counts of the whole step, uncut.
    The first step of a request is its prefill: one token, none drafted.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int


@dataclass
class Stats:
    """Counts over all requests since creation; a prefill's token is counted in `tokens` only.

    drafted_at, accepted_at: by draft position; a position counts as accepted when all before it
    are. seconds: of drafting and verification, prefill_seconds: of prompts.
    """

    requests: int = 0
    steps: int = 0
    tokens: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """(accepted + one per step) / steps, the last step counted in full; nan without steps."""
        return (self.accepted + self.steps) / self.steps if self.steps else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Tokens given out by verification steps over the seconds they took."""
        given = self.tokens - self.requests
        return given / self.seconds if self.seconds > 0 else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """accepted / drafted at each draft position."""
        pairs = zip(self.accepted_at, self.drafted_at, strict=True)
        return [a / d if d else float("nan") for a, d in pairs]

    def count(self, step: Step) -> None:
        """Add a verification step."""
        self.steps += 1
        self.tokens += len(step.tokens)
        self.accepted += step.accepted
        grow = step.drafted - len(self.drafted_at)
        if grow > 0:
            self.drafted_at += [0] * grow
            self.accepted_at += [0] * grow
        for i in range(step.drafted):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < step.accepted
