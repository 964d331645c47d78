"""A held-out sample of final hidden states, by which lm_head's KL is measured.

Does: choose positions of held-out traffic, keep their states after the final norm with the prompt
and document of each, save and load. Does not: compute the KL (see `metrics`).

Inputs: a target and held-out `Traffic`. Output: `States`, a safetensors file.

Invariant: which rows are taken depends on the traffic, the count and the seed only.

Axes: t row, h hidden.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from artifacts.checkpoint import load_single, write_single
from artifacts.errors import TrimtabError
from calibration.teacher_forced import CHUNK_TOKENS, TeacherForced
from calibration.traffic import Progress, Traffic

if TYPE_CHECKING:
    from artifacts.runtime.target import Target

HEADER_KEY = "trimtab.states"


@dataclass(frozen=True, kw_only=True)
class States:
    """States of output positions.

    Attributes:
        hidden_th: after the final norm, in the dtype asked for.
        prompt_t: int32, index into `prompt_ids` and `documents`.
        position_t: int32, position in prompt and output end to end.
        prompt_ids: of every prompt of the traffic.
        documents: its document, the unit of the bootstrap.
    """

    hidden_th: torch.Tensor
    prompt_t: torch.Tensor
    position_t: torch.Tensor
    prompt_ids: list[str]
    documents: list[str]

    def groups(self) -> list[str]:
        """The document of each row."""
        return [self.documents[i] for i in self.prompt_t.tolist()]

    def save(self, path: Path) -> None:
        """One file, atomically; the same states give the same bytes."""
        header = {"prompt_ids": self.prompt_ids, "documents": self.documents}
        write_single(
            path,
            {"hidden": self.hidden_th, "prompt": self.prompt_t, "position": self.position_t},
            metadata={HEADER_KEY: json.dumps(header, sort_keys=True)},
        )

    @classmethod
    def load(cls, path: Path) -> States:
        """Read a saved file; raises `TrimtabError` when it is not one."""
        source = load_single(path)
        try:
            header = json.loads(source.metadata[HEADER_KEY])
            return cls(
                hidden_th=source.get("hidden"),
                prompt_t=source.get("prompt"),
                position_t=source.get("position"),
                prompt_ids=list(header["prompt_ids"]),
                documents=list(header["documents"]),
            )
        except (KeyError, ValueError) as error:
            raise TrimtabError(
                f"{path}: not a file of held-out states ({error})",
                hint="run the stage capture again",
            ) from error


def sample_states(
    target: Target,
    traffic: Traffic,
    count: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Progress | None = None,
) -> States:
    """States of `count` positions whose next token is an output token, drawn without replacement.

    Raises:
        TrimtabError: the traffic has fewer such positions than `count`.
    """
    forced = TeacherForced(
        target, traffic, chunk_tokens=chunk_tokens, keep_bytes=0, progress=progress
    )
    available = sum(map(len, traffic.outputs))
    if count > available:
        raise TrimtabError(
            f"held-out states: {count} asked for, the held-out traffic of "
            f"{traffic.prompts.name!r} has {available} output positions",
            hint="add held-out prompts, raise max_new_tokens, or ask for fewer states",
        )
    generator = torch.Generator().manual_seed(seed)
    chosen_r = torch.zeros(available, dtype=torch.bool)  # output positions in the traffic's order
    chosen_r[torch.randperm(available, generator=generator)[:count]] = True
    starts = [0, *accumulate(len(o) for o in traffic.outputs)]
    hidden: list[torch.Tensor] = []
    where: list[torch.Tensor] = []
    for chunk in forced:
        for b, row in enumerate(chunk.rows):
            taken_t = chosen_r[starts[row] : starts[row + 1]].nonzero().squeeze(1)
            at_t = taken_t + int(chunk.prompts_b[b]) - 1
            hidden.append(chunk.hidden_bth[b, at_t].to(dtype))
            where.append(torch.stack([torch.full_like(at_t, row), at_t]))
    hidden_th, where_2t = torch.cat(hidden), torch.cat(where, dim=1)
    if not bool(torch.isfinite(hidden_th).all()):
        bad = int((~torch.isfinite(hidden_th).all(dim=1)).nonzero()[0])
        prompt = traffic.prompts.entries[int(where_2t[0, bad])].id
        raise TrimtabError(f"held-out states: a state of prompt {prompt!r} is not finite")
    order_t = torch.argsort(where_2t[0] * (int(where_2t[1].max()) + 1) + where_2t[1])
    entries = traffic.prompts.entries
    return States(
        hidden_th=hidden_th[order_t],
        prompt_t=where_2t[0, order_t].to(torch.int32),
        position_t=where_2t[1, order_t].to(torch.int32),
        prompt_ids=[e.id for e in entries],
        documents=[e.document for e in entries],
    )
