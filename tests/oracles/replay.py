"""Slow references of replay: one prompt, one anchor at a time, in plain Python where it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from artifacts.runtime.dflash import ContextKV, Drafter
from artifacts.runtime.linear import observe
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.target import Target


def follow(
    sequence: Sequence[int],
    prompt: int,
    draft: Callable[[int], list[int]],
    *,
    limit: int | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """Anchors visited, drafts accepted and drafts that could be judged, step by step.

    `draft(p)` are the drafts of the anchor at position p, for positions p + 1 on.
    """
    anchors, accepted, known = [], [], []
    anchor = prompt
    while anchor + 1 < len(sequence) and (limit is None or anchor - prompt + 1 < limit):
        drafts = draft(anchor)
        taken = 0
        while (
            taken < len(drafts)
            and anchor + 1 + taken < len(sequence)
            and drafts[taken] == sequence[anchor + 1 + taken]
        ):
            taken += 1
        anchors.append(anchor)
        accepted.append(taken)
        known.append(min(len(drafts), len(sequence) - 1 - anchor))
        anchor += taken + 1
    return anchors, accepted, known


def mtp_chain(target: Target, mtp: MtpHead, prefix: Sequence[int], depth: int) -> list[int]:
    """Greedy chain of the anchor that ends `prefix`, by decoding's own calls at batch 1."""
    hidden_bth = target.forward(torch.tensor([list(prefix)])).hidden_bth
    state = mtp.new_state(1, len(prefix) + depth)
    z_bth = mtp.forward(torch.tensor([list(prefix[1:])]), hidden_bth[:, :-1], state)
    z_bth, drafts = z_bth[:, -1:], []
    for step in range(depth):
        drafts.append(int(mtp.logits(z_bth)[0, 0].argmax()))
        if step + 1 < depth:
            z_bth = mtp.forward(torch.tensor([drafts[-1:]]), z_bth, state)
    return drafts


def dflash_block(
    target: Target, drafter: Drafter, prefix: Sequence[int], *, argmax: bool = False
) -> list[int]:
    """Greedy block of the anchor that ends `prefix`: the context grown token by token, batch 1."""
    anchor = torch.tensor([prefix[-1]])
    context = _context(target, drafter, prefix)
    hidden_bsh = drafter.block(anchor, [len(prefix) - 1], context)
    if argmax:
        found = [int(target.logits(row).argmax()) for row in hidden_bsh[0]]
    else:
        found = drafter.walk(anchor, hidden_bsh).tokens_bs[0].tolist()
    return found


def _context(target: Target, drafter: Drafter, prefix: Sequence[int]) -> ContextKV:
    taps_bth = target.forward(torch.tensor([list(prefix)]), tap_ids=drafter.tap_ids).taps_bth
    assert taps_bth is not None
    context = drafter.new_context(1, len(prefix))
    for t in range(len(prefix) - 1):
        drafter.extend(context, drafter.fuse(taps_bth[:, t : t + 1]))
    return context


class Rows:
    """Input rows by matrix name, kept whole: what a streaming sum must equal."""

    def __init__(self) -> None:
        self.kept: dict[str, list[torch.Tensor]] = {}

    def __call__(self, name: str, rows_tk: torch.Tensor) -> None:
        self.kept.setdefault(name, []).append(rows_tk.double().clone())

    def gram(self, name: str) -> torch.Tensor:
        """X^T X in float64."""
        x_tk = torch.cat(self.kept[name])
        return x_tk.T @ x_tk

    def count(self, name: str) -> int:
        return sum(map(len, self.kept[name]))


def mtp_rows(
    target: Target, mtp: MtpHead, sequence: Sequence[int], prompt: int, depth: int, rows: Rows
) -> int:
    """Observe what serving feeds to the MTP matrices on one sequence; returns the anchors."""
    anchors, _, _ = follow(
        sequence, prompt, lambda p: mtp_chain(target, mtp, sequence[: p + 1], depth)
    )
    ids = torch.tensor([list(sequence)])
    hidden_bth = target.forward(ids).hidden_bth
    with observe(mtp.linears(), rows):  # refresh: every processed position once
        mtp.forward(ids[:, 1:], hidden_bth[:, :-1], mtp.new_state(1, len(sequence)))
    for anchor in anchors:
        state = mtp.new_state(1, len(sequence) + depth)
        z_bth = mtp.forward(ids[:, 1 : anchor + 1], hidden_bth[:, :anchor], state)[:, -1:]
        for _ in range(depth - 1):
            token = mtp.logits(z_bth)[:, 0].argmax(-1, keepdim=True)
            with observe(mtp.linears(), rows):
                z_bth = mtp.forward(token, z_bth, state)
    return len(anchors)


def drafter_rows(
    target: Target, drafter: Drafter, sequence: Sequence[int], prompt: int, rows: Rows
) -> int:
    """Observe what serving feeds to the drafter's matrices on one sequence; returns the anchors."""
    anchors, _, _ = follow(
        sequence, prompt, lambda p: dflash_block(target, drafter, sequence[: p + 1])
    )
    ids = torch.tensor([list(sequence)])
    taps_bth = target.forward(ids, tap_ids=drafter.tap_ids).taps_bth
    assert taps_bth is not None
    with observe([drafter.fc], rows):
        for t in range(len(sequence) - 1):
            drafter.fuse(taps_bth[0, t])
    for anchor in anchors:
        context = _context(target, drafter, sequence[: anchor + 1])
        with observe(drafter.linears(), rows):
            drafter.block(torch.tensor([sequence[anchor]]), [anchor], context)
    return len(anchors)
