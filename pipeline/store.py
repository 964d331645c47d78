"""The stage store: one folder for each finished stage and key, complete or not there at all.

Layout below the work folder:

    store/STAGE/KEY/            outputs and record.json of a finished stage
    store/STAGE/KEY.partial/    out/ and scratch/ of an attempt that has not finished
    hashes.json                 what is known of files: device, inode, size, mtime, sha256 (a cache)
    telemetry.json              durations, peak memory, dates: never compared, never in a key
    lock                        held by the run that is at work
    runs/ID.jsonl               event logs
    dist/                       the BUILD

Does: begin, finish, find, verify and discard entries; hold the lock. Does not: decide what to run.

Invariant: `record.json` is written last and the folder appears by one rename, so an entry that can
be found is whole; an entry whose files have changed since is never returned.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from artifacts.checkpoint import atomic_write_json, fsync_folder, read_json
from artifacts.errors import TrimtabError
from pipeline.folders import RECORD, file_names
from pipeline.keys import FileHashes, Key, difference, output_hash, part_of


@dataclass(frozen=True)
class Entry:
    """A finished stage: its folder and what its record says."""

    stage: str
    key: str
    folder: Path
    outputs: dict[str, dict[str, Any]]
    summary: dict[str, Any]
    ingredients: dict[str, Any]

    def hash(self, part: str = "") -> str:
        """Content hash of all outputs, or of a part of them."""
        try:
            return output_hash(self.outputs, part)
        except TrimtabError as error:
            raise TrimtabError(f"stage {self.stage}: {error.message}") from None

    def place(self, part: str = "") -> Path:
        """The folder, or the path of a part in it."""
        if part and not part_of(self.outputs, part):
            raise TrimtabError(f"stage {self.stage} has no output {part!r}")
        return self.folder / part if part else self.folder

    @property
    def size(self) -> int:
        """Bytes of all outputs."""
        return sum(int(entry["size"]) for entry in self.outputs.values())


class Store:
    """The entries below one work folder."""

    def __init__(self, work: Path, hashes: FileHashes | None = None) -> None:
        self.work = work
        self.root = work / "store"
        self.hashes = hashes or FileHashes(work / "hashes.json")

    def folder(self, stage: str, key: str) -> Path:
        """Where the entry of a key is, or would be."""
        return self.root / stage / key

    def partial(self, stage: str, key: str) -> Path:
        """Where an attempt works."""
        return self.root / stage / f"{key}.partial"

    def find(
        self, stage: str, key: str, how: Literal["quick", "usual", "full"] = "usual"
    ) -> tuple[Entry | None, str]:
        """The entry of a key if it is whole, and why not if something is there that is not.

        Each file is compared with the record: its size, and its sha256 as remembered for its inode,
        size and mtime; a file that looks changed is hashed again. "full" hashes every file; "quick"
        hashes none and lets a file of the right size pass whose hash is not remembered.
        """
        folder = self.folder(stage, key)
        if not folder.exists():
            return None, ""
        try:
            record = read_json(folder / RECORD)
            entry = Entry(
                stage=stage,
                key=key,
                folder=folder,
                outputs=record["outputs"],
                summary=record["summary"],
                ingredients=record["ingredients"],
            )
            damage = self._damage(entry, how)
        except (TrimtabError, KeyError, TypeError) as error:
            return None, f"{RECORD} is not readable ({error.__class__.__name__})"
        return (None, damage) if damage else (entry, "")

    def _damage(self, entry: Entry, how: str) -> str:
        for name, wanted in sorted(entry.outputs.items()):
            path = entry.folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != wanted["size"]:
                return f"{name} has {path.stat().st_size} bytes, the record says {wanted['size']}"
            known = self.hashes.known(path)
            if how == "quick" and known is None:
                continue
            if how == "full" or known is None:
                known = self.hashes.of(path, fresh=True)
            if known != wanted["sha256"]:
                return f"{name} has other bytes than the record says"
        extra = sorted(set(_files(entry.folder)) - set(entry.outputs))
        return f"{extra[0]} is not in the record" if extra else ""

    def why_not(self, stage: str, key: Key) -> str:
        """Why there is no entry of this key: what differs from the newest one that is there."""
        records = [path / RECORD for path in (self.root / stage).glob("*") if not path.suffix]
        found = [path for path in records if path.is_file()]
        if not found:
            return ""
        try:
            newest = max(found, key=lambda path: path.stat().st_mtime_ns)
            return difference(read_json(newest)["ingredients"], key.ingredients)
        except (TrimtabError, KeyError, TypeError, AttributeError):
            return ""  # a damaged record explains nothing; it is redone where it is needed

    def begin(self, stage: str, key: str, *, resumable: bool) -> tuple[Path, Path]:
        """An empty `out` and a `scratch` (kept from before if `resumable`), stale attempts gone."""
        home = self.root / stage
        home.mkdir(parents=True, exist_ok=True)
        for old in sorted(home.iterdir()):
            stale = old.name.endswith(".partial") and not resumable
            if stale or old.name.endswith(".damaged"):
                shutil.rmtree(old)
        self.discard(stage, key)
        partial = self.partial(stage, key)
        out, scratch = partial / "out", partial / "scratch"
        if out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True)
        scratch.mkdir(exist_ok=True)
        return out, scratch

    def discard(self, stage: str, key: str) -> None:
        """Remove an entry; it disappears by one rename first."""
        folder = self.folder(stage, key)
        if folder.exists():
            damaged = folder.with_name(f"{key}.damaged")
            folder.rename(damaged)
            shutil.rmtree(damaged)

    def outputs_of(self, out: Path) -> dict[str, dict[str, Any]]:
        """Size and sha256 of each file below `out`; a symbolic link is refused.

        Raises:
            TrimtabError: naming the link, or a file that has the name of the record.
        """
        if (out / RECORD).exists():
            raise TrimtabError(f"output {RECORD} has the name of the store's own record")
        outputs: dict[str, dict[str, Any]] = {}
        for name in _files(out):
            path = out / name
            if path.is_symlink():
                raise TrimtabError(f"output {name} is a symbolic link; outputs are plain files")
            outputs[name] = {"sha256": self.hashes.of(path), "size": path.stat().st_size}
        return outputs

    def write_record(self, stage: str, key: Key, summary: dict[str, Any]) -> None:
        """Flush the outputs of an attempt to disk and write its record, the last file of all."""
        out = self.partial(stage, key.hex) / "out"
        outputs = self.outputs_of(out)
        for name in outputs:
            with (out / name).open("rb") as stream:
                os.fsync(stream.fileno())
        record = {
            "stage": stage,
            "key": key.hex,
            "ingredients": key.ingredients,
            "outputs": outputs,
            "output_hash": output_hash(outputs),
            "summary": summary,
        }
        atomic_write_json(out / RECORD, record)

    def finish(self, stage: str, key: Key) -> Entry:
        """Move a recorded attempt into place and drop its scratch."""
        partial, folder = self.partial(stage, key.hex), self.folder(stage, key.hex)
        (partial / "out").rename(folder)
        fsync_folder(folder.parent)
        shutil.rmtree(partial)
        record = read_json(folder / RECORD)
        for name, output in record["outputs"].items():
            self.hashes.remember(folder / name, output["sha256"])
        self.hashes.save()
        return Entry(
            stage, key.hex, folder, record["outputs"], record["summary"], record["ingredients"]
        )

    def partials(self) -> dict[str, list[Path]]:
        """Unfinished attempts by stage."""
        found: dict[str, list[Path]] = {}
        for path in sorted(self.root.glob("*/*.partial")):
            found.setdefault(path.parent.name, []).append(path)
        return found

    def telemetry(self) -> dict[str, Any]:
        """What earlier runs measured, by "STAGE/KEY"."""
        try:
            return dict(read_json(self.work / "telemetry.json"))
        except (TrimtabError, TypeError, ValueError):
            return {}

    def add_telemetry(self, stage: str, key: str, values: dict[str, Any]) -> None:
        """Set the measurements of one finished stage."""
        atomic_write_json(
            self.work / "telemetry.json", {**self.telemetry(), f"{stage}/{key}": values}
        )


@contextlib.contextmanager
def lock(work: Path) -> Iterator[None]:
    """Hold the work folder for one run.

    Raises:
        TrimtabError: another run holds it (its process id is in the message), or the folder cannot
            be written.
    """
    path = work / "lock"
    try:
        work.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise TrimtabError(
            f"{work}: cannot be written ({error.strerror})", hint="choose another with --work"
        ) from None
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            stream.seek(0)
            holder = stream.read().strip() or "unknown"
            raise TrimtabError(
                f"{work}: another run is at work there (process {holder})",
                hint="wait for it, end it, or choose another folder with --work",
            ) from None
        stream.seek(0)
        stream.truncate()
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


def _files(folder: Path) -> list[str]:
    """Relative names of all outputs below a folder, sorted; the record excepted at the top."""
    return [name for name in file_names(folder) if name != RECORD]


def plain(value: Any) -> Any:
    """A summary through JSON and back: what the record will say of it.

    Raises:
        TrimtabError: it holds something that is not a JSON value, or a NaN.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TrimtabError(f"summary is not plain JSON: {error}") from None
