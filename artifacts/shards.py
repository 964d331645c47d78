"""Writing a checkpoint folder: shards of bounded size, and the index from their headers.

In: (name, tensor) pairs in the order of the shards. Out: `model-*.safetensors` and the index.
Does not cover config, tokenizer or other files of a checkpoint.
Invariant: the index says exactly what the headers on disk say; at most one shard is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.errors import TrimtabError
from artifacts.files import atomic_write_json
from artifacts.tensor_file import INDEX_NAME, checked, read_header, read_shape, write_single

if TYPE_CHECKING:
    from torch import Tensor

PACKED_SUFFIXES = ("weight_packed", "weight_scale", "weight_shape")


class _ShardWriter:
    """Collects tensors by bucket and writes the largest bucket whenever a shard is full."""

    def __init__(self, folder: Path, limit: int, metadata: Mapping[str, str] | None) -> None:
        self.folder, self.limit, self.metadata = folder, limit, metadata
        self.buckets: dict[str, dict[str, Tensor]] = {}
        self.held: dict[str, int] = {}
        self.parts: dict[str, list[Path]] = {}

    def add(self, bucket: str, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        while self.held and sum(self.held.values()) + size > self.limit:
            self.flush(max(self.held, key=lambda key: (self.held[key], key)))
        self.buckets.setdefault(bucket, {})[name] = tensor
        self.held[bucket] = self.held.get(bucket, 0) + size

    def flush(self, bucket: str) -> None:
        parts = self.parts.setdefault(bucket, [])
        part = self.folder / f".part-{bucket or 'model'}-{len(parts):05d}"
        write_single(part, self.buckets.pop(bucket), metadata=self.metadata)
        del self.held[bucket]
        parts.append(part)

    def finish(self) -> None:
        for bucket in sorted(self.held):
            self.flush(bucket)
        for bucket, parts in self.parts.items():
            for number, part in enumerate(parts, 1):
                stem = f"model-{bucket}" if bucket else "model"
                if not bucket or len(parts) > 1:
                    stem += f"-{number:05d}-of-{len(parts):05d}"
                part.replace(self.folder / f"{stem}.safetensors")


def write_shards(
    folder: Path | str,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int,
    separate: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Streams tensors into shards of at most `max_shard_bytes` and writes their index.

    Holds at most one shard's bytes and one tensor. `separate` maps a name prefix to a suffix:
    {"mtp.": "mtp"} puts `mtp.*` into `model-mtp.safetensors` (numbered if it needs several files).
    The order of `tensors` decides the shards. Raises TrimtabError when the folder already holds
    safetensors files, a name comes twice, or a tensor has no data.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    old = sorted(path.name for path in folder.glob("*.safetensors"))
    if old:
        raise TrimtabError(
            f"{folder}: already holds {', '.join(old)}",
            hint="write a checkpoint to an empty folder",
        )
    writer = _ShardWriter(folder, max_shard_bytes, metadata)
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise TrimtabError(f"tensor {name!r} comes twice", hint="report this as a bug")
        seen.add(name)
        found = [suffix for prefix, suffix in (separate or {}).items() if name.startswith(prefix)]
        writer.add(found[0] if found else "", name, checked(name, tensor))
    if not seen:
        raise TrimtabError(f"{folder}: no tensors to write", hint="check the source's index")
    writer.finish()
    write_index(folder)


def index_totals(folder: Path, files: Iterable[str]) -> tuple[int, int]:
    """(tensor bytes, logical parameters): a packed triple counts the n x k of its weight_shape."""
    headers = {name: info for file in files for name, info in read_header(folder / file)[0].items()}
    total_bytes = total_parameters = 0
    for name, info in headers.items():
        total_bytes += info.nbytes
        module, _, leaf = name.rpartition(".")
        if leaf not in PACKED_SUFFIXES or f"{module}.weight_packed" not in headers:
            total_parameters += info.numel
        elif leaf == "weight_shape":
            total_parameters += math.prod(read_shape(folder / info.file, info))
    return total_bytes, total_parameters


def write_index(folder: Path | str) -> None:
    """Writes the index of all safetensors files of the folder, from their headers alone.

    `total_size` is the sum of the tensors' bytes; `total_parameters` counts a packed matrix by its
    logical n x k, its scales and shape not at all.
    """
    folder = Path(folder)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    weight_map: dict[str, str] = {}
    for file in files:
        for name in read_header(folder / file)[0]:
            if name in weight_map:
                raise TrimtabError(
                    f"{folder}: {name!r} is in {weight_map[name]} and in {file}",
                    hint="write a checkpoint to an empty folder",
                )
            weight_map[name] = file
    size, parameters = index_totals(folder, files)
    atomic_write_json(
        folder / INDEX_NAME,
        {
            "metadata": {"total_size": size, "total_parameters": parameters},
            "weight_map": weight_map,
        },
    )
