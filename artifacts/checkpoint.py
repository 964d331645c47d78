"""Checkpoints as sources of named tensors: folders, single files, and layers over a base.

Covers folders with `config.json` and an index (or one file), one safetensors file, and a source
made of several layers; it is also the one door to the files below (`tensor_file`, `shards`,
`files`). Does not cover what the tensors mean (`names`, `packing`, `quant_config`) or whether a
finished build is right (`structure`). Opening and checking needs no torch.
In: folders and `*.safetensors` files. Out: `TensorSource` objects.
Invariant: nothing is read that a header and an index do not account for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from artifacts.errors import TrimtabError
from artifacts.files import (
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    canonical_json,
    fsync_folder,
    read_json,
    sha256_file,
)
from artifacts.shards import PACKED_SUFFIXES, index_totals, write_index, write_shards
from artifacts.tensor_file import (
    DTYPES,
    INDEX_NAME,
    TensorInfo,
    read_header,
    read_shape,
    read_tensor,
    sha256_tensor,
    sha256_tensors,
    write_single,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DTYPES",
    "INDEX_NAME",
    "PACKED_SUFFIXES",
    "Checkpoint",
    "Overlay",
    "SingleFile",
    "TensorInfo",
    "TensorSource",
    "atomic_write_bytes",
    "atomic_write_json",
    "atomic_write_text",
    "canonical_json",
    "find_index",
    "fsync_folder",
    "index_totals",
    "load_single",
    "read_header",
    "read_json",
    "read_shape",
    "sha256_file",
    "sha256_tensor",
    "sha256_tensors",
    "small_ints",
    "write_index",
    "write_shards",
    "write_single",
]


class TensorSource(Protocol):
    """Named tensors that can be had one at a time, and the config that describes them."""

    @property
    def config(self) -> dict[str, Any]: ...
    def names(self) -> list[str]:
        """All names, sorted."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place; TrimtabError for an unknown name."""
        ...

    def get(self, name: str) -> Tensor:
        """The tensor as stored, in memory of its own."""
        ...

    def __contains__(self, name: str) -> bool: ...


def _unknown(where: str, name: str) -> TrimtabError:
    return TrimtabError(
        f"{where} holds no tensor {name!r}", hint="compare the names with the source's index"
    )


class _Files:
    """A TensorSource over known infos, each with the path of its file."""

    def __init__(
        self, where: str, config: dict[str, Any], infos: dict[str, tuple[Path, TensorInfo]]
    ) -> None:
        self._where = where
        self._infos = infos
        self.config: dict[str, Any] = config

    def names(self) -> list[str]:
        return sorted(self._infos)

    def info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise _unknown(self._where, name)
        return self._infos[name][1]

    def get(self, name: str) -> Tensor:
        info = self.info(name)
        return read_tensor(self._infos[name][0], info)

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor."""
        self.info(name)
        return self._infos[name][0]

    def __contains__(self, name: object) -> bool:
        return name in self._infos


class SingleFile(_Files):
    """One safetensors file as a source, with an empty config; `.metadata` is its header's."""

    def __init__(self, path: Path) -> None:
        infos, self.metadata = read_header(path)
        super().__init__(str(path), {}, {name: (path, info) for name, info in infos.items()})
        self.path = path


def load_single(path: Path | str) -> SingleFile:
    """One safetensors file as a TensorSource; its config is empty."""
    return SingleFile(Path(path))


def find_index(folder: Path) -> Path | None:
    """The folder's index: `model.safetensors.index.json`, or the only such file."""
    usual = folder / INDEX_NAME
    if usual.exists():
        return usual
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise TrimtabError(
            f"{folder}: several indexes: {', '.join(path.name for path in found)}",
            hint="keep the one that belongs to the shards",
        )
    return found[0] if found else None


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise TrimtabError(f"{index}: has no weight_map", hint="fetch it again")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise TrimtabError(
                f"{index}: tensor {name!r} is placed in {file!r}; "
                "a shard is a .safetensors file beside the index",
                hint="fetch the index again",
            )
    return weight_map


class Checkpoint(_Files):
    """A folder with `config.json` and safetensors: an index and its shards, or a single file.

    `root` is the folder, `metadata` maps each loaded file to its header's metadata, `stray` names
    the safetensors files that the index does not (they are never read), `index` is the index's path
    or None, `weight_map` the index's map (or the single file's), `problems` what is wrong.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder
        if not folder.is_dir():
            raise TrimtabError(f"{folder}: not a folder", hint="give the folder of a checkpoint")
        config = read_json(folder / "config.json")
        if not isinstance(config, dict):
            raise TrimtabError(
                f"{folder / 'config.json'}: not a JSON object", hint="fetch it again"
            )
        present = sorted(path.name for path in folder.glob("*.safetensors"))
        self.index = find_index(folder)
        self.metadata: dict[str, dict[str, str]] = {}
        self.problems: list[str] = []
        self.weight_map: dict[str, str] = {}
        if self.index is not None:
            self.weight_map = _weight_map(self.index)
            wanted = sorted(set(self.weight_map.values()))
        elif len(present) == 1:
            wanted = present
        else:
            raise TrimtabError(
                f"{folder}: {len(present)} safetensors files and no index: which belong to the "
                "model cannot be known",
                hint=f"a checkpoint is one .safetensors file, or shards and {INDEX_NAME}",
            )
        self.stray = [name for name in present if name not in wanted]
        infos: dict[str, tuple[Path, TensorInfo]] = {}
        for file in wanted:
            self._read_shard(file, infos)
        if self.index is None:
            self.weight_map = {name: info.file for name, (_, info) in infos.items()}
        for name, file in sorted(self.weight_map.items()):
            if file in self.metadata and name not in infos:
                self.problems.append(f"{folder}: the index places {name!r} in {file}; not there")
        super().__init__(str(folder), config, infos)

    def _read_shard(self, file: str, infos: dict[str, tuple[Path, TensorInfo]]) -> None:
        path = self.root / file
        if not path.exists():
            count = sum(1 for shard in self.weight_map.values() if shard == file)
            self.problems.append(
                f"{self.root}: shard {file} is missing; the index places {count} tensors in it"
            )
            return
        try:
            header, self.metadata[file] = read_header(path)
        except TrimtabError as error:
            self.problems.append(error.message)
            return
        for name, info in sorted(header.items()):
            if self.index is not None and self.weight_map.get(name) != file:
                placed = self.weight_map.get(name, "no file")
                self.problems.append(f"{path}: holds {name!r}, which the index places in {placed}")
            else:
                infos[name] = (path, info)

    @classmethod
    def open(cls, folder: Path | str, *, verify: bool = True) -> Checkpoint:
        """Opens a folder. `verify=False` leaves what is wrong in `.problems` instead of raising it.

        Raises TrimtabError when config.json or all weights are missing, and with `verify` when a
        shard is missing or truncated or a header is not what the index says.
        """
        opened = cls(Path(folder))
        if verify and opened.problems:
            more = len(opened.problems) - 1
            text = opened.problems[0] + (f" (and {more} more)" if more else "")
            raise TrimtabError(text, hint="fetch the checkpoint again; nothing was used")
        return opened

    def files(self) -> list[str]:
        """The names of the weight files that belong to the checkpoint, sorted."""
        return sorted(self.metadata)


class Overlay:
    """A base and layers over it; each name comes from the last layer that has it.

    A layer's `X.weight_packed` hides `X.weight` from below (and `X.weight` hides a packed triple),
    so a quantized matrix takes the place of the plain one. `config` is the base's.
    """

    def __init__(self, base: TensorSource, *layers: Path | str | TensorSource) -> None:
        self.config: dict[str, Any] = base.config
        self._from: dict[str, TensorSource] = dict.fromkeys(base.names(), base)
        for layer in layers:
            source: TensorSource
            if isinstance(layer, (str, Path)):
                path = Path(layer)
                source = Checkpoint.open(path) if path.is_dir() else load_single(path)
            else:
                source = layer
            names = source.names()
            for name in names:
                module, _, leaf = name.rpartition(".")
                if leaf == "weight_packed":
                    self._hide(f"{module}.weight")
                elif leaf == "weight":
                    self._hide(*(f"{module}.{suffix}" for suffix in PACKED_SUFFIXES))
            self._from.update(dict.fromkeys(names, source))

    def _hide(self, *names: str) -> None:
        for name in names:
            self._from.pop(name, None)

    def names(self) -> list[str]:
        return sorted(self._from)

    def origin(self, name: str) -> TensorSource:
        """The layer (or the base) that the tensor comes from."""
        if name not in self._from:
            raise _unknown("the overlay", name)
        return self._from[name]

    def info(self, name: str) -> TensorInfo:
        return self.origin(name).info(name)

    def get(self, name: str) -> Tensor:
        return self.origin(name).get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._from


def small_ints(source: TensorSource, name: str) -> tuple[int, ...]:
    """The values of a small integer tensor (a `weight_shape`), from files without torch."""
    while isinstance(source, Overlay):
        source = source.origin(name)
    if isinstance(source, _Files) and source.info(name).dtype == "I64":
        return read_shape(source.file_of(name), source.info(name))
    return tuple(int(value) for value in source.get(name).reshape(-1).tolist())
