"""The command `generate`: open a build, decode, stream the text, say how it went.

Does: render the prompt by the build's own template, choose the sampling, print text as it comes and
figures to standard error. Does not: decode (see `artifacts.runtime.decode`).

Invariant: the text is the target's own whatever drafts; greedy text does not depend on `draft`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import TrimtabError
from pipeline.environment import choose_device

if TYPE_CHECKING:
    from artifacts.runtime.build import Build
    from artifacts.runtime.decode import Stats
    from artifacts.runtime.sampling import SamplingParams

METHODS = ("none", "mtp", "dflash", "dflash2", "lookup", "dflash2+lookup")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate.

    Attributes:
        prompt: a user's turn, or with `raw` text to go on with.
        draft: one of METHODS; never guessed.
        depth: draft tokens of MTP.
        temperature: instead of the build's generation_config; 0 is greedy, None the build's own.
        max_new_tokens: longest reply.
        seed: of sampling.
        raw: without the chat template.
        device: auto, cpu or cuda.
        stats: a file to which the figures are appended as one JSON line.
    """

    prompt: str
    draft: str = "none"
    depth: int = 3
    temperature: float | None = None
    max_new_tokens: int = 128
    seed: int = 0
    raw: bool = False
    device: str = "auto"
    stats: Path | None = None


def generate_text(build: Path, request: Request) -> str:
    """Stream the reply to standard output, the figures to standard error; the whole reply.

    Raises:
        TrimtabError: the build is damaged, or has not what `draft` needs.
    """
    if request.draft not in METHODS:
        raise TrimtabError(
            f"--draft {request.draft}: must be one of {', '.join(METHODS)}",
            hint="dflash is for v1 drafters, dflash2 for those with a selector",
        )
    if not (build / "target").is_dir():
        raise TrimtabError(
            f"{build}: is not a build (it has no target folder)",
            hint="give WORK/dist, or a folder that `trimtab fetch` filled",
        )
    from artifacts.runtime.build import load_build
    from artifacts.runtime.decode import Decoder

    device, why = choose_device() if request.device == "auto" else (request.device, "")
    loaded = load_build(build, device=device)
    for choice in [f"device {device}: {why}", *loaded.choices] if why else loaded.choices:
        print(choice, file=sys.stderr)
    decoder = Decoder.of(loaded, request.draft, depth=request.depth)
    ids = prompt_ids(loaded.tokenizer, request)
    steps = decoder.generate(
        ids,
        sampling_of(loaded, request),
        request.max_new_tokens,
        seed=request.seed,
        stop_ids=loaded.stop_ids,
    )
    tokens: list[int] = []
    text = ""
    for piece in _pieces(loaded.tokenizer, (step.tokens for step in steps), tokens):
        print(piece, end="", flush=True)
        text += piece
    print(flush=True)
    print(summary(request, decoder.stats), file=sys.stderr)
    if request.stats is not None:
        with request.stats.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(stats_line(request, decoder.stats)) + "\n")
    return text


def prompt_ids(tokenizer: Any, request: Request) -> list[int]:
    """Token ids of the prompt, by the build's chat template unless it is raw."""
    if request.raw:
        ids = tokenizer(request.prompt, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": request.prompt}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    if not ids:
        raise TrimtabError("--prompt: encodes to no token at all", hint="give some text")
    return [int(i) for i in ids]


def sampling_of(build: Build, request: Request) -> SamplingParams:
    """The build's own sampling, or only the temperature that was asked for."""
    from artifacts.runtime.sampling import SamplingParams

    if request.temperature is None:
        return build.sampling
    return SamplingParams(temperature=request.temperature)


def _pieces(tokenizer: Any, steps: Iterator[tuple[int, ...]], tokens: list[int]) -> Iterator[str]:
    """Text as it becomes certain: a character cut between tokens waits for its rest."""
    shown = ""
    for step in steps:
        tokens.extend(step)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if text.endswith("\ufffd") or not text.startswith(shown):
            continue
        yield text[len(shown) :]
        shown = text
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if text != shown and text.startswith(shown):
        yield text[len(shown) :]


def summary(request: Request, stats: Stats) -> str:
    """The figures in a line or two."""
    line = (
        f"draft {request.draft}: {stats.tokens} tokens in {stats.steps} steps, "
        f"{stats.tokens_per_step:.2f} tokens per step, {stats.tokens_per_second:.1f} a second"
    )
    if stats.acceptance_by_position:
        shares = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position)
        line += f"\nacceptance by position: {shares}"
    return line


def stats_line(request: Request, stats: Stats) -> dict[str, Any]:
    """The figures as `trimtab report --stats` reads them; `tokens` are those of counted steps."""
    return {
        "draft": request.draft,
        "tokens": stats.accepted + stats.steps,
        "steps": stats.steps,
        "seconds": stats.seconds,
        "drafted_at": stats.drafted_at,
        "accepted_at": stats.accepted_at,
    }
