"""The command line: `trimtab plan|run|status|validate|publish|fetch|verify|generate|report|recipe`.

Does: parse arguments, call the library, print, and turn errors into exit codes: 0 done, 1 a gate
failed, 2 the user's input, 130 interrupted. Does not: hold any logic of its own.

Invariant: a user's mistake costs one line for each problem, never a traceback; only a bug shows
one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from artifacts.errors import TrimtabError
from pipeline import cli_builds as builds
from pipeline.redaction import redact

# UsageError, of click or of typer's own copy of it
USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="trimtab",
    help="Rebuild a quantized model with its drafters from one recipe, and prove it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
recipe_app = typer.Typer(
    help="Look at recipes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(recipe_app, name="recipe")

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
Work = Annotated[
    Path | None,
    typer.Option("--work", metavar="DIR", help="Work folder; by default ./.trimtab/NAME."),
]
Until = Annotated[
    str | None,
    typer.Option("--until", metavar="STAGE", help="Stop after this stage and what it needs."),
]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    try:
        code = app(args=arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted: finished stages are kept; run the same to go on", file=sys.stderr)
        return 130
    except USAGE_ERROR as error:
        error.show()
        return 2
    except TrimtabError as error:
        for line in redact(error.message).splitlines():
            print(f"error: {line}", file=sys.stderr)
        if error.hint:
            print(f"  next: {redact(error.hint)}", file=sys.stderr)
        return error.exit_code


def _work(work: Path | None, name: str) -> Path:
    return work if work is not None else Path(".trimtab") / name


@app.command()
def plan(recipe: RecipeFile, work: Work = None, until: Until = None) -> None:
    """Show what a run would do, and everything that is wrong, without reading weights.

    \b
    Example:
      trimtab plan recipes/pocket.yaml
    """
    from rich.console import Console

    from pipeline import plan as planning
    from pipeline import recipe as recipes
    from pipeline.plan_view import show
    from pipeline.stages import registry

    loaded = recipes.load(recipe)
    found = planning.examine(loaded, _work(work, loaded.name), registry(), until=until)
    console = Console()
    show(found, console if console.is_terminal else Console(width=160))
    found.problems.raise_if_any()


@app.command()
def run(
    recipe: RecipeFile,
    work: Work = None,
    until: Until = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every stored file before it is reused.")
    ] = False,
) -> None:
    """Build what the recipe says, reusing every finished stage that is still valid.

    \b
    Example:
      trimtab run recipes/pocket.yaml --until validate
    """
    from pipeline import plan as planning
    from pipeline import recipe as recipes
    from pipeline.runner import Runner
    from pipeline.stages import registry

    loaded = recipes.load(recipe)
    place, stages = _work(work, loaded.name), registry()
    found = planning.examine(loaded, place, stages, until=until)
    found.problems.raise_if_any()
    print(planning.summary(found), file=sys.stderr)
    result = Runner(loaded, place, stages, verify=verify).run(until)
    print(f"{len(result.ran)} stages run, {len(result.reused)} reused; log {result.log}")


@app.command()
def status(recipe: RecipeFile, work: Work = None) -> None:
    """Show which stages are stored, how long they took, and how the last run ended.

    \b
    Example:
      trimtab status recipes/pocket.yaml
    """
    from rich.console import Console

    from pipeline import recipe as recipes
    from pipeline.stages import registry
    from pipeline.status import show_status

    loaded = recipes.load(recipe)
    console = Console()
    show_status(
        loaded,
        _work(work, loaded.name),
        registry(),
        console if console.is_terminal else Console(width=160),
    )


for command in (
    builds.validate,
    builds.publish,
    builds.fetch,
    builds.verify,
    builds.generate,
    builds.report,
):
    app.command()(command)


@recipe_app.command("check")
def recipe_check(recipe: RecipeFile) -> None:
    """Print the resolved recipe, every default filled in, or one line for each error.

    \b
    Example:
      trimtab recipe check recipes/pocket.yaml
    """
    from pipeline import recipe as recipes

    print(recipes.dump(recipes.load(recipe)), end="")


@recipe_app.command("fields")
def recipe_fields() -> None:
    """Print every key of a recipe with its default and what it means.

    \b
    Example:
      trimtab recipe fields
    """
    from pipeline import recipe as recipes

    for name, default, sentence in recipes.fields():
        print(f"{name}  [{default}]" if default else name)
        print(f"    {sentence}")


if __name__ == "__main__":
    sys.exit(main())
