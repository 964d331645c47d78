"""Publishing a sealed build: to a folder laid out as a Hub repository, or to the Hub.

Covers refusing what must not be published, the atomic folder publication, and the Hub publication
in exactly one commit. Does not cover sealing (`manifest`) or fetching back (`fetching`).
In: a BUILD that `manifest.seal` finished, and a destination. Out: a `Publication`.
Invariant: at the destination there is a whole verified build or what was there before, at any
moment; tokens are huggingface_hub's own business and are neither read nor printed here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from artifacts.errors import GateFailed, TrimtabError
from artifacts.fetch_core import REPO
from artifacts.fetching import render_script
from artifacts.files import fsync_folder, sha256_file
from artifacts.manifest import (
    MANIFEST,
    SUMS,
    Manifest,
    failed_gates,
    load,
    script_name,
    sums_text,
    verify,
)


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What was published, or with `dry_run` would be.

    kind: "folder" or "hub". location: the folder, or owner/name. manifest_sha256: of trimtab.json.
    files, bytes: that the destination holds. revision, url: the commit, on the Hub. changed: False
    when the destination already held exactly this build. deleted: stale remote files that the
    commit removes. failed_gates: those that `allow_failed` let through.
    """

    kind: str
    location: str
    manifest_sha256: str
    files: int
    bytes: int
    changed: bool
    revision: str | None = None
    url: str | None = None
    deleted: list[str] = field(default_factory=list)
    failed_gates: list[str] = field(default_factory=list)


def parse_destination(destination: str | Path) -> tuple[str, str]:
    """("hub", owner/name) or ("folder", path). A Path, or a text with more than one slash, a
    leading dot or a leading slash, is a folder; `owner/name` and `hf://owner/name` are the Hub.

    Raises TrimtabError for a text that could be both.
    """
    if isinstance(destination, Path):
        return "folder", str(destination)
    match = REPO.fullmatch(destination)
    if match is None:
        if destination.startswith("hf://"):
            raise TrimtabError(f"{destination}: not hf://owner/name", hint="name a repository")
        return "folder", destination
    if match[2]:
        raise TrimtabError(f"{destination}: publish to a repository, not to a revision of it")
    if not destination.startswith("hf://") and Path(destination).exists():
        raise TrimtabError(
            f"{destination}: a folder here, and a repository's name",
            hint=f"write ./{destination} or hf://{destination}",
        )
    return "hub", match[1]


def check_publishable(
    build: Path, allow_failed: Collection[str] = ()
) -> tuple[Manifest, list[str]]:
    """The manifest and the failed gates that were allowed.

    Raises TrimtabError when a file is missing, changed or extra, and GateFailed when a gate failed
    that is not in `allow_failed` (or no gate was judged at all).
    """
    manifest = load(build)
    problems = verify(build)
    if problems:
        raise TrimtabError(
            f"{build}: not as it was sealed: {problems[0]}"
            + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""),
            hint="run the publish stage again; nothing was published",
        )
    failed = failed_gates(manifest.gates)
    known = {str(verdict.get("gate")) for verdict in manifest.gates.get("gates") or []}
    unknown = sorted(set(allow_failed) - known)
    if unknown:
        raise TrimtabError(
            f"no gate is called {unknown[0]!r}; there are {', '.join(sorted(known))}"
        )
    forbidden = [name for name in failed if name not in allow_failed]
    if forbidden:
        raise GateFailed(
            f"{build}: gates failed: {', '.join(forbidden)}; nothing was published",
            hint="see gates.json, or name each gate that may fail",
        )
    return manifest, failed


def publish(
    build: Path | str,
    destination: str | Path,
    *,
    dry_run: bool = False,
    allow_failed: Collection[str] = (),
) -> Publication:
    """Publishes a sealed build; with `dry_run` checks all and writes nothing, asks no network.

    Raises what `check_publishable` raises, and TrimtabError when the folder holds something else or
    the Hub refuses, with the Hub's own words.
    """
    build = Path(build)
    kind, location = parse_destination(destination)
    manifest, failed = check_publishable(build, allow_failed)
    if kind == "hub":
        from artifacts.hub_commit import publish_hub

        return publish_hub(build, location, manifest, failed, dry_run=dry_run)
    return _publish_folder(build, Path(location), manifest, failed, dry_run=dry_run)


def published_files(manifest: Manifest) -> list[str]:
    """All paths of a publication, sorted."""
    return sorted([*manifest.files, MANIFEST, SUMS, script_name(manifest.name)])


def overrides(manifest: Manifest, manifest_sha256: str, repo_id: str) -> dict[str, bytes]:
    """The files that name the repository, when it is not the one that the build was sealed for."""
    if repo_id == manifest.repo_id:
        return {}
    import hashlib

    name = script_name(manifest.name)
    script = render_script(manifest, manifest_sha256, repo_id=repo_id).encode("utf-8")
    sums = sums_text(manifest, manifest_sha256, name, hashlib.sha256(script).hexdigest())
    return {name: script, SUMS: sums.encode("utf-8")}


# --- folders -------------------------------------------------------------------------------------


def _publish_folder(
    build: Path, dest: Path, manifest: Manifest, failed: list[str], *, dry_run: bool
) -> Publication:
    dest = dest.parent.resolve() / dest.name
    digest = sha256_file(build / MANIFEST)
    _refuse_foreign(build, dest)
    current = dest / MANIFEST
    same = current.is_file() and sha256_file(current) == digest and not verify(dest)
    names = published_files(manifest)
    result = Publication(
        kind="folder",
        location=str(dest),
        manifest_sha256=digest,
        files=len(names),
        bytes=sum((build / name).stat().st_size for name in names),
        changed=not same,
        failed_gates=failed,
    )
    if same or dry_run:
        return result
    dest.parent.mkdir(parents=True, exist_ok=True)
    fresh = dest.with_name(f".{dest.name}.partial")
    old = dest.with_name(f".{dest.name}.old")
    if fresh.exists():
        shutil.rmtree(fresh)
    for name in names:
        _copy(build / name, fresh / name)
    problems = verify(fresh)
    if problems:
        raise TrimtabError(f"{fresh}: not what was written: {problems[0]}", hint="check the disk")
    _swap(fresh, dest, old)
    return result


def _refuse_foreign(build: Path, dest: Path) -> None:
    """A destination is new, empty, or an earlier publication, and not the build itself."""
    build = build.resolve()
    if dest == build or build in dest.parents or dest in build.parents:
        raise TrimtabError(f"{dest}: is inside the build or holds it", hint="give another folder")
    if dest.is_symlink() or (dest.exists() and not dest.is_dir()):
        raise TrimtabError(f"{dest}: not a folder", hint="give another folder")
    if dest.is_dir() and any(dest.iterdir()):
        try:
            load(dest)
        except TrimtabError as error:
            raise TrimtabError(
                f"{dest}: not empty and no earlier publication", hint="give an empty folder"
            ) from error


def _copy(origin: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with origin.open("rb") as reader, target.open("xb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 22)
        writer.flush()
        os.fsync(writer.fileno())


def _swap(fresh: Path, dest: Path, old: Path) -> None:
    """Puts the new folder in the place of the old one; the old one comes back if that fails.

    Killed between the two renames, both whole folders stand beside the destination; the next
    publication puts the new one there.
    """
    for folder in sorted({path.parent for path in fresh.rglob("*")} | {fresh}):
        fsync_folder(folder)
    if not dest.exists() or not any(dest.iterdir()):
        fresh.replace(dest)  # onto nothing, or onto an empty folder
    else:
        if old.exists():
            shutil.rmtree(old)
        dest.rename(old)
        try:
            fresh.rename(dest)
        except OSError:
            old.rename(dest)
            raise
    fsync_folder(dest.parent)
    if old.exists():
        shutil.rmtree(old)
