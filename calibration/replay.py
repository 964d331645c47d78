"""Acceptance by replay: draft-and-verify against cached continuations of the same target.

Does: replay MTP chains and DFlash or DFlash2 blocks over a teacher-forced traffic, pool tokens per
step, acceptance by position, by domain and by prompt. Does not: decode (the cross-check on a few
prompts with the real decoder is `validate`'s), compute intervals (see `intervals`), gate.

Inputs: a `TeacherForced` (computed once, shared by all variants) and a drafter or an MTP head.
Output: a `Replay`.

Invariant: replay counts what decoding with the same greedy drafts would count on the same
continuation: greedy continuations for greedy acceptance; sampled ones for capture's anchors.

Counting: the first output token comes from the prefill and is no step's. A step commits its
accepted drafts and one more token; the last step counts in full, also beyond limit and stop id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from artifacts.errors import TrimtabError
from calibration.drafting import DFlashDrafts, Drafts, MtpDrafts, Step, walk
from calibration.teacher_forced import Chunk, TeacherForced
from calibration.traffic import Progress

if TYPE_CHECKING:
    import torch

    from artifacts.runtime.dflash import Drafter
    from artifacts.runtime.draft_head import DraftHead
    from artifacts.runtime.mtp import MtpHead


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay counted; all lists by prompt are in the traffic's order.

    Attributes:
        method: "mtp", "dflash walk" or "dflash argmax".
        depth: drafts a step.
        prompt_ids: id of each prompt.
        domains: domain of each prompt.
        accepted: accepted drafts of each step, by prompt.
        known: drafts of each step that the continuation could judge, by prompt.
        conditions: template hash, share of thinking prompts, languages, sampling, target: figures
            under other conditions are not comparable.
    """

    method: str
    depth: int
    prompt_ids: list[str]
    domains: list[str]
    accepted: list[list[int]]
    known: list[list[int]]
    conditions: dict[str, Any]

    @property
    def steps(self) -> list[int]:
        """Steps by prompt."""
        return [len(row) for row in self.accepted]

    @property
    def tokens(self) -> list[int]:
        """Tokens committed by the steps, by prompt."""
        return [sum(row) + len(row) for row in self.accepted]

    @property
    def tokens_per_step(self) -> float:
        """Pooled: all tokens over all steps; 0 without a step."""
        return sum(self.tokens) / max(sum(self.steps), 1)

    def by_domain(self) -> dict[str, float]:
        """Tokens per step, pooled over each domain's prompts."""
        found = {}
        for domain in sorted(set(self.domains)):
            rows = [a for a, d in zip(self.accepted, self.domains, strict=True) if d == domain]
            steps = sum(map(len, rows))
            found[domain] = (sum(map(sum, rows)) + steps) / max(steps, 1)
        return found

    def cumulative(self) -> list[float]:
        """By position 1..depth: share of the judged steps in which this draft was accepted."""
        return [
            _share([a >= s for a, k in self._pairs() if k >= s]) for s in range(1, self.depth + 1)
        ]

    def conditional(self) -> list[float]:
        """By position 1..depth: the same, among steps whose earlier drafts were all accepted."""
        return [
            _share([a >= s for a, k in self._pairs() if k >= s and a >= s - 1])
            for s in range(1, self.depth + 1)
        ]

    def to_json(self) -> dict[str, Any]:
        """The figures, without the lists by step."""
        return {
            "method": self.method,
            "depth": self.depth,
            "prompts": len(self.prompt_ids),
            "steps": sum(self.steps),
            "tokens": sum(self.tokens),
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_step_by_domain": self.by_domain(),
            "acceptance_cumulative": self.cumulative(),
            "acceptance_conditional": self.conditional(),
            "conditions": self.conditions,
        }

    def _pairs(self) -> list[tuple[int, int]]:
        return [
            (a, k)
            for accepted, known in zip(self.accepted, self.known, strict=True)
            for a, k in zip(accepted, known, strict=True)
        ]


def replay_mtp(
    forced: TeacherForced,
    mtp: MtpHead,
    depth: int,
    *,
    draft_head: DraftHead | None = None,
    draftable_v: torch.Tensor | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Replay:
    """Greedy MTP chains.

    Args:
        depth: drafts a step.
        draft_head: restricts the drafts to a draft vocabulary; None for the head that `mtp` has.
        draftable_v: bool [v], ids that may be drafted; None for all.
        limit: as in `replay_dflash`.
    """

    def make(chunk: Chunk) -> Drafts:
        return MtpDrafts(mtp, chunk, depth, draft_head, draftable_v=draftable_v)

    return _replay(forced, "mtp", depth, make, limit, progress)


def replay_dflash(
    forced: TeacherForced,
    drafter: Drafter,
    *,
    mode: str = "walk",
    draftable_v: torch.Tensor | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Replay:
    """Greedy blocks of a drafter.

    Args:
        mode: "walk" (along DFlash2's selector; v1 has independent rows) or "argmax".
        draftable_v: bool [v], ids that may be drafted; None for all.
        limit: start no step once this many output tokens are committed. Give continuations that
            are longer by the block, and the last step is judged in full, as in decoding.

    Raises:
        TrimtabError: the pass kept other taps than the drafter reads.
    """
    if tuple(drafter.tap_ids) != tuple(forced.tap_ids):
        raise TrimtabError(
            f"the teacher-forced pass kept the outputs of layers {list(forced.tap_ids)}, the "
            f"drafter reads {list(drafter.tap_ids)}",
            hint="run the pass with the drafter's tap ids",
        )

    def make(chunk: Chunk) -> Drafts:
        return DFlashDrafts(drafter, chunk, mode, draftable_v)

    return _replay(forced, f"dflash {mode}", drafter.block_size - 1, make, limit, progress)


def require_comparable(a: Replay, b: Replay, *, force: bool = False) -> list[str]:
    """The conditions in which two replays differ; empty when they may be compared.

    Raises:
        TrimtabError: they differ and `force` is not set, or they ran over other prompts.
    """
    if a.prompt_ids != b.prompt_ids:
        raise TrimtabError("acceptance of two sets of prompts cannot be compared pair by pair")
    keys = sorted(set(a.conditions) | set(b.conditions))
    differ = [
        f"{key}: {a.conditions.get(key)!r} against {b.conditions.get(key)!r}"
        for key in keys
        if a.conditions.get(key) != b.conditions.get(key)
    ]
    if differ and not force:
        raise TrimtabError(
            f"acceptance was measured under other conditions: {'; '.join(differ)}",
            hint="measure both under the same conditions, or pass --force",
        )
    return differ


def conditions(forced: TeacherForced) -> dict[str, Any]:
    """What acceptance depends on besides drafter and target's weights."""
    prompts, header = forced.traffic.prompts, forced.traffic.header
    summary = prompts.summary()
    return {
        "template_sha256": prompts.header.get("template_sha256", ""),
        "thinking_share": summary["thinking_share"],
        "languages": summary["languages"],
        "prompts_sha256": summary["content_sha256"],
        "sampling": header["sampling"],
        "target_dtype": str(forced.target.dtype).removeprefix("torch."),
    }


def _replay(
    forced: TeacherForced,
    method: str,
    depth: int,
    make: Callable[[Chunk], Drafts],
    limit: int | None,
    progress: Progress | None,
) -> Replay:
    traffic = forced.traffic
    accepted: list[list[int]] = [[] for _ in range(len(traffic))]
    known: list[list[int]] = [[] for _ in range(len(traffic))]
    done = 0
    for chunk in forced:
        for step in walk(chunk, make(chunk), limit=limit):
            _record(chunk, step, accepted, known)
        done += len(chunk.rows)
        if progress is not None:
            progress(done, len(traffic))
    entries = traffic.prompts.entries
    return Replay(
        method=method,
        depth=depth,
        prompt_ids=[e.id for e in entries],
        domains=[e.domain for e in entries],
        accepted=accepted,
        known=known,
        conditions=conditions(forced),
    )


def _record(chunk: Chunk, step: Step, accepted: list[list[int]], known: list[list[int]]) -> None:
    columns = (step.rows_a, step.accepted_a, step.known_a)
    for b, a, k in zip(*(c.tolist() for c in columns), strict=True):
        accepted[chunk.rows[b]].append(a)
        known[chunk.rows[b]].append(k)


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / max(len(hits), 1)
