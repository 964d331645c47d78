"""The plan: what a run would do, what becomes of every tensor, and everything that is wrong.

Does: read the recipe's surroundings without weights and without torch, in seconds; say which stages
are stored already; collect every problem instead of stopping at the first. Does not: write anything
or download weights. `trimtab run` looks at the same plan and refuses when it holds a problem.

Inputs: a recipe, the work folder, the stages. Output: `Plan` (see `plan_view`).

Invariant: a plan without problems can still meet a full disk or a broken network, but no stage will
refuse the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from artifacts.errors import TrimtabError
from pipeline import environment as environments
from pipeline import schemes, skeleton
from pipeline.checks_base import check_base, integer
from pipeline.checks_drafter import check_drafter
from pipeline.checks_recipe import check_draft_vocab, check_prompts, check_room, draft_rows
from pipeline.estimate import Need, needs
from pipeline.events import size
from pipeline.problems import Problems
from pipeline.recipe import Recipe
from pipeline.runner import key_of, order, upto
from pipeline.stage import Environment, Stage
from pipeline.store import Entry, Store

HASH_AT_ONCE = 256_000_000  # bytes of unknown files that a plan hashes; more would take too long


@dataclass(frozen=True)
class Step:
    """A stage in a plan: state is "cached", "to do" or "not wanted"; why explains it."""

    name: str
    state: str
    why: str = ""
    need: Need = field(default_factory=Need)
    stored: int = 0


@dataclass
class Plan:
    """What `examine` found."""

    recipe: Recipe
    work: Path
    environment: Environment
    choices: list[str]
    problems: Problems
    steps: list[Step] = field(default_factory=list)
    base: list[schemes.Planned] = field(default_factory=list)
    drafter: list[schemes.Planned] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def to_do(self) -> list[Step]:
        """The stages a run would run."""
        return [step for step in self.steps if step.state == "to do"]


def examine(
    recipe: Recipe, work: Path, stages: Mapping[str, Stage], *, until: str | None = None
) -> Plan:
    """Look at everything that can be known before work begins; raises nothing for what is wrong."""
    environment, choices = environments.resolve(recipe)
    problems = Problems()
    plan = Plan(recipe, work, environment, choices, problems)
    base = skeleton.read("base", recipe.base, problems)
    drafter = None
    if recipe.drafter is not None:
        drafter = skeleton.read("drafter", recipe.drafter, problems)
    if recipe.signs.original is not None:
        skeleton.read("signs.original", recipe.signs.original, problems)
    if base is not None:
        check_base(base, recipe, problems)
        plan.base = _planned(base, recipe, problems)
        schemes.check_ignore(base, recipe, problems)
        check_draft_vocab(recipe, base, problems)
    if drafter is not None:
        check_drafter(drafter, base, problems)
        plan.drafter = _planned(drafter, recipe, problems)
    for planned in (plan.base, plan.drafter):
        schemes.check_fit(planned, recipe.tensor_parallel, problems)
        schemes.check_fused(planned, problems)
    plan.rows = check_prompts(recipe, problems)
    for stage in stages.values():
        if not stage.wanted(recipe):
            stage.check(recipe, problems)
    vocab = integer(base, "vocab_size") if base is not None else None
    fetched = _to_fetch(recipe, work, [s for s in (base, drafter) if s is not None])
    need = needs(
        recipe, environment, plan.base, plan.drafter, fetched, draft_rows(recipe, vocab or 0)
    )
    try:
        plan.steps, _ = steps_of(recipe, Store(work), stages, environment, need, until)
    except TrimtabError as error:
        problems.add_error("stages", error)
    disk = sum(step.need.disk for step in plan.to_do)
    memory = max((step.need.memory for step in plan.to_do), default=0)
    check_room(work, disk, memory, environment.device, problems)
    return plan


def summary(plan: Plan) -> str:
    """What a run will need, in a line."""
    steps = plan.to_do
    if not steps:
        return "nothing to do: every stage is stored"
    disk = sum(step.need.disk for step in steps)
    largest = max(steps, key=lambda step: step.need.memory)
    text = f"to do: {len(steps)} stages, about {size(disk)} of disk"
    if largest.need.memory:
        text += f"; {largest.name} needs most memory, about {size(largest.need.memory)}"
    return text


def _planned(
    source: skeleton.Skeleton, recipe: Recipe, problems: Problems
) -> list[schemes.Planned]:
    make = schemes.plan_base if source.where == "base" else schemes.plan_drafter
    try:
        return make(source, recipe)
    except TrimtabError as error:
        problems.add_error(source.where, error)
        return []


def _to_fetch(recipe: Recipe, work: Path, found: list[skeleton.Skeleton]) -> int:
    """Bytes that cannot be linked: other file systems and the Hub."""
    place = work.absolute()
    while not place.exists():
        place = place.parent
    total = 0
    for source in found:
        remote = (recipe.base if source.where == "base" else recipe.drafter) or recipe.base
        linked = remote.path is not None and remote.path.stat().st_dev == place.stat().st_dev
        total += 0 if linked else sum(source.sizes.values())
    return total


def steps_of(
    recipe: Recipe,
    store: Store,
    stages: Mapping[str, Stage],
    environment: Environment,
    need: Mapping[str, Need],
    until: str | None,
) -> tuple[list[Step], dict[str, Entry]]:
    """Each stage's step, those to run first in their order, and the entries of the cached ones."""
    ordered = upto(order(stages, recipe), recipe, until)
    entries: dict[str, Entry] = {}
    steps = {
        name: Step(name, "not wanted", stage.wanted(recipe) or f"not needed for {until}")
        for name, stage in stages.items()
    }
    for stage in ordered:
        why = _why_to_do(stage, recipe, environment, store, entries)
        mine, name = need.get(stage.name, Need()), stage.name
        if why:
            steps[name] = Step(name, "to do", why, mine)
        else:
            steps[name] = Step(name, "cached", "", mine, entries[name].size)
    names = [stage.name for stage in ordered]
    idle = [step for name, step in steps.items() if name not in names]
    return [steps[name] for name in names] + idle, entries


def _why_to_do(
    stage: Stage,
    recipe: Recipe,
    environment: Environment,
    store: Store,
    entries: dict[str, Entry],
) -> str:
    """Why a stage must run, "" if its result is stored (then `entries` has it)."""
    waits = sorted({n.partition("/")[0] for n in stage.needs(recipe)} - set(entries))
    if waits:
        return f"after {', '.join(waits)}"
    try:
        paths = [p for p in stage.files(recipe).values() if p.is_file()]
        unknown = [p.stat().st_size for p in paths if store.hashes.known(p) is None]
        if sum(unknown) > HASH_AT_ONCE:
            return f"{size(sum(unknown))} of files not hashed yet"
        key, _, _ = key_of(stage, recipe, environment, store, entries)
    except TrimtabError as error:
        return error.message
    entry, damage = store.find(stage.name, key.hex, "quick")
    if entry is not None:
        entries[stage.name] = entry
        return ""
    if damage:
        return f"the stored result is damaged: {damage}"
    if store.partial(stage.name, key.hex).exists() and stage.resumable:
        return "goes on from an unfinished attempt"
    return store.why_not(stage.name, key) or "not done yet"
