"""kill -9 in every stage: the next run ends in the bytes of an undisturbed one.

The undisturbed run is made once. For each stage a work folder gets that run's earlier stages by
hard links, is run up to the stage and killed there, is run again, and its outputs are compared.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from pipeline import recipe as recipes
from pipeline.runner import order
from pipeline.stages import registry
from tests.pipeline import kill_child, tiny_family

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.pipeline.kill_child"])
TIMEOUT = 300

# A moment inside each stage, beside those that the runner itself marks.
INSIDE = {
    "fetch": "target/config.json",
    "prompts": "development",
    "target": "ran",
    "traffic": "calibration-192",
    "capture": "captured",
    "lm-head": "lm_head",
    "mtp": "mtp.fc",
    "draft-vocab": "ran",
    "drafter": "layers.1.mlp.up_proj",
    "assemble": "target",
    "validate": "numeric",
    "publish": "sealed",
}


def outputs(work: Path, stage: str) -> dict[str, str]:
    """sha256 by file of a stage's only entry."""
    (record,) = (work / "store" / stage).glob("*/record.json")
    return {n: o["sha256"] for n, o in json.loads(record.read_text())["outputs"].items()}


def start(recipe: Path, work: Path, until: str | None, kill_at: tuple[str, str] | None) -> int:
    """Exit code of a child; negative for a signal."""
    child = SERVER.Process(target=kill_child.run, args=(recipe, work, until, kill_at))
    child.start()
    child.join(TIMEOUT)
    assert child.exitcode is not None, f"still running; see {work}.log"
    return child.exitcode


def written(work: Path) -> dict[Path, int]:
    """When each file of the store was written."""
    return {p: p.stat().st_mtime_ns for p in (work / "store").rglob("*") if p.is_file()}


def log(work: Path) -> str:
    return (work.parent / f"{work.name}.log").read_text(encoding="utf-8")[-3000:]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(recipe, work folder) of an undisturbed run."""
    folder = tmp_path_factory.mktemp("kill")
    recipe = tiny_family.make(folder / "family")
    assert start(recipe, folder / "calm", None, None) == 0, log(folder / "calm")
    return recipe, folder / "calm"


def before(calm: tuple[Path, Path], stage: str, work: Path) -> list[str]:
    """Link the stages that come before `stage` into a new work folder; the stages' names."""
    recipe, done = calm
    names = [s.name for s in order(registry(), recipes.load(recipe))]
    for name in names[: names.index(stage)]:
        shutil.copytree(done / "store" / name, work / "store" / name, copy_function=os.link)
    return names


def test_every_stage_of_the_recipe_is_killed_somewhere(calm: tuple[Path, Path]) -> None:
    recipe, _ = calm
    assert [s.name for s in order(registry(), recipes.load(recipe))] == list(INSIDE)


@pytest.mark.parametrize("stage", list(INSIDE))
def test_killed_inside_a_stage(calm: tuple[Path, Path], stage: str, tmp_path: Path) -> None:
    recipe, done = calm
    work = tmp_path / "work"
    before(calm, stage, work)
    killed = start(recipe, work, stage, (stage, INSIDE[stage]))
    assert killed == -signal.SIGKILL, log(work)
    assert not list((work / "store" / stage).glob("*/record.json"))
    assert start(recipe, work, stage, None) == 0, log(work)
    assert outputs(work, stage) == outputs(done, stage)


def test_killed_between_record_and_rename(calm: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, done = calm
    work = tmp_path / "work"
    before(calm, "lm-head", work)
    assert start(recipe, work, "lm-head", ("lm-head", "recorded")) == -signal.SIGKILL
    assert start(recipe, work, "lm-head", None) == 0, log(work)
    assert outputs(work, "lm-head") == outputs(done, "lm-head")


def test_target_killed_in_the_middle_of_a_layer(calm: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, done = calm
    work = tmp_path / "work"
    before(calm, "target", work)
    child = SERVER.Process(target=kill_child.run, args=(recipe, work, "target", None))
    child.start()
    deadline = time.monotonic() + TIMEOUT
    while not list((work / "store" / "target").glob("*.partial/scratch")):
        assert time.monotonic() < deadline and child.is_alive(), log(work)
        time.sleep(0.01)
    time.sleep(0.7)
    child.kill()
    child.join(TIMEOUT)
    assert child.exitcode == -signal.SIGKILL
    assert start(recipe, work, "target", None) == 0, log(work)
    assert outputs(work, "target") == outputs(done, "target")


def test_traffic_goes_on_from_its_last_chunk(calm: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, _ = calm
    work = tmp_path / "work"
    before(calm, "traffic", work)
    assert start(recipe, work, "traffic", ("traffic", "calibration-192")) == -signal.SIGKILL
    chunks = sorted((work / "store" / "traffic").glob("*.partial/scratch/calibration/*"))
    assert len(chunks) == 2
    written = [chunk.stat().st_mtime_ns for chunk in chunks]
    stopped = start(recipe, work, "traffic", ("traffic", "calibration-288"))
    assert stopped == -signal.SIGKILL
    assert [chunk.stat().st_mtime_ns for chunk in chunks] == written


def test_a_second_run_does_nothing(calm: tuple[Path, Path]) -> None:
    recipe, work = calm
    before_it = {p: p.stat().st_mtime_ns for p in (work / "store").rglob("*") if p.is_file()}
    assert start(recipe, work, None, None) == 0
    assert log(work).rstrip().splitlines()[-1].endswith("cached")
    assert {
        p: p.stat().st_mtime_ns for p in (work / "store").rglob("*") if p.is_file()
    } == before_it


def test_a_change_redoes_only_what_depends_on_it(calm: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, done = calm
    work = tmp_path / "work"
    shutil.copytree(done / "store", work / "store", copy_function=os.link)
    changed = tiny_family.make(recipe.parent, lm_head="{bits: 8, group_size: 128}")
    try:
        assert start(changed, work, None, None) == 0, log(work)
    finally:
        tiny_family.make(recipe.parent)
    counts = {p.name: len(list(p.glob("*/record.json"))) for p in (work / "store").iterdir()}
    redone = {name for name, count in counts.items() if count == 2}
    assert redone == {"lm-head", "draft-vocab", "assemble", "validate", "publish"}
