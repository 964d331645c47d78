"""The target's own outputs on prompt sets, batched, seeded by prompt, resumable by chunk.

Does: resolve the sampling from generation_config, generate by fixed chunks, keep each finished
chunk in a file of its own, merge them. Does not: decode (see `artifacts.runtime.batch`), judge the
text (see `metrics`), or teacher-force (see `replay`).

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

Progress = Callable[[int, int], None]
Generate = Callable[..., list[list[int]]]

SAMPLING_FIELDS = ("temperature", "top_k", "top_p")
# Fields that change the law of the output and that the runtime does not compute, with the value
# at which they do nothing.
NEUTRAL: dict[str, float | int | None] = {
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
}


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


def resolve_sampling(
    generation_config: Mapping[str, Any], override: Mapping[str, Any] | None = None
) -> dict[str, float | int | None]:
    """Temperature, top_k and top_p to sample with; None means off, never a library's default.

    Args:
        generation_config: the model's generation_config.json.
        override: the recipe's `traffic.sampling`, which replaces the config's settings as a whole.

    Raises:
        TrimtabError: the config only decodes greedily and there is no override, a field is unknown
            or out of range, or the config has a setting that the runtime does not compute.
    """
    if override is None:
        if generation_config.get("do_sample") is not True:
            raise TrimtabError(
                "generation_config.json decodes greedily (do_sample is "
                f"{generation_config.get('do_sample')!r}); traffic must be sampled",
                hint="set traffic.sampling in the recipe, for instance temperature: 0.7",
            )
        for name, neutral in NEUTRAL.items():
            value = generation_config.get(name)
            if value is not None and value != neutral:
                raise TrimtabError(
                    f"generation_config.json: {name} = {value!r} is not computed here",
                    hint="set traffic.sampling in the recipe to sample without it",
                )
        given: Mapping[str, Any] = {k: generation_config.get(k) for k in SAMPLING_FIELDS}
        if given["temperature"] is None:
            given = {**given, "temperature": 1.0}  # off: the logits as they are
    else:
        given = override
    unknown = sorted(set(given) - set(SAMPLING_FIELDS))
    if unknown:
        raise TrimtabError(
            f"traffic.sampling: {unknown[0]!r} is none of {', '.join(SAMPLING_FIELDS)}"
        )
    temperature, top_k, top_p = (given.get(name) for name in SAMPLING_FIELDS)
    temperature = 1.0 if temperature is None else temperature
    if temperature < 0 or (override is None and temperature == 0):
        raise TrimtabError(f"sampling: temperature {temperature} is not positive")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 0):
        raise TrimtabError(f"sampling: top_k {top_k!r} is not a positive integer")
    if top_p is not None and not 0 < top_p <= 1:
        raise TrimtabError(f"sampling: top_p {top_p!r} is not in (0, 1]")
    return {
        "temperature": float(temperature),
        "top_k": top_k or None,  # 0 means off in generation_config
        "top_p": None if top_p is None or top_p == 1 else float(top_p),
    }


GREEDY: dict[str, float | int | None] = {"temperature": 0.0, "top_k": None, "top_p": None}


def resolve_stop_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> list[int]:
    """The ids that end an output: generation_config's eos ids, else the config's.

    Raises:
        TrimtabError: neither names one.
    """
    for part in (generation_config, config, config.get("text_config") or {}):
        eos = part.get("eos_token_id")
        if eos is not None:
            return sorted({int(i) for i in (eos if isinstance(eos, list) else [eos])})
    raise TrimtabError("neither generation_config.json nor config.json names an eos_token_id")


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
