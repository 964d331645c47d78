"""One table of a build: what it weighs, what it lost, how far its drafters reach.

Does: read `gates.json` and, if the build is sealed, `trimtab.json`; print. Does not: measure or
judge. Every figure comes from these two files, and no speed or acceptance is printed for a build
whose quality gates failed: a claim needs its gate.

What it reads of gates.json: "gates" (verdicts as `pipeline.gates.Verdict.as_dict`) and "figures"
(by statistic, as `calibration.measured.Measured.to_json`). `stats` is a file of JSON lines as
`trimtab generate --stats` writes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.checkpoint import read_json
from artifacts.errors import TrimtabError
from pipeline.events import size

if TYPE_CHECKING:
    from rich.console import Console

ROWS = (
    ("perplexity, held-out text", "target_perplexity_ratio", "perplexity", "{:.3f}"),
    ("lm_head KL (left: round-to-nearest)", "lm_head_kl_ratio", "kl", "{:.5f}"),
    ("KL to 16 bits, nats a token", "target_kl", "point", "{:.4f}"),
    ("draft vocabulary coverage", "draft_vocab_coverage", "point", "{:.2%}"),
    ("outputs that loop", "loop_share_increase", "loop_outputs", "{:.1%}"),
)
"""(label, statistic, key of the build's value in it, format); the 16-bit value has the key with
`_16bit`, round-to-nearest's with `_round_to_nearest`."""

ACCEPTANCE = (
    ("mtp, greedy", "mtp_tokens_per_step_ratio"),
    ("mtp, sampled", "mtp_sampled_ratio"),
    ("drafter, greedy", "drafter_tokens_per_step_ratio"),
    ("drafter, sampled", "drafter_sampled_ratio"),
)

CLAIMS = (
    "structure",
    "target_perplexity",
    "target_kl",
    "body_perplexity",
    "loops",
    "distinct",
)
"""Gates that must have passed before acceptance or tokens per step are printed."""


@dataclass(frozen=True)
class Line:
    """A row of the table: label, 16-bit value, the build's value, remark."""

    label: str
    before: str
    after: str
    remark: str = ""


def lines_of(build: Path, stats: Path | None = None) -> list[Line]:
    """The rows of a build's table.

    Raises:
        TrimtabError: the build has no gates.json.
    """
    if not (build / "gates.json").is_file():
        raise TrimtabError(
            f"{build}: has no gates.json; it was never validated",
            hint="run the stage validate, or give the folder of a build",
        )
    content = read_json(build / "gates.json")
    figures: dict[str, Any] = content.get("figures") or {}
    verdicts: list[dict[str, Any]] = content.get("gates") or []
    lines = _sizes(build)
    for label, statistic, key, form in ROWS:
        figure = figures.get(statistic)
        if figure is not None:
            before = figure.get(f"{key}_16bit", figure.get(f"{key}_round_to_nearest"))
            lines.append(Line(label, _shown(before, form), _shown(figure.get(key), form)))
    failed = [verdict for verdict in verdicts if not verdict.get("passed")]
    blocking = [verdict["gate"] for verdict in failed if verdict["gate"] in CLAIMS]
    drafting = _acceptance(figures) + (_generated(stats) if stats is not None else [])
    if blocking and drafting:
        why = f"not shown: {', '.join(blocking)} failed"
        drafting = [Line(line.label, "", "", why) for line in drafting]
    lines += drafting
    lines.append(Line("gates", "", f"{len(verdicts) - len(failed)} of {len(verdicts)} passed"))
    lines += [Line(f"  failed: {v['gate']}", "", "", str(v.get("reason", ""))) for v in failed]
    return lines


def show_report(build: Path, console: Console, stats: Path | None = None) -> None:
    """Print the table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=str(build), title_justify="left")
    table.add_column("")
    table.add_column("16 bits", justify="right")
    table.add_column("this build", justify="right")
    table.add_column("")
    for line in lines_of(build, stats):
        cells = (line.label, line.before, line.after, line.remark)
        table.add_row(*(escape(cell) for cell in cells))
    console.print(table)


def _acceptance(figures: dict[str, Any]) -> list[Line]:
    """Tokens per step by replay, 16-bit drafter and quantized one, with the ratio's interval."""
    lines = []
    for label, statistic in ACCEPTANCE:
        figure = figures.get(statistic)
        if figure is None:
            continue
        ratio = f"ratio {figure['point']:.3f}"
        if figure.get("lower") is not None:
            ratio += f" ({figure['lower']:.3f} to {figure['upper']:.3f})"
        own, other = figure.get("tokens_per_step"), figure.get("tokens_per_step_16bit")
        lines.append(
            Line(
                f"tokens per step, {label}",
                _shown(other, "{:.3f}"),
                _shown(own, "{:.3f}"),
                f"{ratio}, {figure['sample']} prompts",
            )
        )
    return lines


def _generated(stats: Path) -> list[Line]:
    """Tokens per step of real generations, pooled over the file's lines by way of drafting."""
    try:
        rows = [json.loads(line) for line in stats.read_text(encoding="utf-8").splitlines()]
        pooled: dict[str, list[float]] = {}
        for row in rows:
            sums = pooled.setdefault(str(row["draft"]), [0, 0, 0.0])
            for i, key in enumerate(("tokens", "steps", "seconds")):
                sums[i] += row[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrimtabError(
            f"{stats}: not what `trimtab generate --stats` writes ({type(error).__name__})"
        ) from None
    return [
        Line(
            f"tokens per step, generated with {draft}",
            "",
            f"{tokens / max(steps, 1):.3f}",
            f"{tokens:.0f} tokens, {tokens / max(seconds, 1e-9):.0f} a second",
        )
        for draft, (tokens, steps, seconds) in pooled.items()
    ]


def _sizes(build: Path) -> list[Line]:
    """Bytes of each part, before and after, from the manifest; none if it is not sealed."""
    if not (build / "trimtab.json").is_file():
        return []
    from artifacts.manifest import load

    lines = []
    for name, part in sorted(load(build).parts.items()):
        before = size(part.source_bytes) if part.source_bytes is not None else ""
        lines.append(Line(f"size of {name}", before, size(part.bytes)))
        for section, entry in sorted(part.sections.items()):
            schemes = ", ".join(sorted(entry.schemes, key=lambda s: -entry.schemes[s])[:2])
            lines.append(Line(f"  {section}", "", size(entry.bytes), schemes))
    return lines


def _shown(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, (int, float)) else ""
