"""What can be wrong between a recipe and what lies around it: prompts, samples, vocabulary, room.

Does: prompt files and their row counts against limits and gates, the draft vocabulary's size
against the vocabulary and its forced ids, free disk and memory against what the stages will need.
Does not: raise; every finding becomes a problem.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from artifacts.errors import TrimtabError
from pipeline.checks_base import integer
from pipeline.events import size
from pipeline.problems import Problems
from pipeline.recipe import Recipe
from pipeline.sections import PromptSource
from pipeline.skeleton import Skeleton, count_rows

PROMPT_SETS = ("calibration", "calibration_texts", "development", "heldout", "texts")
DRAFT_TILE = 64  # consumers' kernels take rows in tiles of so many


def check_prompts(recipe: Recipe, problems: Problems) -> dict[str, int]:
    """Rows of each local prompt file; problems for missing files, bad lines and too few rows."""
    rows: dict[str, int] = {}
    for name in PROMPT_SETS:
        source: PromptSource | None = getattr(recipe.prompts, name)
        if source is None or source.path is None:
            continue
        try:
            rows[name] = count_rows(source.path)
        except TrimtabError as error:
            problems.add_error(f"prompts.{name}", error)
            continue
        if source.limit is not None and rows[name] < source.limit and not source.allow_shortfall:
            problems.add(
                f"prompts.{name}.limit",
                f"{rows[name]}/{source.limit} rows in {source.path.name}",
                "lower the limit, add rows, or set allow_shortfall",
            )
        if rows[name] == 0:
            problems.add(f"prompts.{name}", f"{source.path.name} has no rows")
    _check_samples(recipe, rows, problems)
    return rows


def _check_samples(recipe: Recipe, rows: dict[str, int], problems: Problems) -> None:
    """Gates that could never be passed for want of a sample."""
    heldout = recipe.prompts.heldout.limit or rows.get("heldout")
    for name, gate in recipe.active_gates().items():
        have = {"prompts": heldout, "states": recipe.capture.heldout_rows}.get(gate.unit)
        what = {"prompts": "prompts.heldout", "states": "capture.heldout_rows"}.get(gate.unit)
        if have is not None and have < gate.minimum_sample:
            problems.add(
                f"gates.{name}",
                f"asks for {gate.minimum_sample} {gate.unit}, {what} gives {have}",
                f"raise {what}, or lower gates.{name}.minimum_sample",
            )
    wanted = recipe.traffic.prompts
    calibration = recipe.prompts.calibration.limit or rows.get("calibration")
    if wanted is not None and calibration is not None and calibration < wanted:
        problems.add("traffic.prompts", f"is {wanted}, prompts.calibration gives {calibration}")


def draft_rows(recipe: Recipe, vocab: int) -> int:
    """Rows asked for: `rows`, or `fraction` of the vocabulary; the stage rounds up to the tile."""
    section = recipe.draft_vocab
    if section is None:
        return 0
    return section.rows if section.rows is not None else round(section.fraction * vocab)


def check_draft_vocab(recipe: Recipe, base: Skeleton, problems: Problems) -> None:
    """The draft vocabulary fits the vocabulary and holds the ids that must be in it."""
    from calibration.id_lists import check_size, special_ids

    section, vocab = recipe.draft_vocab, integer(base, "vocab_size")
    if section is None or not recipe.wants_draft_vocab or vocab is None:
        return
    outside = [token for token in section.force if token >= vocab]
    if outside:
        problems.add("draft_vocab.force", f"has ids {outside}, the vocabulary has {vocab} ids")
    try:
        forced = {*special_ids(base.folder), *section.force}
        rows = draft_rows(recipe, vocab)
        check_size(rows, vocab, len(forced), multiple=DRAFT_TILE, usable=vocab)
    except TrimtabError as error:
        if base.has("tokenizer.json"):
            problems.add_error("draft_vocab", error)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # a broken tokenizer.json is reported where it is checked
    for key in ("own_counts", "text_counts"):
        path: Path | None = getattr(section, key)
        if path is not None and not path.is_file():
            problems.add(f"draft_vocab.{key}", f"{path}: no such file")


def check_room(work: Path, disk: int, memory: int, device: str, problems: Problems) -> None:
    """Free disk below the work folder, and memory, against what is needed (bytes)."""
    place = work.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if disk > free:
        problems.add(
            "disk",
            f"the stages to do write about {size(disk)}, {place} has {size(free)} free",
            "choose another place with --work",
        )
    total, available = memory_limits()
    if device != "cpu" or total is None:
        return
    if memory > total:
        problems.add("memory", f"the largest stage needs about {size(memory)} of {size(total)}")
    elif available is not None and memory > available:
        problems.note(
            "memory",
            f"the largest stage needs about {size(memory)}, {size(available)} are free now",
        )


def memory_limits() -> tuple[int | None, int | None]:
    """(memory of the machine or of its control group, what is free of it), bytes; None unknown."""
    found: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            key, _, rest = line.partition(":")
            if key in ("MemTotal", "MemAvailable"):
                found[key] = int(rest.split()[0]) * 1024
    except (OSError, ValueError):
        return None, None
    total = found.get("MemTotal")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if total is not None and limit != "max":
            total = min(total, int(limit))
    except (OSError, ValueError):
        pass
    return total, found.get("MemAvailable")
