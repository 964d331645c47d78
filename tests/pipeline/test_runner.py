"""The runner and the store on dummy stages: reuse, change, kill and resume, damage, locks."""

from __future__ import annotations

import json
import os
import signal
import traceback
from pathlib import Path

import pytest

from artifacts.errors import GateFailed, TrimtabError
from pipeline.events import EventLog, View, read_log
from pipeline.runner import Hook, Runner, order, upto
from pipeline.stage import BaseStage, Stage, StageContext
from pipeline.store import lock
from tests.pipeline.dummies import PIECES, Last, Left, contents, recipe, stages

ALL = ["source", "left", "right", "join", "last"]


def run(folder: Path, extra: str = "", *, verify: bool = False, hook: Hook | None = None) -> Runner:
    """One run in `folder`/work; the runner, with its result as `.done`."""
    runner = Runner(recipe(folder, extra), folder / "work", stages(), verify=verify, hook=hook)
    runner.done = runner.run()  # type: ignore[attr-defined]
    return runner


def ran(folder: Path, extra: str = "", *, verify: bool = False) -> list[str]:
    """Names of the stages that a run ran."""
    return list(run(folder, extra, verify=verify).done.ran)  # type: ignore[attr-defined]


def test_second_run_does_nothing(tmp_path: Path) -> None:
    assert ran(tmp_path) == ALL
    before = contents(tmp_path / "work")
    assert ran(tmp_path) == []
    assert contents(tmp_path / "work") == before


def test_a_change_redoes_only_what_depends_on_it(tmp_path: Path) -> None:
    ran(tmp_path)
    changed = run(tmp_path, "lm_head: {bits: 8}").done  # type: ignore[attr-defined]
    assert changed.ran == ["left", "join", "last"]
    said = [e["text"] for e in read_log(changed.log) if e["event"] == "line"]
    assert "left: started (config.bits changed)" in said
    assert "join: started (inputs.left changed)" in said
    assert ran(tmp_path, "embedding: {group_size: 64}") == ["right", "join", "last"]
    assert ran(tmp_path) == [], "the first results are still stored"


def test_an_equal_output_stops_the_change(tmp_path: Path) -> None:
    ran(tmp_path)
    data = (tmp_path / "input.txt").read_bytes()
    (tmp_path / "input.txt").write_bytes(data[: len(data) // 2] + b"!" * (len(data) // 2))
    assert ran(tmp_path) == ["source", "right", "join", "last"], "left reads part a only"


def test_seed_is_in_the_key_of_what_computes_only(tmp_path: Path) -> None:
    ran(tmp_path)
    assert ran(tmp_path, "seed: 7") == ["right", "join", "last"]


def test_two_work_folders_get_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    run(tmp_path / "one")
    run(tmp_path / "two")
    assert contents(tmp_path / "one" / "work") == contents(tmp_path / "two" / "work")


def _moments(folder: Path) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    run(folder, hook=lambda stage, name: seen.append((stage, name)))
    return seen


def _killed_run(folder: Path, at: tuple[str, str]) -> int:
    """Run in a forked child that kills itself at a moment; the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:

            def hook(stage: str, name: str) -> None:
                if (stage, name) == at:
                    os.kill(os.getpid(), signal.SIGKILL)

            run(folder, hook=hook)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_anywhere_then_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    moments = _moments(tmp_path / "whole")
    expected = contents(tmp_path / "whole" / "work")
    assert len(moments) > 25
    for number, moment in enumerate(moments):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert _killed_run(folder, moment) == -signal.SIGKILL, moment
        run(folder)
        assert contents(folder / "work") == expected, moment


def test_a_resumable_stage_goes_on(tmp_path: Path) -> None:
    assert _killed_run(tmp_path, ("left", "piece-2")) == -signal.SIGKILL
    Left.made = 0
    run(tmp_path)
    assert Left.made == PIECES - 3


def test_killed_twice_and_changed_between(tmp_path: Path) -> None:
    _killed_run(tmp_path, ("left", "piece-1"))
    assert ran(tmp_path, "lm_head: {bits: 8}")[0] == "left"
    _killed_run(tmp_path, ("left", "piece-2"))
    run(tmp_path)
    (tmp_path / "other").mkdir()
    run(tmp_path / "other")
    mine = {n: b for n, b in contents(tmp_path / "work").items() if n.startswith("join/")}
    theirs = contents(tmp_path / "other" / "work")
    assert {n: b for n, b in theirs.items() if n.startswith("join/")}.items() <= mine.items()


@pytest.mark.parametrize("verify", [False, True])
def test_damage_is_found_and_redone(tmp_path: Path, verify: bool) -> None:
    runner = run(tmp_path)
    victim = runner.done.entries["left"].folder / "left.bin"  # type: ignore[attr-defined]
    expected = victim.read_bytes()
    stat = victim.stat()
    victim.write_bytes(bytes(len(expected)))
    if verify:  # damage that size and times do not show
        os.utime(victim, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert ran(tmp_path) == []
    again = Runner(recipe(tmp_path), tmp_path / "work", stages(), verify=verify)
    result = again.run()
    assert result.ran == ["left"], "join's input has the same bytes again"
    assert victim.read_bytes() == expected
    assert result.log is not None
    said = [e["text"] for e in read_log(result.log) if e["event"] == "line"]
    assert any("left.bin has other bytes" in text and "redone" in text for text in said)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "left.bin").unlink(),
        lambda folder: (folder / "left.bin").write_bytes(b"short"),
        lambda folder: (folder / "record.json").write_text("{"),
        lambda folder: (folder / "record.json").unlink(),
        lambda folder: (folder / "stray.bin").write_bytes(b"x"),
    ],
    ids=["missing", "short", "torn record", "no record", "stray"],
)
def test_every_kind_of_damage_is_redone(tmp_path: Path, spoil) -> None:  # type: ignore[no-untyped-def]
    runner = run(tmp_path)
    before = contents(tmp_path / "work")
    spoil(runner.done.entries["left"].folder)  # type: ignore[attr-defined]
    assert ran(tmp_path) == ["left"]
    assert contents(tmp_path / "work") == before


def test_a_lost_cache_of_hashes_costs_nothing_but_time(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "work" / "hashes.json").write_text("not json")
    assert ran(tmp_path) == []


def test_a_failed_gate_keeps_the_result_and_ends_the_run(tmp_path: Path) -> None:
    for _ in range(2):  # cached or not
        with pytest.raises(GateFailed, match=r"join: 1 gate\(s\) failed: coverage") as caught:
            run(tmp_path, "draft_vocab: {floor: 1}")
        assert caught.value.exit_code == 1
    assert list((tmp_path / "work" / "store" / "join").glob("*/joined.bin"))
    assert not (tmp_path / "work" / "store" / "last").exists()


def test_a_failing_stage_leaves_the_others(tmp_path: Path) -> None:
    class Broken(BaseStage):
        name = "right"
        computes = False

        def run(self, ctx: StageContext) -> dict[str, object]:
            (ctx.out / "half.bin").write_bytes(b"half")
            raise TrimtabError("no luck", hint="try again")

    made = stages()
    made["right"] = Broken()
    with pytest.raises(TrimtabError, match="stage right: no luck") as caught:
        Runner(recipe(tmp_path), tmp_path / "work", made).run()
    assert caught.value.hint == "try again"
    assert ran(tmp_path) == ["right", "join", "last"]
    assert not list((tmp_path / "work" / "store").rglob("*.partial"))


def test_interrupt_is_recorded_and_harmless(tmp_path: Path) -> None:
    def hook(stage: str, name: str) -> None:
        if (stage, name) == ("right", "written"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, hook=hook)
    log = next((tmp_path / "work" / "runs").glob("*.jsonl"))
    assert [e["event"] for e in read_log(log)][-2:] == ["interrupted", "run_end"]
    assert ran(tmp_path) == ["right", "join", "last"]


def test_until_runs_only_what_is_needed(tmp_path: Path) -> None:
    result = Runner(recipe(tmp_path), tmp_path / "work", stages()).run("left")
    assert result.ran == ["source", "left"]
    ordered = order(stages(), recipe(tmp_path))
    with pytest.raises(TrimtabError, match="--until nothing: this recipe runs no such stage"):
        upto(ordered, recipe(tmp_path), "nothing")


def test_order_refuses_circles_and_unknown_needs(tmp_path: Path) -> None:
    class First(BaseStage):
        name = "first"

        def needs(self, recipe: object) -> tuple[str, ...]:
            return ("second/x",)

    class Second(First):
        name = "second"

        def needs(self, recipe: object) -> tuple[str, ...]:
            return ("first",)

    both: dict[str, Stage] = {"first": First(), "second": Second()}
    with pytest.raises(TrimtabError, match="circle: first > second > first"):
        order(both, recipe(tmp_path))
    with pytest.raises(TrimtabError, match="first needs second, which is not run: no such stage"):
        order({"first": First()}, recipe(tmp_path))


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with lock(tmp_path / "work"), pytest.raises(TrimtabError, match=f"process {os.getpid()}"):
        run(tmp_path)
    assert ran(tmp_path) == ALL


def test_record_holds_no_paths_and_no_times(tmp_path: Path) -> None:
    run(tmp_path)
    for path in (tmp_path / "work" / "store").rglob("record.json"):
        text = path.read_text()
        assert str(tmp_path) not in text
        record = json.loads(text)
        assert set(record) == {
            "stage", "key", "ingredients", "outputs", "output_hash", "summary"
        }  # fmt: skip
    telemetry = json.loads((tmp_path / "work" / "telemetry.json").read_text())
    assert len(telemetry) == len(ALL)
    assert all(entry["peak_rss_bytes"] > 0 for entry in telemetry.values())


def test_the_build_stands_in_dist(tmp_path: Path) -> None:
    class Made(Last):
        is_build = True

    def again(extra: str = "") -> list[int]:
        Runner(recipe(tmp_path, extra), tmp_path / "work", {**stages(), "last": Made()}).run()
        dist = tmp_path / "work" / "dist"
        assert [p.name for p in dist.iterdir()] == ["last.bin"]
        return [dist.stat().st_ino, (dist / "last.bin").stat().st_ino]

    first = again()
    assert again() == first, "nothing to do"
    entry = next((tmp_path / "work" / "store" / "last").glob("*/last.bin"))
    assert entry.stat().st_ino == first[1], "linked, not copied"
    (tmp_path / "work" / "dist" / "stray.bin").write_bytes(b"x")
    again()
    assert again("seed: 5") != first, "another build takes its place"
    assert not [p for p in (tmp_path / "work").iterdir() if p.name.startswith(".dist")]


def test_outputs_may_not_be_links(tmp_path: Path) -> None:
    class Linking(BaseStage):
        name = "left"
        computes = False

        def run(self, ctx: StageContext) -> dict[str, object]:
            (ctx.out / "link").symlink_to("/etc/hostname")
            return {}

    with pytest.raises(TrimtabError, match="link is a symbolic link"):
        Runner(recipe(tmp_path), tmp_path / "work", {"left": Linking()}).run()


def test_the_log_has_every_stage_and_no_token(tmp_path: Path) -> None:
    with EventLog(tmp_path / "runs") as log:
        view = View(log, stream=(tmp_path / "out.txt").open("w"))
        view.say("failed with hf_TESTTOKEN12345678 and Bearer abc.def")
        with view.task("work", 3, "pieces") as task:
            task.advance()
            task(3)
    text = log.path.read_text() + (tmp_path / "out.txt").read_text()
    assert "TESTTOKEN" not in text
    assert "abc.def" not in text
    assert "[token]" in text
    run(tmp_path)
    path = sorted((tmp_path / "work" / "runs").glob("*.jsonl"))[-1]
    events = read_log(path)
    assert [e["stage"] for e in events if e["event"] == "done"] == ALL
    with path.open("a") as stream:
        stream.write('{"event": "cut o')
    assert read_log(path) == events
