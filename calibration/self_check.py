"""Checks of captured states: a prompt alone gives the same, and lm_head of them gives the logits.

Does: run a share of the prompts again, one by one, and compare states and logits. Does not: decide
what happens next; a difference is an error.

Inputs: the target, the traffic, chunks as they are captured. Output: `CheckResult`.

Invariant: the logits compared with are computed from the last block's output by this module's own
norm and product, so states taken before the norm or one block early cannot pass.

Axes: t position, h hidden, v vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from artifacts.errors import TrimtabError
from calibration.teacher_forced import Chunk
from calibration.tokensets import stable_unit
from calibration.traffic import Traffic

if TYPE_CHECKING:
    from artifacts.runtime.target import Target

TOLERANCE = 1e-3  # absolute, in fp32
LOW_PRECISION_TOLERANCE = 0.1  # relative to the largest value, in 16 bits
LOGIT_ROWS = 64  # positions of each prompt whose logits are compared


@dataclass(frozen=True)
class CheckResult:
    """How many prompts were run alone and the largest differences in states and logits."""

    prompts: int
    states_max_difference: float
    logits_max_difference: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values, rounded to what repeats."""
        return {key: float(f"{value:.1e}") for key, value in asdict(self).items()} | {
            "prompts": self.prompts
        }


class SelfCheck:
    """Call it with every chunk; it picks its prompts by a stable hash of their ids."""

    def __init__(self, target: Target, traffic: Traffic, share: float) -> None:
        ids = [e.id for e in traffic.prompts.entries]
        order = sorted(range(len(ids)), key=lambda r: (stable_unit(0, f"check:{ids[r]}"), ids[r]))
        self._rows = set(order[: max(1, round(share * len(order)))])
        self._target = target
        self._ids = ids
        self._states = self._logits = 0.0
        self._done = 0

    @torch.no_grad()
    def __call__(self, chunk: Chunk) -> None:
        """Raises `TrimtabError` naming the prompt, the difference and the tolerance."""
        for b, row in enumerate(chunk.rows):
            if row not in self._rows:
                continue
            length = int(chunk.lengths_b[b])
            hidden_th = chunk.hidden_bth[b, :length]
            alone = self._target.forward(
                chunk.ids_bt[b : b + 1, :length], tap_ids=(self._target.config.num_layers - 1,)
            )
            self._states = max(
                self._states, self._compare(row, "state", hidden_th, alone.hidden_bth[0])
            )
            step = max(1, length // LOGIT_ROWS)
            last_th = alone.taps_bth[0, ::step] if alone.taps_bth is not None else hidden_th
            expected_tv = self._own_logits(last_th)
            logits_tv = self._target.logits(hidden_th[::step])
            self._logits = max(self._logits, self._compare(row, "logit", logits_tv, expected_tv))
            self._done += 1

    def result(self) -> CheckResult:
        """What was compared so far."""
        return CheckResult(self._done, self._states, self._logits)

    def _own_logits(self, last_th: torch.Tensor) -> torch.Tensor:
        """lm_head(final norm(last block's output)), the norm and the product written out here."""
        norm = self._target.norm
        x_th = last_th.float()
        x_th = x_th * torch.rsqrt(x_th.square().mean(dim=-1, keepdim=True) + norm.eps)
        normed_th = (x_th * norm.weight).to(last_th.dtype)
        return (normed_th @ self._target.lm_head.weight.T).float()

    def _compare(self, row: int, what: str, a: torch.Tensor, b: torch.Tensor) -> float:
        difference = float((a.float() - b.float()).abs().max())
        limit = TOLERANCE
        if self._target.dtype != torch.float32:
            limit = LOW_PRECISION_TOLERANCE * float(b.abs().max())
        if not difference < limit:  # NaN fails too
            raise TrimtabError(
                f"capture: prompt {self._ids[row]!r}: a {what} differs by {difference:.3g} from "
                f"the same prompt run alone (at most {limit:.3g})",
                hint="the captured states are not the inputs of lm_head, or the batch leaks "
                "between prompts; this is a bug, please report it",
            )
        return difference
