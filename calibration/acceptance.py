"""How well quantized drafters draft beside their 16-bit selves, by replay on one target.

Does: replay MTP and DFlash drafters over the same continuations of the target that ships, paired
by prompt. Does not: generate the continuations, load drafters, or judge.

Inputs: `TeacherForced` of greedy and of sampled continuations, drafters in both precisions.
Outputs: `Measured` figures by statistic, each with both drafters' full replay in its detail.

Invariant: both drafters of a figure see the same target, prompts and continuations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from calibration.intervals import rate_ratio_interval
from calibration.measured import Measured
from calibration.metrics import coverage
from calibration.replay import Replay, replay_dflash, replay_mtp, require_comparable

if TYPE_CHECKING:
    from artifacts.runtime.dflash import Drafter
    from artifacts.runtime.draft_head import DraftHead
    from artifacts.runtime.mtp import MtpHead
    from calibration.teacher_forced import TeacherForced


def paired(quantized: Replay, reference: Replay) -> Measured:
    """Pooled tokens per step of one replay over another's, resampled by prompt."""
    require_comparable(quantized, reference)
    interval = rate_ratio_interval(
        quantized.tokens,
        quantized.steps,
        reference.tokens,
        reference.steps,
        quantized.prompt_ids,
    )
    return Measured.of(
        interval,
        len(quantized.prompt_ids),
        tokens_per_step=quantized.tokens_per_step,
        tokens_per_step_16bit=reference.tokens_per_step,
        quantized=quantized.to_json(),
        reference=reference.to_json(),
    )


def mtp_figure(
    forced: TeacherForced,
    mtp: MtpHead,
    reference: MtpHead,
    depth: int,
    *,
    limit: int,
    draft_head: DraftHead | None = None,
) -> Measured:
    """Quantized over 16-bit MTP at `depth`, both with the full head; the draft vocabulary's
    tokens per step stand in the detail."""
    measured = paired(
        replay_mtp(forced, mtp, depth, limit=limit),
        replay_mtp(forced, reference, depth, limit=limit),
    )
    if draft_head is not None:
        reduced = replay_mtp(forced, mtp, depth, limit=limit, draft_head=draft_head)
        measured.detail["draft_vocab"] = reduced.to_json()
    return measured


def drafter_figure(
    forced: TeacherForced, drafter: Drafter, reference: Drafter, *, limit: int
) -> Measured:
    """Quantized over 16-bit drafter, along the selector's greedy walk."""
    return paired(
        replay_dflash(forced, drafter, limit=limit),
        replay_dflash(forced, reference, limit=limit),
    )


def coverage_figure(
    ids: Sequence[int], outputs: Sequence[Sequence[int]], domains: Sequence[str]
) -> Measured:
    """`draft_vocab_coverage`: share of output tokens whose id the draft vocabulary holds."""
    whole = coverage(ids, outputs)
    by_domain = {
        domain: coverage(ids, [o for o, d in zip(outputs, domains, strict=True) if d == domain])
        for domain in sorted(set(domains))
    }
    return Measured(
        point=whole.share,
        sample=int(whole.total_o.sum()),
        detail={
            "ids": len(ids),
            "by_domain": {domain: cover.share for domain, cover in by_domain.items()},
        },
    )
