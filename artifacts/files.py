"""Small files: canonical JSON, atomic writing, sha256. Needs only the standard library.

Covers what every room writes beside tensors. Does not cover safetensors (`tensor_file`).
Invariant: a file that exists under its own name is whole, and one value has one text.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from artifacts.errors import TrimtabError


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=...)`: a key that stands twice is an error."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} stands twice")
        result[key] = value
    return result


def read_json(path: Path) -> Any:
    """A JSON file's content; TrimtabError naming the file when it is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
    except FileNotFoundError as error:
        raise TrimtabError(
            f"{path}: missing", hint="give the folder of a complete checkpoint"
        ) from error
    except (ValueError, OSError, RecursionError) as error:
        raise TrimtabError(
            f"{path}: not readable as JSON: {error}", hint="fetch it again"
        ) from error


def fsync_folder(folder: Path) -> None:
    """Makes renames inside the folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """The file appears whole or not at all: temporary name, flush, fsync, rename."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    fsync_folder(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    """As `atomic_write_bytes`, in UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"))


def canonical_json(obj: object) -> str:
    """One text for one value: sorted keys, indent 2, no NaN, a newline at the end."""
    return json.dumps(obj, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def atomic_write_json(path: Path, obj: object) -> None:
    """Writes `canonical_json` atomically."""
    atomic_write_text(path, canonical_json(obj))


def sha256_file(path: Path | str) -> str:
    """The file's sha256 in hex."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
