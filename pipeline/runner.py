"""Run stages in order: reuse what is there, do the rest, leave nothing half done.

Does: order the stages, compute their keys, look each up in the store, run what is missing in this
process, measure it, write its record. Does not: know what any stage does, or check the recipe
against the checkpoint (see `plan`).

Inputs: a recipe, a work folder, the stages. Output: `Result`, and entries in the store.

Invariant: killed at any moment, a later run gives byte for byte what an undisturbed one gives: an
entry exists only if its stage finished, and a stage sees only what stands in its key.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from artifacts.errors import GateFailed, TrimtabError
from artifacts.files import atomic_write_json, read_json
from pipeline import environment as environments
from pipeline.events import EventLog, View, duration, size
from pipeline.folders import show_build
from pipeline.keys import Key, make_key
from pipeline.recipe import Recipe
from pipeline.stage import Environment, Stage, StageContext
from pipeline.store import Entry, Store, lock, plain

LATEST = "latest.json"  # in the work folder: inputs of the stages whose outputs are a build

Hook = Callable[[str, str], None]


@dataclass
class Result:
    """What a run did: entries by stage, and which stages were run or reused, in order."""

    entries: dict[str, Entry] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    log: Path | None = None


def order(stages: Mapping[str, Stage], recipe: Recipe) -> list[Stage]:
    """The wanted stages, each after what it needs, otherwise as they stand in `stages`.

    Raises:
        TrimtabError: a need is not a wanted stage, or needs form a circle.
    """
    wanted = {name: stage for name, stage in stages.items() if not stage.wanted(recipe)}
    sorted_stages: list[Stage] = []
    state: dict[str, str] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if state.get(name) == "done":
            return
        if state.get(name) == "open":
            raise TrimtabError(f"stages need each other in a circle: {' > '.join([*path, name])}")
        state[name] = "open"
        for need in wanted[name].needs(recipe):
            source = need.partition("/")[0]
            if source not in wanted:
                why = stages[source].wanted(recipe) if source in stages else "no such stage"
                raise TrimtabError(f"stage {name} needs {source}, which is not run: {why}")
            visit(source, (*path, name))
        state[name] = "done"
        sorted_stages.append(wanted[name])

    for name in wanted:
        visit(name, ())
    return sorted_stages


def upto(ordered: list[Stage], recipe: Recipe, until: str | None) -> list[Stage]:
    """The stages that `until` needs, and itself; all of them for None."""
    if until is None:
        return ordered
    by_name = {stage.name: stage for stage in ordered}
    if until not in by_name:
        raise TrimtabError(
            f"--until {until}: this recipe runs no such stage; it runs {', '.join(by_name)}"
        )
    needed = {until}
    for stage in reversed(ordered):
        if stage.name in needed:
            needed |= {need.partition("/")[0] for need in stage.needs(recipe)}
    return [stage for stage in ordered if stage.name in needed]


def key_of(
    stage: Stage,
    recipe: Recipe,
    environment: Environment,
    store: Store,
    entries: Mapping[str, Entry],
) -> tuple[Key, dict[str, Path], dict[str, str]]:
    """The key of a stage whose inputs are all there, its named files and their hashes."""
    files = stage.files(recipe)
    missing = [f"{name} ({path})" for name, path in files.items() if not path.is_file()]
    if missing:
        raise TrimtabError(f"stage {stage.name}: no such file: {missing[0]}")
    hashes = {name: store.hashes.of(path) for name, path in files.items()}
    inputs = {}
    for need in stage.needs(recipe):
        name, _, part = need.partition("/")
        inputs[need] = entries[name].hash(part)
    config = plain(stage.config(recipe))
    key = make_key(stage, config=config, inputs=inputs, files=hashes, environment=environment)
    return key, files, hashes


class Runner:
    """One run over one work folder.

    Args:
        recipe: what to build.
        work: the work folder.
        stages: by name, in their usual order.
        view: where to tell; None makes one with an event log.
        verify: hash every file of every reused entry, instead of those that look changed.
        hook: called with (stage, moment) at every checkpoint, the runner's own included: "begin",
            "ran", "recorded", "finished". Tests kill the process in it.
    """

    def __init__(
        self,
        recipe: Recipe,
        work: Path,
        stages: Mapping[str, Stage],
        *,
        view: View | None = None,
        verify: bool = False,
        hook: Hook | None = None,
    ) -> None:
        self.recipe, self.work, self.stages = recipe, work.resolve(), stages
        self._given_view, self._verify, self._hook = view, verify, hook
        self.environment, self._reasons = environments.resolve(recipe)
        self._prepared = False

    def run(self, until: str | None = None) -> Result:
        """Run everything up to `until`.

        Raises:
            GateFailed: a stage's summary names failed gates; its outputs stay, later stages do not
                run.
            TrimtabError: the user's input; what was finished stays.
        """
        stages = upto(order(self.stages, self.recipe), self.recipe, until)
        with lock(self.work), EventLog(self.work / "runs") as log:
            view = self._given_view or View(log)
            result = Result(log=log.path)
            self.store = Store(self.work)
            contexts: dict[str, Any] = {}
            log.write("run_start", recipe=self.recipe.resolved(), stages=[s.name for s in stages])
            try:
                for reason in self._reasons:
                    view.say(reason)
                for stage in stages:
                    view.stage = stage.name
                    self._one(stage, result, view)
                    entry = result.entries[stage.name]
                    if stage.is_build:
                        show_build(entry.folder, self.work / "dist")
                        self._remember(stage, result, contexts)
                    _refuse_failed_gates(entry)
            except BaseException as error:
                view.close()
                kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                view.record(kind, error=type(error).__name__, text=str(error))
                log.write("run_end", ok=False)
                raise
            finally:
                self.store.hashes.save()
            view.stage = ""
            view.close()
            log.write("run_end", ok=True, ran=result.ran, reused=result.reused)
        return result

    def _one(self, stage: Stage, result: Result, view: View) -> None:
        key, files, hashes = key_of(
            stage, self.recipe, self.environment, self.store, result.entries
        )
        entry, damage = self.store.find(stage.name, key.hex, "full" if self._verify else "usual")
        if damage:
            view.say(f"{stage.name}: stored result {key.hex[:12]} is damaged ({damage}); redone")
        if entry is not None:
            result.reused.append(stage.name)
            view.record("cached", key=key.hex)
            view.say(f"{stage.name}: cached")
        else:
            entry = self._run(stage, key, files, hashes, result, view)
            result.ran.append(stage.name)
        result.entries[stage.name] = entry

    def _run(
        self,
        stage: Stage,
        key: Key,
        files: dict[str, Path],
        hashes: dict[str, str],
        result: Result,
        view: View,
    ) -> Entry:
        def moment(name: str) -> None:
            view.record("checkpoint", name=name)
            if self._hook is not None:
                self._hook(stage.name, name)

        resumed = self.store.partial(stage.name, key.hex).exists() and stage.resumable
        why = self.store.why_not(stage.name, key)
        view.record("start", key=key.hex, resumed=resumed, why=why)
        view.say(f"{stage.name}: {'going on' if resumed else 'started'}{why and f' ({why})'}")
        if stage.computes and not self._prepared:
            environments.prepare(self.environment)
            self._prepared = True
        out, scratch = self.store.begin(stage.name, key.hex, resumable=stage.resumable)
        moment("begin")
        context = StageContext(
            name=stage.name,
            config=key.ingredients["config"],
            inputs=_places(stage.needs(self.recipe), result.entries),
            files=files,
            file_hashes=hashes,
            out=out,
            scratch=scratch,
            environment=self.environment,
            work=self.work,
            progress=view,
            hash_file=self.store.hashes.of,
            on_checkpoint=moment,
        )
        memory = PeakMemory()
        started = time.monotonic()
        try:
            summary = plain(stage.run(context))
        except TrimtabError as error:
            kind = type(error)
            raise kind(f"stage {stage.name}: {error.message}", hint=error.hint) from error
        seconds, peak = time.monotonic() - started, memory.read()
        moment("ran")
        self.store.write_record(stage.name, key, summary)
        moment("recorded")
        entry = self.store.finish(stage.name, key)
        self._measure(entry, seconds, peak, view)
        moment("finished")
        return entry

    def _remember(self, stage: Stage, result: Result, contexts: dict[str, Any]) -> None:
        """Write beside `dist` what it was made with, so that it can be measured again."""
        entry = result.entries[stage.name]
        places = _places(stage.needs(self.recipe), result.entries)
        contexts[stage.name] = {
            "config": entry.ingredients["config"],
            "environment": asdict(self.environment),
            "inputs": {need: str(place.resolve()) for need, place in places.items()},
        }
        path = self.work / LATEST
        content = {"contexts": contexts}
        if not path.is_file() or read_json(path) != content:
            atomic_write_json(path, content)

    def _measure(self, entry: Entry, seconds: float, peak: dict[str, Any], view: View) -> None:
        values = {
            "seconds": round(seconds, 3),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "bytes": entry.size,
            **peak,
        }
        self.store.add_telemetry(entry.stage, entry.key, values)
        view.record("done", key=entry.key, **values)
        view.say(
            f"{entry.stage}: done in {duration(seconds)}, {size(entry.size)}, "
            f"peak memory {size(peak['peak_rss_bytes'])}"
        )


def _places(needs: tuple[str, ...], entries: Mapping[str, Entry]) -> dict[str, Path]:
    places = {}
    for need in needs:
        name, _, part = need.partition("/")
        places[need] = entries[name].place(part)
    return places


def _refuse_failed_gates(entry: Entry) -> None:
    failed = entry.summary.get("failed_gates") or []
    if failed:
        raise GateFailed(
            f"{entry.stage}: {len(failed)} gate(s) failed: {', '.join(map(str, failed))}",
            hint=f"the figures are in {entry.folder / 'gates.json'}; later stages were not run",
        )


class PeakMemory:
    """Peak resident memory since it was made, or since the process began where Linux refuses."""

    def __init__(self) -> None:
        self.scope = "stage"
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            self.scope = "process"

    def read(self) -> dict[str, Any]:
        """{"peak_rss_bytes": int, "peak_rss_scope": "stage" or "process"}."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        scope = "process"
        try:
            status = Path("/proc/self/status").read_text(encoding="ascii")
            line = next(x for x in status.splitlines() if x.startswith("VmHWM:"))
            peak, scope = int(line.split()[1]) * 1024, self.scope
        except (OSError, StopIteration, ValueError):
            pass
        return {"peak_rss_bytes": peak, "peak_rss_scope": scope}
