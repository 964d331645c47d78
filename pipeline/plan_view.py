"""A plan as tables: stages, tensors grouped over layers, prompts, notes.

Does: print. Does not: find anything out (see `plan`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline import schemes
from pipeline.events import size
from pipeline.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(plan: Plan, console: Console) -> None:
    """Print everything but the problems, which the caller raises."""
    from rich.markup import escape

    recipe = plan.recipe
    console.print(f"[bold]{escape(recipe.name)}[/bold]  work folder {escape(str(plan.work))}")
    for choice in plan.choices:
        console.print(f"  {escape(choice)}")
    console.print(_stage_table(plan))
    for title, planned in (("base", plan.base), ("drafter", plan.drafter)):
        if planned:
            console.print(_tensor_table(title, planned))
    if plan.rows:
        rows = ", ".join(f"{name} {count}" for name, count in plan.rows.items())
        console.print(f"prompt rows: {escape(rows)}")
    for note in plan.problems.notes:
        console.print(f"note: {escape(note.line())}")
    if not plan.problems.found:
        console.print("no problems found")


def _stage_table(plan: Plan) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="stages", title_justify="left")
    for column in ("stage", "state", "why"):
        table.add_column(column)
    for column in ("writes about", "memory about"):
        table.add_column(column, justify="right")
    for step in plan.steps:
        idle = step.state == "not wanted"
        writes = size(step.stored) if step.state == "cached" else size(step.need.disk)
        resident = size(step.need.memory) if step.need.memory else ""
        table.add_row(
            step.name,
            step.state,
            escape(step.why),
            "" if idle else writes,
            "" if idle else resident,
        )
    disk = sum(step.need.disk for step in plan.to_do)
    memory = max((step.need.memory for step in plan.to_do), default=0)
    table.add_section()
    table.add_row("to do", f"{len(plan.to_do)} stages", "", size(disk), size(memory))
    return table


def _tensor_table(title: str, planned: list[schemes.Planned]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    groups: dict[tuple[str, tuple[int, ...], str], list[schemes.Planned]] = {}
    for item in planned:
        becomes = f"{item.scheme} ({item.reason})" if item.scheme else f"kept: {item.reason}"
        groups.setdefault((schemes.like(item.name), item.shape, becomes), []).append(item)
    table = Table(title=f"tensors of the {title}", title_justify="left")
    table.add_column("name")
    table.add_column("count", justify="right")
    table.add_column("shape")
    table.add_column("becomes")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for (name, shape, becomes), items in sorted(groups.items()):
        table.add_row(
            escape(name),
            str(len(items)),
            "x".join(map(str, shape)),
            escape(becomes),
            size(sum(item.before for item in items)),
            size(sum(item.after for item in items)),
        )
    table.add_section()
    table.add_row(
        "on disk, and in memory when served packed",
        str(len(planned)),
        "",
        "",
        size(sum(item.before for item in planned)),
        size(sum(item.after for item in planned)),
    )
    return table
