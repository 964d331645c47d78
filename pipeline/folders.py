"""Folders put together from files that lie elsewhere, without copying where that can be helped.

Does: hard links with copies where there are none, whole trees, replacing a folder at once. Does
not: know what is in the files.

Invariant: no file is ever changed in place, so our own folders can share bytes by links.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from artifacts.checkpoint import fsync_folder, sha256_file

RECORD = "record.json"  # the store's own file in each entry


def link_or_copy(source: Path, destination: Path) -> bool:
    """Make `destination` hold the bytes of `source`; True if by a hard link, False if by a copy.

    Another file system, or one without links, makes a copy necessary.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    real = source.resolve()
    try:
        os.link(real, destination)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(real, destination)
        return False
    return True


def link_tree(source: Path, destination: Path) -> None:
    """Every file below `source`, the record excepted, linked or copied below `destination`."""
    for name in file_names(source):
        if name != RECORD:
            link_or_copy(source / name, destination / name)


def replace_folder(made: Path, destination: Path) -> None:
    """Put a complete folder in the place of another: at every moment there is the old or the new.

    Between the two renames `destination` is absent for an instant; the old one is then still whole
    beside it as `.NAME.old` and the next call removes it.
    """
    old = destination.with_name(f".{destination.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if destination.exists():
        destination.rename(old)
    made.rename(destination)
    fsync_folder(destination.parent)
    if old.exists():
        shutil.rmtree(old)


def show_build(folder: Path, dist: Path) -> None:
    """Make `dist` hold exactly the outputs in `folder`; nothing happens if it does already."""
    names = [name for name in file_names(folder) if name != RECORD]
    if dist.is_dir() and file_names(dist) == names:
        shared = all((folder / name).samefile(dist / name) for name in names)
        if shared or all(_same_bytes(folder / name, dist / name) for name in names):
            return
    fresh = dist.with_name(f".{dist.name}.partial")
    if fresh.exists():
        shutil.rmtree(fresh)
    link_tree(folder, fresh)
    replace_folder(fresh, dist)


def _same_bytes(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and sha256_file(one) == sha256_file(other)


def file_names(folder: Path) -> list[str]:
    """Relative names of everything below a folder that is not a folder, sorted."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    )
