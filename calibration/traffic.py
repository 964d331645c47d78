"""The target's own outputs on prompt sets, batched, seeded by prompt, resumable by chunk.

Does: generate by fixed chunks, keep each finished chunk in a file of its own, merge them. Does not:
resolve the sampling (see `sampling_settings`), decode (see `artifacts.runtime.batch`), judge the
text (see `metrics`), or teacher-force (see `teacher_forced`).

Inputs: a target, a `PromptSet`, sampling, a seed, a folder. Output: `Traffic`: one file with prompt
and output ids and a header with the resolved sampling. Greedy continuations come from the same
function with temperature 0.

Invariant: a prompt's output depends on the target, the sampling and the prompt's own seed, which is
a hash of the recipe's seed and the prompt's id; being killed between or inside chunks changes
nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import TrimtabError
from calibration.id_lists import Outputs
from calibration.sampling_settings import GREEDY, resolve_sampling, resolve_stop_ids
from calibration.tokensets import (
    Entry,
    PromptSet,
    ids_sha256,
    lengths,
    read_ragged,
    stable_seed,
    write_ragged,
)

if TYPE_CHECKING:
    from artifacts.runtime.sampling import SamplingParams
    from artifacts.runtime.target import Target

__all__ = [
    "GREEDY",
    "Progress",
    "Traffic",
    "own_outputs",
    "resolve_sampling",
    "resolve_stop_ids",
]

Progress = Callable[[int, int], None]
Generate = Callable[..., list[list[int]]]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Prompts and the target's outputs on them, row by row.

    Attributes:
        prompts: the prompt set, in its own order.
        outputs: output ids a prompt, the stop id included where one ended the output.
        header: sampling, seed, stop ids, limits, counts, the key of the run.
        resumed: chunks taken from disk; not saved.
        recomputed: chunk files that were damaged or of another run; not saved.
    """

    prompts: PromptSet
    outputs: list[list[int]]
    header: dict[str, Any]
    resumed: int = field(default=0, compare=False)
    recomputed: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.outputs):
            raise ValueError(f"{len(self.prompts)} prompts, {len(self.outputs)} outputs")

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids at which an output ends."""
        return frozenset(self.header["stop_ids"])

    def sequences(self) -> list[list[int]]:
        """Prompt and output, end to end, a row."""
        return [p + o for p, o in zip(self.prompts.ids, self.outputs, strict=True)]

    def select(self, rows: Sequence[int], name: str | None = None) -> Traffic:
        """The given rows; the header's counts are those of the whole."""
        return Traffic(
            prompts=self.prompts.select(rows, name),
            outputs=[self.outputs[r] for r in rows],
            header=self.header,
        )

    def as_outputs(self) -> Outputs:
        """Output tokens only, for vocabulary counts and diversity."""
        entries = self.prompts.entries
        return Outputs(self.outputs, [e.domain for e in entries], [e.document for e in entries])

    def save(self, path: Path) -> None:
        """Write one safetensors file atomically; the same traffic gives the same bytes."""
        record = {
            "traffic": self.header,
            "prompts": {
                "name": self.prompts.name,
                "kind": self.prompts.kind,
                "header": self.prompts.header,
                "entries": [asdict(e) for e in self.prompts.entries],
            },
            "content_sha256": ids_sha256([*self.prompts.ids, *self.outputs]),
        }
        write_ragged(path, {"prompt": self.prompts.ids, "output": self.outputs}, record)

    @classmethod
    def load(cls, path: Path) -> Traffic:
        """Read a saved file; raises `TrimtabError` when it is damaged."""
        lists, record = read_ragged(path)
        try:
            ids, outputs, about = lists["prompt"], lists["output"], record["prompts"]
            prompts = PromptSet(
                name=about["name"],
                kind=about["kind"],
                ids=ids,
                entries=[Entry(**e) for e in about["entries"]],
                header=about["header"],
            )
            if record["content_sha256"] != ids_sha256([*ids, *outputs]):
                raise ValueError("its ids are not those it was written with")
            return cls(prompts=prompts, outputs=outputs, header=record["traffic"])
        except (KeyError, TypeError, ValueError) as error:
            raise TrimtabError(
                f"{path}: not a traffic file ({error})", hint="run the stage traffic again"
            ) from error


def own_outputs(
    target: Target,
    prompts: PromptSet,
    sampling: Mapping[str, float | int | None],
    *,
    max_new_tokens: int,
    seed: int,
    stop_ids: Sequence[int],
    chunk: int,
    folder: Path,
    identity: str,
    progress: Progress | None = None,
    generate: Generate | None = None,
) -> Traffic:
    """Generate on every prompt, going on from the chunks that `folder` already holds.

    Args:
        sampling: from `resolve_sampling`, or `GREEDY`.
        max_new_tokens: limit of each output.
        seed: the recipe's; a prompt's own seed is a hash of it and of the prompt's id.
        stop_ids: an output ends with the first of them, which it keeps.
        chunk: prompts generated together. Part of the key: with floating point, other batches
            may round otherwise.
        folder: for chunk files, made when absent. Chunks of another run are computed again.
        identity: the hash of what the target was loaded from (the stage's key).
        progress: called with output tokens settled and the most there can be.
        generate: stands in for `artifacts.runtime.batch.generate_batch`.

    Raises:
        TrimtabError: no prompts, or a prompt with an id outside the target's vocabulary.
    """
    if not len(prompts):
        raise TrimtabError(f"set {prompts.name!r} holds no prompts to generate on")
    top = max(max(row) for row in prompts.ids)
    if top >= target.config.vocab_size:
        raise TrimtabError(
            f"set {prompts.name!r}: token id {top} is outside the target's vocabulary of "
            f"{target.config.vocab_size}",
            hint="render the prompts with this model's own tokenizer",
        )
    settings = {
        "sampling": dict(sampling),
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "stop_ids": sorted(stop_ids),
        "chunk": chunk,
    }
    run = _run_key(prompts, settings, identity)
    order = sorted(range(len(prompts)), key=lambda r: (len(prompts.ids[r]), prompts.entries[r].id))
    outputs: list[list[int]] = [[] for _ in order]
    resumed = recomputed = 0
    for number, start in enumerate(range(0, len(order), chunk)):
        rows = order[start : start + chunk]
        path = folder / f"chunk-{number:05d}.safetensors"
        made = _read_chunk(path, run, len(rows))
        if made is None:
            recomputed += path.exists()
            made = _generate(target, prompts.select(rows), settings, generate)
            _write_chunk(path, run, made)
        else:
            resumed += 1
        for row, output in zip(rows, made, strict=True):
            outputs[row] = output
        if progress is not None:
            done = min(start + chunk, len(order))
            progress(done * max_new_tokens, len(order) * max_new_tokens)
    header = {**settings, "run": run, "counts": _counts(prompts, outputs, set(stop_ids))}
    return Traffic(
        prompts=prompts, outputs=outputs, header=header, resumed=resumed, recomputed=recomputed
    )


def _generate(
    target: Target, prompts: PromptSet, settings: Mapping[str, Any], generate: Generate | None
) -> list[list[int]]:
    if generate is None:
        from artifacts.runtime.batch import generate_batch

        generate = generate_batch
    made = generate(
        target,
        prompts.ids,
        _params(settings["sampling"]),
        max_new_tokens=settings["max_new_tokens"],
        seeds=[stable_seed(settings["seed"], e.id) for e in prompts.entries],
        stop_ids=settings["stop_ids"],
    )
    return [[int(i) for i in row] for row in made]


def _params(sampling: Mapping[str, Any]) -> SamplingParams:
    from artifacts.runtime.sampling import SamplingParams

    return SamplingParams(**sampling)


def _run_key(prompts: PromptSet, settings: Mapping[str, Any], identity: str) -> str:
    record = {
        "prompts": [e.id for e in prompts.entries],
        "content": ids_sha256(prompts.ids),
        "settings": settings,
        "identity": identity,
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _write_chunk(path: Path, run: str, outputs: list[list[int]]) -> None:
    write_ragged(path, {"output": outputs}, {"run": run, "content_sha256": ids_sha256(outputs)})


def _read_chunk(path: Path, run: str, rows: int) -> list[list[int]] | None:
    """A finished chunk of this run, or None when it is absent, damaged or of another run."""
    if not path.exists():
        return None
    try:
        lists, header = read_ragged(path)
    except TrimtabError:
        return None
    outputs = lists.get("output", [])
    whole = header.get("content_sha256") == ids_sha256(outputs) and len(outputs) == rows
    return outputs if whole and header.get("run") == run else None


def _counts(
    prompts: PromptSet, outputs: Sequence[Sequence[int]], stop_ids: set[int]
) -> dict[str, Any]:
    stopped = sum(bool(o) and o[-1] in stop_ids for o in outputs)
    return {
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts.ids)),
        "output": lengths(outputs),
        "stopped": stopped,
        "length_limited": len(outputs) - stopped,
    }
