"""One safetensors file: strict header, reading a tensor, deterministic writing, hashes.

In: a path, or tensors by name. Out: `TensorInfo`s, tensors, a file. Headers and hashes need no
torch. Does not cover folders of several files (`checkpoint`, `shards`).
Invariant: a file whose header does not account for every byte is refused, and equal tensors give
equal bytes. (safetensors' own writer puts the metadata keys in a random order, so `write_single`
writes the header itself; the format is 8 bytes of header length, JSON, data.)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import TrimtabError
from artifacts.files import fsync_folder, no_duplicates

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
CHUNK_BYTES = 1 << 22
# safetensors' dtype names: (bytes an element, torch's name)
DTYPES: dict[str, tuple[int, str]] = {
    "BOOL": (1, "bool"),
    "U8": (1, "uint8"),
    "I8": (1, "int8"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "I16": (2, "int16"),
    "U16": (2, "uint16"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I32": (4, "int32"),
    "U32": (4, "uint32"),
    "F32": (4, "float32"),
    "I64": (8, "int64"),
    "U64": (8, "uint64"),
    "F64": (8, "float64"),
}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor. `start` and `end` are byte positions in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """One header entry, checked: known dtype, a shape of counts, offsets of the right length."""

    def bad(what: str) -> TrimtabError:
        return TrimtabError(f"{path}: tensor {name!r}: {what}", hint="fetch the file again")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("an entry has exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise bad(f"dtype {dtype!r} is not one of {', '.join(sorted(DTYPES))}")
    for value, what in ((shape, "shape"), (offsets, "data_offsets")):
        if not isinstance(value, list) or not all(
            type(item) is int and item >= 0 for item in value
        ):
            raise bad(f"{what} {value!r} is not a list of counts")
    if len(offsets) != 2:
        raise bad(f"data_offsets {offsets!r} is not a pair")
    wanted = math.prod(shape) * DTYPES[dtype][0]
    if offsets[1] - offsets[0] != wanted:
        raise bad(f"{dtype}{shape} takes {wanted} bytes, its offsets {offsets} do not")
    begin, end = data_start + offsets[0], data_start + offsets[1]
    return TensorInfo(name, dtype, tuple(shape), path.name, begin, end)


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata of one safetensors file, without reading its data.

    Raises TrimtabError, naming the file, when the length, the JSON or an entry is wrong, when two
    tensors overlap or leave a gap, or when the data does not end where the file ends.
    """
    path = Path(path)
    again = "fetch the file again"
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little") if len(prefix) == 8 else -1
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise TrimtabError(f"{path}: header length {length} is not possible", hint=again)
            if 8 + length > size:
                raise TrimtabError(f"{path}: truncated inside its header", hint=again)
            raw = stream.read(length)
    except OSError as error:
        raise TrimtabError(f"{path}: cannot be read: {error.strerror}", hint=again) from error
    try:
        header = json.loads(raw, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise TrimtabError(f"{path}: the header is not JSON: {error}", hint=again) from error
    if not isinstance(header, dict):
        raise TrimtabError(f"{path}: the header is not a JSON object", hint=again)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise TrimtabError(f"{path}: __metadata__ is not a map of texts", hint=again)
    infos = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    position = 8 + length
    for info in sorted(infos.values(), key=lambda info: (info.start, info.end)):
        if info.start != position:
            raise TrimtabError(
                f"{path}: tensor {info.name!r} begins at byte {info.start}, "
                f"the one before ends at {position}",
                hint=again,
            )
        position = info.end
    if position != size:
        what = "truncated" if position > size else "longer than its header says"
        raise TrimtabError(f"{path}: {what}: {size} bytes, {position} expected", hint=again)
    return infos, metadata


def read_tensor(path: Path, info: TensorInfo) -> Tensor:
    """The bytes of one tensor in memory of its own; no map of the file stays open."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[info.dtype][1])
    if info.numel == 0:
        return torch.empty(info.shape, dtype=dtype)
    buffer = bytearray(info.nbytes)
    with path.open("rb", buffering=0) as stream:
        stream.seek(info.start)
        view, done = memoryview(buffer), 0
        while done < info.nbytes:
            got = stream.readinto(view[done:])
            if not got:
                raise TrimtabError(f"{path}: truncated inside {info.name!r}", hint="fetch it again")
            done += got
    return torch.frombuffer(buffer, dtype=dtype).reshape(info.shape)


def read_shape(path: Path, info: TensorInfo) -> tuple[int, ...]:
    """The values of a small int64 tensor (a `weight_shape`), without torch."""
    if info.dtype != "I64" or info.nbytes > 64:
        raise TrimtabError(f"{path}: {info.name!r} is {info.dtype}{list(info.shape)}, not a shape")
    with path.open("rb") as stream:
        stream.seek(info.start)
        return struct.unpack(f"<{info.numel}q", stream.read(info.nbytes))


def _dtype_name(name: str, tensor: Tensor) -> str:
    wanted = str(tensor.dtype).removeprefix("torch.")
    for key, (_, torch_name) in DTYPES.items():
        if torch_name == wanted:
            return key
    raise TrimtabError(f"tensor {name!r} has dtype {wanted}, which safetensors cannot hold")


def checked(name: str, tensor: Tensor) -> Tensor:
    """The tensor on the CPU and contiguous; a tensor without storage is refused by name."""
    if tensor.device.type == "meta" or (tensor.numel() and not tensor.untyped_storage().nbytes()):
        raise TrimtabError(
            f"tensor {name!r} has no data (device {tensor.device.type}); nothing was written",
            hint="load the weights before writing them",
        )
    return tensor.detach().cpu().contiguous()


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied (numpy knows no bf16)."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_single(
    path: Path | str, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one safetensors file atomically, the same bytes for the same tensors and metadata.

    Wide dtypes come first so that all data is aligned, then names in order. Writing
    `model.safetensors` removes an older index beside it, which would describe other files.
    Raises TrimtabError for a tensor without data or of a dtype that the format lacks.
    """
    path = Path(path)
    ready = {name: checked(name, tensor) for name, tensor in tensors.items()}
    kinds = {name: _dtype_name(name, tensor) for name, tensor in ready.items()}
    order = sorted(ready, key=lambda name: (-DTYPES[kinds[name]][0], name))
    header: dict[str, Any] = {
        "__metadata__": dict(sorted({"format": "pt", **(metadata or {})}.items()))
    }
    position = 0
    for name in order:
        end = position + ready[name].numel() * ready[name].element_size()
        header[name] = {
            "dtype": kinds[name],
            "shape": list(ready[name].shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)))
        stream.write(raw)
        for name in order:
            if ready[name].numel():
                stream.write(_raw(ready[name]))
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    if path.name == "model.safetensors":
        (path.parent / INDEX_NAME).unlink(missing_ok=True)
    fsync_folder(path.parent)


def _chunks(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as stream:
        stream.seek(start)
        left = end - start
        while left:
            data = stream.read(min(CHUNK_BYTES, left))
            if not data:
                raise TrimtabError(f"{path}: truncated at byte {end - left}", hint="fetch it again")
            left -= len(data)
            yield data


def sha256_tensors(path: Path | str) -> dict[str, str]:
    """name -> sha256 in hex of the tensor's stored bytes, for every tensor of one file."""
    path = Path(path)
    result: dict[str, str] = {}
    for name, info in sorted(read_header(path)[0].items()):
        digest = hashlib.sha256()
        for data in _chunks(path, info.start, info.end):
            digest.update(data)
        result[name] = digest.hexdigest()
    return result


def sha256_tensor(tensor: Tensor) -> str:
    """The sha256 in hex of the bytes that a file would store for this tensor."""
    ready = checked("tensor", tensor)
    return hashlib.sha256(_raw(ready) if ready.numel() else b"").hexdigest()
