"""Where a work folder stands: stored stages, their cost, unfinished attempts, the last run.

Does: read the store, telemetry and the newest event log. Does not: check the recipe against the
checkpoint (see `plan`), or write.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import environment as environments
from pipeline.events import duration, read_log, size
from pipeline.folders import file_names
from pipeline.plan import steps_of
from pipeline.recipe import Recipe
from pipeline.stage import Stage
from pipeline.store import Store

if TYPE_CHECKING:
    from rich.console import Console


def last_run(work: Path) -> str:
    """How the newest run ended, in a sentence."""
    logs = sorted((work / "runs").glob("*.jsonl"))
    if not logs:
        return "no run yet"
    events = read_log(logs[-1])
    name = logs[-1].stem
    if not events or events[-1]["event"] != "run_end":
        stage = events[-1].get("stage", "its start") if events else "its start"
        return f"last run {name}: ended without a word, or is at work ({stage})"
    if events[-1]["ok"]:
        return f"last run {name}: done, {len(events[-1]['ran'])} stages run"
    why: dict[str, Any] = next(
        (e for e in reversed(events) if e["event"] in ("failed", "interrupted")), {}
    )
    what, where, text = why.get("event", "failed"), why.get("stage", ""), why.get("text", "")
    return f"last run {name}: {what} {f'in {where}' if where else ''}: {text}".strip(" :")


def show_status(recipe: Recipe, work: Path, stages: Mapping[str, Stage], console: Console) -> None:
    """Print a table of the stages and what else lies in the work folder."""
    from rich.markup import escape
    from rich.table import Table

    environment, _ = environments.resolve(recipe)
    store = Store(work)
    telemetry = store.telemetry()
    table = Table(title=f"{recipe.name} in {work}", title_justify="left")
    for column in ("stage", "state", "why", "size", "took", "peak memory"):
        table.add_column(column)
    steps, entries = steps_of(recipe, store, stages, environment, {}, None)
    for step in steps:
        entry = entries.get(step.name)
        cost = telemetry.get(f"{step.name}/{entry.key}", {}) if entry else {}
        table.add_row(
            step.name,
            step.state,
            escape(step.why),
            size(entry.size) if entry else "",
            duration(cost["seconds"]) if "seconds" in cost else "",
            size(cost["peak_rss_bytes"]) if "peak_rss_bytes" in cost else "",
        )
    console.print(table)
    for stage, partials in store.partials().items():
        total = sum((path / name).stat().st_size for path in partials for name in file_names(path))
        console.print(f"{stage}: {len(partials)} unfinished attempt(s), {size(total)}")
    console.print(escape(last_run(work)))
