"""Fetching a published build and verifying every byte: standard library and huggingface_hub only.

`artifacts.fetching` uses this module, and each build's `fetch_<name>.py` carries its text, so the
script that people run and the command `trimtab fetch` are one implementation. It imports nothing of
this project. Does not cover checkpoints without a manifest.

In: a folder or a Hub repository that holds `trimtab.json`. Out: a folder with exactly the listed
files. Each file is staged under `DEST/.partial`, hashed, and only then moved to its place;
`trimtab.json` is moved last. Invariant: what stands under its own name in DEST was verified, and a
fetch that was killed goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "trimtab.json"
SUMS = "SHA256SUMS"
STAGING = ".partial"
CHUNK = 1 << 22
REPO = re.compile(r"(?:hf://)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


class FetchError(Exception):
    """The build cannot be fetched; nothing unverified was left under its own name."""


def parse_repo(text: str) -> tuple[str, str | None] | None:
    """(owner/name, revision or None) of `owner/name`, `hf://owner/name`, each with `@revision`."""
    match = REPO.fullmatch(text)
    return (match[1], match[2]) if match else None


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """A file's sha256 in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while data := stream.read(CHUNK):
            digest.update(data)
            if on_bytes:
                on_bytes(len(data))
    return digest.hexdigest()


def safe_path(name: object) -> str:
    """The path itself; FetchError when it could lead out of the destination."""
    parts = name.split("/") if isinstance(name, str) else []
    if not isinstance(name, str) or not name or {"", ".", "..", STAGING} & {*parts}:
        raise FetchError(f"{MANIFEST}: path {name!r} is not inside the build; refused")
    if re.search(r"[\\:\x00]", name):
        raise FetchError(f"{MANIFEST}: path {name!r} is not portable; refused")
    return name


class Progress:
    """One moving line on a terminal, a line a file elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.begun, self.shown = total, 0, time.monotonic(), 0.0
        self.live = sys.stderr.isatty()

    def advance(self, count: int, name: str) -> None:
        """Counts verified bytes of a file."""
        self.done += count
        now = time.monotonic()
        if self.live and now - self.shown > 0.1:
            self.shown = now
            rate = self.done / max(now - self.begun, 1e-3)
            left = (self.total - self.done) / max(rate, 1.0)
            share = 100 * self.done / max(self.total, 1)
            text = f"{share:5.1f} %  {rate / 1e6:7.1f} MB/s  {left:5.0f} s left  {name}"
            print(f"\r{text[:100]:<100}", end="", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        """A line of its own."""
        if self.live:
            print("\r" + " " * 100, end="\r", file=sys.stderr)
        print(text, file=sys.stderr, flush=True)


class FolderSource:
    """A folder laid out as a Hub repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.label = str(root)

    def stage(self, name: str, staging: Path, size: int | None, fresh: bool) -> Path:
        """Copies a file into the staging folder, going on after what is there already."""
        origin, staged = self.root / name, staging / name
        if not origin.is_file():
            raise FetchError(f"{self.label}: {name} is missing")
        staged.parent.mkdir(parents=True, exist_ok=True)
        have = staged.stat().st_size if staged.exists() and not fresh else 0
        if size is None or have > size:
            have = 0
        with origin.open("rb") as reader, staged.open("r+b" if have else "wb") as writer:
            reader.seek(have)
            writer.seek(have)
            shutil.copyfileobj(reader, writer, CHUNK)
        return staged


class HubSource:
    """A repository at one commit; tokens are huggingface_hub's own business."""

    def __init__(self, repo_id: str, revision: str | None) -> None:
        from huggingface_hub import HfApi

        self.repo_id = repo_id
        try:
            self.commit = HfApi().repo_info(repo_id, revision=revision).sha
        except Exception as error:
            raise FetchError(f"{repo_id}@{revision or 'main'}: {reason(error)}") from error
        self.label = f"{repo_id}@{self.commit}"

    def stage(self, name: str, staging: Path, size: int | None, fresh: bool) -> Path:
        """Downloads a file at the pinned commit; the client resumes what it began."""
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download(
                self.repo_id,
                name,
                revision=self.commit,
                local_dir=staging,
                force_download=fresh,
            )
        except Exception as error:
            raise FetchError(f"{self.label}: {name}: {reason(error)}") from error
        return Path(path)


def reason(error: Exception) -> str:
    """One line of an error of the Hub's client: what the server said, without headers."""
    said = getattr(error, "server_message", None)
    lines = str(said or error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def read_manifest(data: bytes, wanted_sha256: str | None) -> dict[str, Any]:
    """The manifest's content; FetchError when its hash, layout or a path in it is wrong."""
    actual = hashlib.sha256(data).hexdigest()
    if wanted_sha256 is not None and actual != wanted_sha256:
        raise FetchError(f"{MANIFEST}: sha256 is {actual}, {wanted_sha256} is pinned")
    try:
        manifest = json.loads(data)
        files = manifest["files"]
        good = all(
            isinstance(entry["size"], int) and re.fullmatch("[0-9a-f]{64}", entry["sha256"])
            for entry in files.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{MANIFEST}: not a manifest: {error!r}") from error
    if manifest.get("schema_version") != 1 or not good:
        raise FetchError(f"{MANIFEST}: of another layout than 1; get a newer script")
    folded: dict[str, str] = {}
    for name in files:
        if folded.setdefault(safe_path(name).casefold(), name) != name or name in (MANIFEST, SUMS):
            raise FetchError(f"{MANIFEST}: path {name!r} clashes with another; refused")
    return dict(manifest)


def check_destination(dest: Path, listed: set[str]) -> None:
    """FetchError when DEST holds anything that is not of this build."""
    for path in sorted(dest.rglob("*")):
        name = path.relative_to(dest).as_posix()
        if name.startswith(f"{STAGING}/") or name == STAGING:
            continue
        if path.is_symlink():
            raise FetchError(f"{path}: a link; refused")
        if path.is_file() and name not in listed:
            raise FetchError(f"{path}: not of this build; give an empty folder")


def _place(staged: Path, target: Path) -> None:
    """Moves a verified file to its name, durably."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with staged.open("rb") as stream:
        os.fsync(stream.fileno())
    staged.replace(target)


def fetch_build(
    source: FolderSource | HubSource,
    dest: Path,
    *,
    manifest_sha256: str | None = None,
    script: tuple[str, bytes] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Fetches all files of a build into `dest` and returns its manifest.

    `manifest_sha256` pins the build. `script` is (file name, content) of the fetch script, which
    the manifest cannot list; without it, the source's own is taken. Files that are there already
    are hashed and kept. Raises FetchError; running it again goes on.
    """
    staging = _staging(dest)
    data = source.stage(MANIFEST, staging, None, True).read_bytes()
    manifest = read_manifest(data, manifest_sha256)
    files: dict[str, dict[str, Any]] = manifest["files"]
    if script is None:
        name = "fetch_" + re.sub(r"[^A-Za-z0-9]", "_", manifest["name"]) + ".py"
        script = (name, source.stage(safe_path(name), staging, None, True).read_bytes())
    check_destination(dest, {*files, MANIFEST, SUMS, script[0]})
    total = sum(entry["size"] for entry in files.values())
    if shutil.disk_usage(dest).free < total - _present(dest, files):
        raise FetchError(f"{dest}: {total / 1e9:.2f} GB are needed, the disk has less left")
    progress = Progress(total)
    for name, entry in sorted(files.items(), key=lambda item: (item[1]["size"], item[0])):
        _fetch_file(source, name, entry, dest, progress)
        if not quiet and not progress.live:
            progress.line(f"{100 * progress.done / max(total, 1):5.1f} %  {name}")
    _finish(dest, files, data, script)
    if not quiet:
        progress.line(f"{manifest['name']}: {len(files)} files, {total / 1e6:.1f} MB, verified")
    return manifest


def _staging(dest: Path) -> Path:
    """The staging folder; FetchError unless DEST is new, empty, or holds a fetch or a build."""
    staging = dest / STAGING
    if dest.is_symlink() or staging.is_symlink() or (dest.exists() and not dest.is_dir()):
        raise FetchError(f"{dest}: not a folder of its own; refused")
    if (
        dest.is_dir()
        and any(dest.iterdir())
        and not (staging.is_dir() or (dest / MANIFEST).exists())
    ):
        raise FetchError(f"{dest}: not empty and no fetch of a build; give an empty folder")
    staging.mkdir(parents=True, exist_ok=True)
    return staging


def _present(dest: Path, files: dict[str, dict[str, Any]]) -> int:
    return sum(entry["size"] for name, entry in files.items() if (dest / name).is_file())


def _fetch_file(
    source: FolderSource | HubSource,
    name: str,
    entry: dict[str, Any],
    dest: Path,
    progress: Progress,
) -> None:
    """One file: kept if it is there and right, else staged, verified (twice at most), placed."""
    target = dest / name
    if target.is_file():
        if target.stat().st_size == entry["size"] and sha256_of(target) == entry["sha256"]:
            progress.advance(entry["size"], name)
            return
        target.unlink()
    for fresh in (False, True):
        staged = source.stage(name, dest / STAGING, entry["size"], fresh)
        size = staged.stat().st_size
        if size == entry["size"] and sha256_of(staged) == entry["sha256"]:
            _place(staged, target)
            progress.advance(entry["size"], name)
            return
        staged.unlink()
    raise FetchError(
        f"{source.label}: {name}: {size} bytes whose sha256 is not the manifest's; not kept"
    )


def _finish(
    dest: Path, files: dict[str, dict[str, Any]], manifest: bytes, script: tuple[str, bytes]
) -> None:
    """Script, sums and, last of all, the manifest; then the staging folder goes."""
    staging = dest / STAGING
    sums = {name: entry["sha256"] for name, entry in files.items()}
    sums[MANIFEST] = hashlib.sha256(manifest).hexdigest()
    sums[script[0]] = hashlib.sha256(script[1]).hexdigest()
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    for name, data in ((script[0], script[1]), (SUMS, text.encode()), (MANIFEST, manifest)):
        (staging / name).write_bytes(data)
        _place(staging / name, dest / name)
    shutil.rmtree(staging)
