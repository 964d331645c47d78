"""Keys: what is in them and what is not, the import closure, file hashes and their cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from artifacts.errors import TrimtabError
from pipeline import keys
from pipeline.keys import FileHashes, closure, code_hash, make_key, output_hash, part_of
from pipeline.stage import BaseStage, Environment
from pipeline.stages import registry
from pipeline.stages.fetch import FetchStage

CPU = Environment(device="cpu", dtype="float32", threads=1, seed=0)


class Computing(BaseStage):
    name = "computing"


def key(stage: BaseStage, **changes: object) -> str:
    values: dict[str, object] = {"config": {"a": 1}, "inputs": {}, "files": {}, "environment": CPU}
    return make_key(stage, **{**values, **changes}).hex  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"a": 2}},
        {"config": {"a": 1, "b": None}},
        {"inputs": {"x": "0"}},
        {"files": {"x": "0"}},
        {"environment": Environment(device="cuda", dtype="float32", threads=1, seed=0)},
        {"environment": Environment(device="cpu", dtype="bfloat16", threads=1, seed=0)},
        {"environment": Environment(device="cpu", dtype="float32", threads=2, seed=0)},
        {"environment": Environment(device="cpu", dtype="float32", threads=1, seed=1)},
    ],
)
def test_everything_a_result_depends_on_is_in_the_key(change: dict[str, object]) -> None:
    assert key(Computing(), **change) != key(Computing())


def test_library_versions_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before, fetch_before = key(Computing()), key(FetchStage())
    versions = {**keys.library_versions(), "torch": "9.9.9"}
    monkeypatch.setattr(keys, "library_versions", lambda: versions)
    assert key(Computing()) != before
    assert key(FetchStage()) == fetch_before, "a stage that only moves bytes does not care"


def test_a_stage_that_does_not_compute_ignores_the_environment() -> None:
    other = Environment(device="cuda", dtype="bfloat16", threads=8, seed=3)
    assert key(FetchStage(), environment=other) == key(FetchStage())


def test_key_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from pipeline.stages import registry; from pipeline.keys import code_hash;"
        "print([code_hash(type(s).__module__) for s in registry().values()])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Project rooms of our own, so that modules can be edited."""
    for room in keys.ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("")
    monkeypatch.setattr(keys, "_room", lambda name: tmp_path / name)
    monkeypatch.setattr(keys, "_reach", keys._reach.__wrapped__)
    files = {
        "pipeline/thing.py": "from typing import TYPE_CHECKING\nimport numpy\n"
        "if TYPE_CHECKING:\n    from calibration import unseen\n"
        "def run():\n    from calibration.deep.solve import f\n    return open('words.txt')\n",
        "pipeline/words.txt": "one",
        "calibration/deep/__init__.py": "",
        "calibration/deep/solve.py": "from . import near\nfrom ..up import x\n",
        "calibration/deep/near.py": "import importlib\nimportlib.import_module('artifacts.late')\n",
        "calibration/up.py": "from pipeline.recipe import Recipe\nx = 1\n",
        "calibration/unseen.py": "",
        "calibration/other.py": "",
        "artifacts/late.py": "import artifacts.ring\n",
        "artifacts/ring.py": "import artifacts.late\n",
        "pipeline/recipe.py": "import artifacts.only_recipe\n",
        "artifacts/only_recipe.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_closure_follows_every_import(rooms: Path) -> None:
    assert set(closure("pipeline.thing")) == {
        "pipeline.thing",
        "pipeline.thing:words.txt",
        "calibration",
        "calibration.deep",
        "calibration.deep.solve",
        "calibration.deep.near",
        "calibration.up",
        "artifacts",
        "artifacts.late",
        "artifacts.ring",
    }


@pytest.mark.parametrize(
    ("edited", "changes"),
    [
        ("pipeline/thing.py", True),
        ("pipeline/words.txt", True),
        ("calibration/deep/near.py", True),
        ("artifacts/ring.py", True),
        ("calibration/__init__.py", True),
        ("calibration/unseen.py", False),
        ("calibration/other.py", False),
        ("pipeline/recipe.py", False),
    ],
)
def test_code_hash_changes_with_what_can_run(rooms: Path, edited: str, changes: bool) -> None:
    before = code_hash.__wrapped__("pipeline.thing")
    path = rooms / edited
    path.write_text(path.read_text() + "# more\n")
    assert (code_hash.__wrapped__("pipeline.thing") != before) is changes


def test_stages_reach_no_more_of_the_pipeline_than_they_must() -> None:
    for stage in registry().values():
        reached = set(closure(type(stage).__module__))
        assert not reached & {"pipeline.cli", "pipeline.runner", "pipeline.plan", "pipeline.recipe"}
        assert type(stage).__module__ in reached


def test_differences_are_named() -> None:
    old = {"config": {"bits": 4, "x": 1}, "code": "a", "files": {"p": "1"}}
    assert keys.difference(old, old) == ""
    assert keys.difference(old, {**old, "config": {"bits": 8, "x": 1}}) == "config.bits changed"
    other = {"config": {}, "code": "b", "files": {"p": "2", "q": "3"}}
    assert keys.difference(old, other) == (
        "code, config.bits, config.x, files.p and 1 more changed"
    )


def test_parts_of_outputs() -> None:
    names = ["a.json", "a.safetensors", "ab.json", "a/x", "b/a/y", "c"]
    assert part_of(names, "a") == ["a.json", "a.safetensors", "a/x"]
    assert part_of(names, "c") == ["c"]
    outputs = {name: {"sha256": name, "size": 1} for name in names}
    assert output_hash(outputs, "a") != output_hash(outputs)
    more = {**outputs, "ab.json": {"sha256": "new", "size": 1}}
    assert output_hash(outputs, "a") == output_hash(more, "a")
    with pytest.raises(TrimtabError, match="no output 'd' among"):
        output_hash(outputs, "d")


def test_hashes_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    path, cache = tmp_path / "file", tmp_path / "hashes.json"
    path.write_bytes(b"one")
    hashes = FileHashes(cache)
    first = hashes.of(path)
    hashes.save()
    again = FileHashes(cache)
    assert again.known(path) == first
    os.link(path, tmp_path / "link")
    assert again.known(tmp_path / "link") == first, "one inode, one hash"
    path.write_bytes(b"two")
    os.utime(path, ns=(0, 5))
    assert again.known(path) is None
    assert again.of(path) != first
    path.write_bytes(b"six")
    os.utime(path, ns=(0, 5))
    assert again.of(path) != again.of(path, fresh=True), "only a fresh reading sees this"


def test_canonical_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        keys.digest({"x": float("nan")})
    assert keys.digest({"a": 1, "b": 2}) == keys.digest({"b": 2, "a": 1})
