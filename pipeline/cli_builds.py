"""The commands that work on a finished build: validate, publish, fetch, verify, generate, report.

Does: parse arguments, call the library, print. Does not: turn errors into exit codes (see `cli`,
which registers these functions), or need a recipe. All but `generate` and the higher tiers of
`validate` run without torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from artifacts.errors import TrimtabError

BuildFolder = Annotated[
    Path, typer.Argument(metavar="BUILD", help="A build: WORK/dist, or a fetched folder.")
]


def validate(
    build: BuildFolder,
    tier: Annotated[
        str,
        typer.Option("--tier", help="structure (seconds, no torch), numeric, or behaviour (all)."),
    ] = "behaviour",
) -> None:
    """Judge a build by its bytes: structure, numbers, behaviour. Exit 1 if a gate fails.

    \b
    Example:
      trimtab validate .trimtab/pocket/dist --tier structure
    """
    validating = _late("pipeline.stages.validate")
    for line in validating.validate_build(build, tier=tier) or ():
        print(line)


def publish(
    build: BuildFolder,
    destination: Annotated[
        str, typer.Argument(metavar="DESTINATION", help="A folder, or owner/name on the Hub.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and send nothing.")
    ] = False,
    allow_failed: Annotated[
        list[str] | None,
        typer.Option("--allow-failed", metavar="GATE", help="A gate that may have failed."),
    ] = None,
) -> None:
    """Send a sealed build to a folder laid out as a Hub repository, or to the Hub.

    \b
    Example:
      trimtab publish .trimtab/pocket/dist ./hub/pocket
    """
    from artifacts.hub import publish as publish_build
    from pipeline.events import size

    made = publish_build(build, destination, dry_run=dry_run, allow_failed=allow_failed or ())
    what = "would publish" if dry_run else "published" if made.changed else "already there:"
    print(f"{what} {made.files} files, {size(made.bytes)}: {made.url or made.location}")
    if made.revision:
        print(f"revision {made.revision}")


def fetch(
    reference: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A folder, or owner/name[@revision] on the Hub."),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to fill.")],
) -> None:
    """Get a published build and verify every byte of it.

    \b
    Example:
      trimtab fetch ./hub/pocket pocket
    """
    from artifacts.fetching import fetch as fetch_build

    found = fetch_build(reference, destination)
    print(f"{destination}: {found.name}, {len(found.files)} files verified")


def verify(build: BuildFolder) -> None:
    """Compare every file of a build with its manifest.

    \b
    Example:
      trimtab verify pocket
    """
    from artifacts.manifest import verify as verify_build

    problems = verify_build(build)
    if problems:
        raise TrimtabError("\n".join(problems), hint="fetch the build again")
    print(f"{build}: every file is as the manifest says")


def generate(
    build: BuildFolder,
    prompt: Annotated[str, typer.Option("--prompt", help="What to say to the model.")],
    draft: Annotated[
        str,
        typer.Option("--draft", help="none, mtp, dflash, dflash2, lookup or dflash2+lookup."),
    ] = "none",
    depth: Annotated[int, typer.Option("--depth", min=1, help="Draft tokens of MTP.")] = 3,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0, help="Instead of the build's; 0 is greedy."),
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="The likeliest token always.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without chat template.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    stats: Annotated[
        Path | None, typer.Option("--stats", help="Append the figures to this file, as JSON.")
    ] = None,
) -> None:
    """Stream text from a build; tokens per step, acceptance and speed go to standard error.

    \b
    Example:
      trimtab generate .trimtab/pocket/dist --prompt "What does ls do?" --draft dflash2
    """
    from pipeline.generating import Request, generate_text

    if device not in ("auto", "cpu", "cuda"):
        raise TrimtabError(f"--device {device}: must be auto, cpu or cuda")
    if greedy and temperature:
        raise TrimtabError(f"--greedy and --temperature {temperature:g} exclude each other")
    generate_text(
        build,
        Request(
            prompt=prompt,
            draft=draft,
            depth=depth,
            temperature=0.0 if greedy else temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            raw=raw,
            device=device,
            stats=stats,
        ),
    )


def report(
    build: BuildFolder,
    stats: Annotated[
        Path | None, typer.Option("--stats", help="File written by generate --stats.")
    ] = None,
) -> None:
    """Print one table of a build: sizes, quality, coverage, acceptance, tokens per step.

    \b
    Example:
      trimtab report .trimtab/pocket/dist
    """
    from rich.console import Console

    from pipeline.report import show_report

    console = Console()
    show_report(build, console if console.is_terminal else Console(width=160), stats)


def _late(module: str) -> Any:
    """A module that is imported only by the command that needs it."""
    return importlib.import_module(module)
