"""The command line: exit codes, one line an error, no traceback, examples, and what it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from artifacts.errors import GateFailed, TrimtabError
from pipeline import cli
from pipeline import recipe as recipes
from pipeline.runner import Runner
from pipeline.stages.fetch import FetchStage
from tests.pipeline import dummies, fakes

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "compressed_tensors", "llmcompressor", "datasets", "scipy")


def trimtab(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments],
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def house(tmp_path: Path) -> Path:
    fakes.house(tmp_path)
    return tmp_path


def test_plan_of_a_good_recipe(house: Path) -> None:
    done = trimtab("plan", str(house / "recipe.yaml"), "--work", str(house / "w"))
    assert done.returncode == 0, done.stderr
    assert "no problems found" in done.stdout
    assert not (house / "w").exists()


@pytest.mark.parametrize("command", ["plan", "run"])
def test_problems_end_in_exit_2_with_a_line_each(house: Path, command: str) -> None:
    (house / "base" / "tokenizer.json").unlink()
    (house / "heldout.jsonl").unlink()
    done = trimtab(command, str(house / "recipe.yaml"), "--work", str(house / "w"))
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)
    assert "tokenizer.json" in lines[0]
    assert "Traceback" not in done.stderr
    assert not (house / "w").exists(), "refused before any work"


def test_recipe_errors_end_in_exit_2(house: Path) -> None:
    (house / "recipe.yaml").write_text(fakes.HEAD + "lm_head: {bit: 4}")
    done = trimtab("recipe", "check", str(house / "recipe.yaml"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: recipe.yaml: lm_head.bit: unknown key; did you mean bits?",
        "  next: trimtab recipe fields prints every key",
    ]


def run_main(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_recipe_check_prints_what_loads_again(
    house: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main("recipe", "check", str(house / "recipe.yaml")) == 0
    printed = capsys.readouterr().out
    assert recipes.parse(printed, name="r", folder=Path("/")) == recipes.load(house / "recipe.yaml")
    assert run_main("recipe", "fields") == 0
    assert "lm_head.bits  [4]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan",), "Missing argument 'RECIPE'"),
        (("plan", "none.yaml"), "none.yaml: cannot be read (no such file)"),
        (("bake", "x"), "No such command 'bake'"),
        (("plan", "x", "--wrok", "y"), "No such option"),
        (("verify", "nowhere"), "nowhere"),
        (("report", "nowhere"), "nowhere: has no gates.json; it was never validated"),
        (("generate", "x", "--prompt", "a", "--greedy", "--temperature", "1"), "exclude each"),
    ],
)
def test_the_users_mistakes_are_exit_2(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(*arguments) == 2
    assert words in capsys.readouterr().err


def test_errors_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in (
        (GateFailed("validate: 1 gate failed"), 1),
        (TrimtabError("bad hf_TESTTOKEN12345", hint="mend it"), 2),
        (KeyboardInterrupt(), 130),
    ):

        def fail(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(cli, "app", fail)
        assert cli.main([]) == code
    err = capsys.readouterr().err
    assert "TESTTOKEN" not in err
    assert "next: mend it" in err
    assert "interrupted: finished stages are kept" in err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main([])


def test_every_command_has_an_example() -> None:
    group = typer.main.get_command(cli.app)
    names = [*group.commands, "recipe check", "recipe fields"]  # type: ignore[attr-defined]
    assert {"plan", "run", "status", "validate", "publish", "fetch", "generate", "verify"} <= set(
        names
    )
    for name in names:
        result = CliRunner().invoke(cli.app, [*name.split(), "--help"])
        assert result.exit_code == 0
        if name != "recipe":
            assert f"trimtab {name}" in result.output, name


def test_status_tells_what_is_there(
    house: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pipeline.stages

    monkeypatch.setattr(pipeline.stages, "registry", dummies.stages)
    loaded = dummies.recipe(house)
    (house / "dummy.yaml").write_text(dummies.TEXT.replace("base: {path: base}", "base: {path: b}"))
    work = house / "w"
    arguments = ("status", str(house / "dummy.yaml"), "--work", str(work))
    assert run_main(*arguments) == 0
    assert "no run yet" in capsys.readouterr().out

    def hook(stage: str, name: str) -> None:
        if (stage, name) == ("left", "piece-1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Runner(loaded, work, dummies.stages(), hook=hook).run()
    assert run_main(*arguments) == 0
    shown = capsys.readouterr().out
    assert "left: 1 unfinished attempt(s)" in shown
    assert "goes on from an unfinished attempt" in shown
    assert "interrupted in left" in shown
    Runner(loaded, work, dummies.stages()).run()
    assert run_main(*arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("cached") == len(dummies.stages())
    assert "done, 4 stages run" in shown


def imported_by(code: str) -> set[str]:
    """Heavy modules that a piece of code leaves in sys.modules."""
    script = (
        f"{code}\nimport sys, json\n"
        f"print('MODULES', json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(json.loads(done.stdout.split("MODULES ")[-1]))


def test_planning_and_a_cached_run_import_nothing_heavy(house: Path) -> None:
    loaded = recipes.load(house / "recipe.yaml")
    Runner(loaded, house / "w", {"fetch": FetchStage()}).run()
    recipe, work = str(house / "recipe.yaml"), str(house / "w")
    assert (
        imported_by(
            "from pipeline import cli\n"
            f"assert cli.main(['plan', {recipe!r}, '--work', {work!r}]) == 0\n"
            f"assert cli.main(['status', {recipe!r}, '--work', {work!r}]) == 0\n"
            f"assert cli.main(['run', {recipe!r}, '--work', {work!r}, '--until', 'fetch']) == 0\n"
            "from pipeline.stages import registry\n"
            "from pipeline.keys import code_hash\n"
            "[code_hash(type(s).__module__) for s in registry().values()]"
        )
        == set()
    )


def test_fetch_publish_verify_and_report_import_nothing_heavy() -> None:
    code = (
        "from pipeline import cli\n"
        "import pipeline.report, pipeline.status, pipeline.plan_view, pipeline.hub_reading\n"
        "import artifacts.hub, artifacts.fetching, artifacts.manifest\n"
        "assert cli.main(['verify', 'nowhere']) == 2\n"
        "assert cli.main(['fetch', 'nowhere/', 'there']) == 2\n"
        "assert cli.main(['publish', 'nowhere', './there', '--dry-run']) == 2\n"
        "assert cli.main(['report', 'nowhere']) == 2\n"
    )
    assert imported_by(code) == set()


def test_a_cached_run_is_quick(house: Path) -> None:
    loaded = recipes.load(house / "recipe.yaml")
    Runner(loaded, house / "w", {"fetch": FetchStage()}).run()
    began = time.process_time(), time.monotonic()
    done = trimtab(
        "run", str(house / "recipe.yaml"), "--work", str(house / "w"), "--until", "fetch"
    )
    assert done.returncode == 0, done.stderr
    assert "0 stages run, 1 reused" in done.stdout
    assert time.monotonic() - began[1] < 10  # alone on a core it takes about a second
