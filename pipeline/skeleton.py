"""A checkpoint without its weights: config, small JSON files, tensor headers, file sizes.

Does: read them from a folder, or from a Hub repository at a commit (small files, and the headers by
range requests). Does not: read a weight, judge anything, or import torch.

Input: a `Source` of the recipe. Output: `Skeleton`, which is a TensorSource for everything but
`get`.

Invariant: what cannot be read becomes a problem, never a default.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.checkpoint import INDEX_NAME, Checkpoint, TensorInfo, read_json
from artifacts.errors import TrimtabError
from pipeline.problems import Problems
from pipeline.sections import Source

if TYPE_CHECKING:
    from torch import Tensor

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX_NAME,
)


@dataclass(frozen=True)
class Skeleton:
    """What is known of a checkpoint before its weights are touched.

    Attributes:
        where: the recipe's key, "base" or "drafter".
        label: the folder or repository@commit, for messages.
        config: config.json.
        infos: every tensor the checkpoint accounts for.
        folder: where the small files lie.
        sizes: bytes of each file of the checkpoint, by name.
        stray: safetensors files that belong to no index.
    """

    where: str
    label: str
    config: dict[str, Any]
    infos: dict[str, TensorInfo]
    folder: Path
    sizes: dict[str, int]
    stray: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self.infos)

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor."""
        return self.infos[name]

    def get(self, name: str) -> Tensor:
        """Refused: there are no weights here."""
        raise LookupError(f"{self.label}: {name} has not been read, only its header")

    def __contains__(self, name: object) -> bool:
        return name in self.infos

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config."""
        text = self.config.get("text_config")
        return text if isinstance(text, dict) else self.config

    def json(self, name: str) -> Any:
        """A small JSON file's content, None if it is not there.

        Raises:
            TrimtabError: it is there and is not JSON.
        """
        path = self.folder / name
        return read_json(path) if path.is_file() else None

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a file."""
        return name in self.sizes


def read(where: str, source: Source, problems: Problems) -> Skeleton | None:
    """The skeleton of a source; problems for everything that is missing, torn or contradictory.

    None if so little can be read that nothing else can be checked.
    """
    try:
        if source.path is not None:
            return _local(where, source.path, problems)
        return _remote(where, str(source.repo), str(source.revision), problems)
    except TrimtabError as error:
        problems.add_error(where, error)
        return None


def _local(where: str, folder: Path, problems: Problems) -> Skeleton:
    checkpoint = Checkpoint.open(folder, verify=False)
    for text in checkpoint.problems:
        problems.add(where, text, "fetch the checkpoint again")
    return Skeleton(
        where=where,
        label=str(folder),
        config=checkpoint.config,
        infos={name: checkpoint.info(name) for name in checkpoint.names()},
        folder=folder,
        sizes={
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
        stray=tuple(checkpoint.stray),
    )


def _remote(where: str, repo: str, revision: str, problems: Problems) -> Skeleton:
    from pipeline import hub_reading

    label = f"{repo}@{revision[:12]}"
    listing = hub_reading.listing(repo, revision)
    sizes = {file.name: file.size for file in listing}
    if "config.json" not in sizes:
        raise TrimtabError(f"{label}: has no config.json", hint="give a repository of a model")
    wanted = [name for name in SMALL_FILES if name in sizes]
    folder = hub_reading.small_files(repo, revision, wanted)
    config = read_json(folder / "config.json")
    shards, stray = shards_of(sizes, folder / INDEX_NAME, label)
    missing = sorted(set(shards) - set(sizes))
    for shard in missing:
        problems.add(where, f"{label}: shard {shard} is named by the index and not there")
    infos: dict[str, TensorInfo] = {}
    for shard in shards:
        if shard not in missing:
            infos |= hub_reading.headers(repo, revision, shard)
    placed = weight_map(folder / INDEX_NAME)
    for name in sorted(set(placed) - set(infos)):
        if placed[name] not in missing:
            problems.add(where, f"{label}: the index places {name} in {placed[name]}; not there")
    return Skeleton(where, label, config, infos, folder, sizes, tuple(stray))


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard, empty without an index."""
    if not index.is_file():
        return {}
    content = read_json(index)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise TrimtabError(f"{index.name}: has no weight_map", hint="fetch it again")
    return found


def shards_of(sizes: dict[str, int], index: Path, label: str) -> tuple[list[str], list[str]]:
    """(weight files that belong to the model, safetensors files that do not).

    Raises:
        TrimtabError: no safetensors, or several without an index.
    """
    present = sorted(name for name in sizes if name.endswith(".safetensors") and "/" not in name)
    if index.is_file():
        wanted = sorted(set(weight_map(index).values()))
    elif len(present) == 1:
        wanted = present
    else:
        raise TrimtabError(
            f"{label}: {len(present)} safetensors files and no index",
            hint=f"a checkpoint is one .safetensors file, or shards and {INDEX_NAME}",
        )
    return wanted, sorted(set(present) - set(wanted))


def count_rows(path: Path) -> int:
    """Rows of a .json list or of JSON lines.

    Raises:
        TrimtabError: the file is missing, or a line is not a JSON object (with its number).
    """
    if not path.is_file():
        raise TrimtabError(f"{path}: no such file", hint="correct the path in the recipe")
    if path.suffix == ".json":
        content = read_json(path)
        if isinstance(content, list):
            return len(content)
    rows = 0
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                good = isinstance(json.loads(line), dict)
            except ValueError:
                good = False
            if not good:
                raise TrimtabError(f"{path}: line {number} is not a JSON object")
            rows += 1
    return rows
