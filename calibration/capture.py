"""Hessians of lm_head, MTP and drafter matrices in one streaming pass over sampled traffic.

Does: teacher-force the quantized body over the traffic chunk by chunk, follow the anchors that
greedy draft-and-verify would visit, and sum x x^T of every matrix over the inputs it reads there.
Does not: keep rows, dump states (but see `states` for the held-out sample), or solve.

Inputs: target (quantized body), `Traffic`, and where wanted the 16-bit MTP head and drafter.
Output: `Captured`: `HessianSum`s by name, row counts, the results of the self-checks.

Invariant: a row is in a sum because serving would feed it to that matrix, and it is in it once:
- lm_head: the state after the final norm of each position whose next token is an output token;
- MTP: the refresh row of each processed position, and the chain rows of depth 2 to k at each
  visited anchor, those after a rejection included;
- drafter `fc`: each processed position's taps;
- drafter layers: all query rows (anchor and masks) of each visited block, no context rows.
Processed are all positions but the last of a sequence. `CaptureRows` can leave prompt rows out.

Axes: b sequence of the chunk, t row or position, k inputs of a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from artifacts.names import role
from calibration.collector import Collector
from calibration.drafting import DFlashDrafts, Drafts, MtpDrafts, walk
from calibration.hessian import HessianSum
from calibration.self_check import CheckResult, SelfCheck
from calibration.teacher_forced import Chunk, TeacherForced
from calibration.traffic import Progress, Traffic

if TYPE_CHECKING:
    from artifacts.runtime.dflash import Drafter
    from artifacts.runtime.linear import Linear
    from artifacts.runtime.mtp import MtpHead
    from artifacts.runtime.target import Target

DRAFTER_PREFIX = "drafter."  # before the drafter's own module names, which say `layers.0...`
QUANTIZED_ROLES = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"}
)
CHUNK_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class CaptureRows:
    """Whether rows at prompt positions count, besides those of the output.

    Attributes:
        lm_head: states of prompt positions: the head runs on none of them in serving.
        mtp: refresh rows of prompt positions: serving runs them at prefill.
        context: taps of prompt positions, for the drafter's fc: likewise.
    """

    lm_head: bool = False
    mtp: bool = True
    context: bool = True


@dataclass(frozen=True, kw_only=True)
class Captured:
    """The sums by module name and what went into them.

    Attributes:
        sums: names that read one tensor (q, k, v; gate, up) share one object.
        counts: rows of each kind, anchors visited and drafts accepted there.
        check: differences that the self-checks found.
    """

    sums: dict[str, HessianSum]
    counts: dict[str, int]
    check: CheckResult

    def to_json(self) -> dict[str, Any]:
        """Counts and checks as JSON values."""
        return {
            "counts": self.counts,
            "rows": {name: total.rows for name, total in sorted(self.sums.items())},
            "check": self.check.to_json(),
        }


def capture(
    target: Target,
    traffic: Traffic,
    *,
    mtp: MtpHead | None = None,
    depth: int = 3,
    drafter: Drafter | None = None,
    draftable_v: torch.Tensor | None = None,
    rows: CaptureRows | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    check_share: float = 0.01,
    source: str = "",
    progress: Progress | None = None,
) -> Captured:
    """One pass over the traffic.

    Args:
        target: the body that ships (quantized), with the 16-bit head.
        traffic: the target's own sampled outputs.
        mtp: the 16-bit MTP head, drafting chains of `depth`.
        drafter: the 16-bit drafter, drafting greedy blocks.
        draftable_v: bool [v], ids that may be drafted; None for all.
        rows: which prompt rows count.
        chunk_tokens: padded tokens at a time; bounds the memory.
        check_share: share of the prompts, one at least, that is run again alone.
        source: where the rows come from, for the ledger.
        progress: called with sequences done and in all.

    Raises:
        TrimtabError: a row that is not finite (naming the prompt), a state that differs when its
            prompt runs alone, or states that do not give the model's logits.
    """
    forced = TeacherForced(
        target,
        traffic,
        tap_ids=tuple(drafter.tap_ids) if drafter is not None else (),
        chunk_tokens=chunk_tokens,
        keep_bytes=0,
    )
    check = SelfCheck(target, traffic, check_share)
    running = _Pass(
        prompt_ids=[e.id for e in traffic.prompts.entries],
        mtp=mtp,
        depth=depth,
        drafter=drafter,
        draftable_v=draftable_v,
        rows=rows or CaptureRows(),
        source=source,
    )
    for chunk in forced:
        running.add(chunk)
        check(chunk)
        if progress is not None:
            progress(running.counts["sequences"], len(traffic))
    return running.result(check.result())


def _quantized(linears: Iterable[Linear]) -> list[str]:
    """Names of the matrices among these that a build quantizes."""
    return [name for x in linears for name, _ in x.parts if role(name) in QUANTIZED_ROLES]


def _expected_rows(name: str, counts: Counter[str]) -> int:
    """The rows that the matrix `name` must have seen, from anchors and masks alone."""
    if name == "lm_head":
        return counts["lm_head_rows"]
    if name == DRAFTER_PREFIX + "fc":
        return counts["drafter_context_rows"]
    if name.startswith(DRAFTER_PREFIX):
        return counts["drafter_query_rows"]
    return counts["mtp_refresh_rows"] + counts["mtp_chain_rows"]


def _sequence_bt(chunk: Chunk) -> torch.Tensor:
    """int64 [b, t]: which sequence a position belongs to."""
    rows_b = torch.arange(len(chunk.rows), device=chunk.ids_bt.device)
    return rows_b[:, None].expand(chunk.ids_bt.shape)


def _counted(chunk: Chunk, prompt_rows: bool) -> torch.Tensor:
    """bool [b, t]: processed positions, those of the prompt only when asked for."""
    return chunk.processed_bt() if prompt_rows else chunk.answering_bt()


class _Pass:
    """The collectors and counts of one pass, chunk by chunk."""

    def __init__(
        self,
        *,
        prompt_ids: Sequence[str],
        mtp: MtpHead | None,
        depth: int,
        drafter: Drafter | None,
        draftable_v: torch.Tensor | None,
        rows: CaptureRows,
        source: str,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._prompt_ids = prompt_ids
        self._mtp, self._depth, self._drafter = mtp, depth, drafter
        self._draftable_v = draftable_v
        self._rows = rows
        self._head = Collector("", ("lm_head",), source)
        self._mtp_sums = Collector("", _quantized(mtp.linears() if mtp else ()), source)
        self._drafter_sums = Collector(
            DRAFTER_PREFIX, _quantized(drafter.linears() if drafter else ()), source
        )

    def add(self, chunk: Chunk) -> None:
        """Sum the chunk's rows of every matrix."""
        names = [self._prompt_ids[r] for r in chunk.rows]
        self._add_head(chunk, names)
        if self._mtp is not None:
            self._add_mtp(self._mtp, chunk, names)
        if self._drafter is not None:
            self._add_drafter(self._drafter, chunk, names)
        self.counts["sequences"] += len(chunk.rows)
        self.counts["tokens"] += int(chunk.lengths_b.sum())

    def result(self, check: CheckResult) -> Captured:
        """The sums, once their rows agree with what anchors and masks say."""
        collectors = (self._head, self._mtp_sums, self._drafter_sums)
        sums = {name: total for c in collectors for name, total in c.finish().items()}
        for name, total in sums.items():
            if total.rows != _expected_rows(name, self.counts):
                raise AssertionError(f"{name}: {total.rows} rows, counts {dict(self.counts)}")
        return Captured(sums=sums, counts=dict(sorted(self.counts.items())), check=check)

    def _add_head(self, chunk: Chunk, names: Sequence[str]) -> None:
        sums, keep_bt = self._head, _counted(chunk, self._rows.lm_head)
        sums.expect(names, _sequence_bt(chunk)[keep_bt])
        sums("lm_head", chunk.hidden_bth[keep_bt])
        sums.flush()
        self.counts["lm_head_rows"] += int(keep_bt.sum())

    def _add_mtp(self, mtp: MtpHead, chunk: Chunk, names: Sequence[str]) -> None:
        from artifacts.runtime.linear import observe

        sums, chained = self._mtp_sums, self._depth - 1
        processed_bt, keep_bt = chunk.processed_bt(), _counted(chunk, self._rows.mtp)
        sums.expect(names, _sequence_bt(chunk)[processed_bt], keep_bt[processed_bt])
        with observe(mtp.linears(), sums):
            drafts = MtpDrafts(
                mtp, chunk, self._depth, draftable_v=self._draftable_v, every_row=True
            )
            anchors, accepted = _follow(chunk, _Observed(drafts, sums, names, 1, chained))
        sums.flush()
        self.counts["mtp_refresh_rows"] += int(keep_bt.sum())
        self.counts["mtp_chain_rows"] += anchors * chained
        self.counts["mtp_anchors"] += anchors
        self.counts["mtp_accepted"] += accepted

    def _add_drafter(self, drafter: Drafter, chunk: Chunk, names: Sequence[str]) -> None:
        from artifacts.runtime.linear import observe

        sums, block = self._drafter_sums, drafter.block_size
        keep_bt = _counted(chunk, self._rows.context)
        sums.expect(names, _sequence_bt(chunk).reshape(-1), keep_bt.reshape(-1))
        with observe(drafter.linears(), sums):
            drafts = DFlashDrafts(drafter, chunk, draftable_v=self._draftable_v)
            anchors, accepted = _follow(chunk, _Observed(drafts, sums, names, block, 1))
        sums.flush()
        self.counts["drafter_context_rows"] += int(keep_bt.sum())
        self.counts["drafter_query_rows"] += anchors * block
        self.counts["drafter_anchors"] += anchors
        self.counts["drafter_accepted"] += accepted


class _Observed:
    """Drafts that announce to the collector whose rows it is about to see, all of which count."""

    def __init__(
        self, inner: Drafts, sums: Collector, names: Sequence[str], rows: int, calls: int
    ) -> None:
        """rows: of each anchor in a call of a matrix; calls: of each matrix in a round."""
        self.size = inner.size
        self._inner = inner
        self._sums = sums
        self._names = names
        self._rows, self._calls = rows, calls

    def accept(
        self, rows_a: torch.Tensor, positions_a: torch.Tensor, truth_as: torch.Tensor
    ) -> torch.Tensor:
        sequence_t = rows_a.repeat_interleave(self._rows).repeat(self._calls)
        self._sums.expect(self._names, sequence_t)
        return self._inner.accept(rows_a, positions_a, truth_as)


def _follow(chunk: Chunk, drafts: Drafts) -> tuple[int, int]:
    """Anchors visited and drafts accepted along the chunk."""
    anchors = accepted = 0
    for step in walk(chunk, drafts):
        anchors += len(step.rows_a)
        accepted += int(step.accepted_a.sum())
    return anchors, accepted
