"""fetch: the base, the drafter and an imported body's original, from folders or from the Hub.

Does: take the files of known kinds (weights that an index or a lone file accounts for, JSON,
tokenizer files, templates, licences), check each one's size and hash and every header, report what
was left. Refuses pickles and Python files by name. From a folder, files are hard links where that
is possible; from the Hub, an interrupted download goes on at the same commit.

Leaves target/, drafter/, original/ and files.json (for each part: where from, size and sha256 of
each file, what was refused, unknown or stray).

Invariant: nothing is left here that was not verified, and nothing pickled is ever opened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from artifacts.checkpoint import INDEX_NAME, Checkpoint, atomic_write_json, find_index
from artifacts.errors import TrimtabError
from pipeline import hub_reading
from pipeline.folders import link_or_copy
from pipeline.problems import Problems
from pipeline.recipe import Recipe
from pipeline.sections import Source
from pipeline.skeleton import shards_of
from pipeline.stage import BaseStage, StageContext

PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
KINDS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab")
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
NESTED = "additional_chat_templates"


@dataclass(frozen=True)
class Choice:
    """Names of a source's files by what becomes of them.

    Attributes:
        taken: fetched.
        refused: pickles and Python files.
        unknown: of no kind that a checkpoint needs; reported, not fetched.
        stray: safetensors that no index names.
    """

    taken: tuple[str, ...]
    refused: tuple[str, ...]
    unknown: tuple[str, ...]
    stray: tuple[str, ...]

    def left(self) -> dict[str, list[str]]:
        """What was not taken, for the record."""
        kinds = {"refused": self.refused, "unknown": self.unknown, "stray": self.stray}
        return {kind: list(names) for kind, names in kinds.items()}


def choose(names: Iterable[str], shards: Iterable[str]) -> Choice:
    """Sort a source's file names; `shards` are the weight files that belong to the model.

    Raises:
        TrimtabError: a name leads out of its folder.
    """
    wanted = set(shards)
    taken, refused, unknown, stray = list(wanted), [], [], []
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise TrimtabError(f"file name {name!r} leads out of the checkpoint; nothing was taken")
        if name in wanted or any(part.startswith(".") for part in path.parts):
            continue
        if name.endswith((*PICKLES, ".py")):
            refused.append(name)
        elif name.endswith(".safetensors"):
            stray.append(name)
        elif _kind(path):
            taken.append(name)
        else:
            unknown.append(name)
    return Choice(*(tuple(sorted(kind)) for kind in (taken, refused, unknown, stray)))


def _kind(path: PurePosixPath) -> bool:
    if path.name.endswith(".index.json") and path.name != INDEX_NAME:
        return False  # of weights in another format
    if len(path.parts) > 1 and path.parts[0] != NESTED:
        return False
    return path.suffix in KINDS or path.name.upper().startswith(LICENCES)


def choose_in_folder(folder: Path) -> Choice:
    """What to take of a local checkpoint.

    Raises:
        TrimtabError: it is no folder, or has no safetensors that an index or a lone file accounts
            for.
    """
    if not folder.is_dir():
        raise TrimtabError(f"{folder}: not a folder", hint="give the folder of a checkpoint")
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    index = find_index(folder) or folder / INDEX_NAME
    shards, _ = shards_of(sizes, index, str(folder))
    choice = choose(sizes, shards)
    return Choice(
        tuple(sorted({*choice.taken, *([index.name] if index.is_file() else [])})),
        choice.refused,
        tuple(name for name in choice.unknown if name != index.name),
        choice.stray,
    )


class FetchStage(BaseStage):
    """Linking, copying or downloading, and checking."""

    name = "fetch"
    resumable = True
    computes = False

    def sources(self, recipe: Recipe) -> dict[str, Source]:
        """The checkpoints of the recipe by the name of their folder here."""
        found: dict[str, Source | None] = {"target": recipe.base, "drafter": recipe.drafter}
        if recipe.target.source == "imported":
            found["original"] = recipe.signs.original
        return {part: source for part, source in found.items() if source is not None}

    def files(self, recipe: Recipe) -> dict[str, Path]:
        """Every file that is taken from a folder, as PART/NAME."""
        return {
            f"{part}/{name}": source.path / name
            for part, source in self.sources(recipe).items()
            if source.path is not None
            for name in choose_in_folder(source.path).taken
        }

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """Repository and commit of each part, or what is left of its folder."""
        return {
            part: choose_in_folder(source.path).left()
            if source.path is not None
            else {"repo": source.repo, "revision": source.revision}
            for part, source in self.sources(recipe).items()
        }

    def check(self, recipe: Recipe, problems: Problems) -> None:
        """Notes on what will be left behind (what is missing is found by the plan itself)."""
        for part, source in self.sources(recipe).items():
            if source.path is None:
                continue
            try:
                left = choose_in_folder(source.path).left()
            except TrimtabError:
                continue  # the plan reads every source and reports it
            for kind, names in left.items():
                if names and kind != "stray":
                    problems.note(f"fetch {part}", f"{kind}, not fetched: {', '.join(names)}")

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Fetch part by part; the summary says how many files and bytes each has."""
        record: dict[str, Any] = {}
        for part, settings in ctx.config.items():
            if "repo" in settings:
                made = _from_hub(ctx, part, settings["repo"], settings["revision"])
            else:
                made = _from_folder(ctx, part, settings)
            Checkpoint.open(ctx.out / part)
            record[part] = made
            for kind in ("refused", "unknown", "stray"):
                if made[kind]:
                    ctx.progress.say(f"fetch: {part}: {kind}: {', '.join(made[kind])}")
            ctx.checkpoint(part)
        atomic_write_json(ctx.out / "files.json", record)
        return {
            part: {
                "files": len(made["files"]),
                "bytes": sum(file["size"] for file in made["files"].values()),
            }
            for part, made in record.items()
        }


def _from_folder(ctx: StageContext, part: str, left: dict[str, Any]) -> dict[str, Any]:
    prefix = f"{part}/"
    names = [name for name in ctx.files if name.startswith(prefix)]
    with ctx.progress.task(f"files of {part}", len(names), "files") as task:
        for name in names:
            made = ctx.out / name
            link_or_copy(ctx.files[name], made)
            if ctx.hash_file(made) != ctx.file_hashes[name]:
                raise TrimtabError(
                    f"{ctx.files[name]}: changed while it was fetched", hint="run again"
                )
            ctx.checkpoint(name)
            task.advance()
    return {"source": "folder", "files": _listed(ctx, part), **left}


def _from_hub(ctx: StageContext, part: str, repo: str, revision: str) -> dict[str, Any]:
    """Small files first, then the shards that the index names, each checked and then linked."""
    files = {file.name: file for file in hub_reading.listing(repo, revision)}
    staged = ctx.scratch / part
    sizes = {name: file.size for name, file in files.items()}

    def take(names: Iterable[str]) -> None:
        wanted = sorted(names)
        with ctx.progress.task(f"download of {part}", len(wanted), "files") as task:
            for name in wanted:
                have = staged / name
                if not have.is_file() or files[name].differs(have):
                    have.unlink(missing_ok=True)
                    hub_reading.download(repo, revision, name, staged)
                wrong = files[name].differs(have)
                if wrong:
                    raise TrimtabError(f"{repo}: {wrong}", hint="run again")
                ctx.checkpoint(f"{part}/{name}")
                task.advance()

    small = choose(files, ()).taken
    take(small)
    label = f"{repo}@{revision[:12]}"
    shards, _ = shards_of(sizes, staged / INDEX_NAME, label)
    missing = sorted(set(shards) - set(files))
    if missing:
        raise TrimtabError(f"{label}: the index names {missing[0]}, which is not there")
    choice = choose(files, shards)
    take(shards)
    for name in choice.taken:
        link_or_copy(staged / name, ctx.out / part / name)
    source = {"repo": repo, "revision": revision}
    return {"source": source, "files": _listed(ctx, part), **choice.left()}


def _listed(ctx: StageContext, part: str) -> dict[str, dict[str, Any]]:
    folder = ctx.out / part
    return {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": ctx.hash_file(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


STAGE = FetchStage()
