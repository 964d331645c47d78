"""Reading and writing checkpoints: hostile headers, folders, overlays, shards, totals, hashes."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from artifacts.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    Overlay,
    atomic_write_json,
    canonical_json,
    load_single,
    read_header,
    sha256_file,
    sha256_tensor,
    sha256_tensors,
    small_ints,
    write_index,
    write_shards,
    write_single,
)
from artifacts.errors import TrimtabError
from artifacts.packing import PackedMatrix, Scheme
from tests.checkpoints import draft, tiny

ALL_DTYPES = {
    "bool": torch.tensor([True, False]),
    "u8": torch.arange(3, dtype=torch.uint8),
    "i8": torch.arange(3, dtype=torch.int8),
    "f16": torch.rand(2, 3).half(),
    "bf16": torch.rand(2, 3).bfloat16(),
    "f32": torch.rand(2, 3),
    "i32": torch.arange(4, dtype=torch.int32),
    "i64": torch.arange(4),
    "f64": torch.rand(2).double(),
    "f8": torch.rand(4).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 5),
    "scalar": torch.tensor(3.5),
}


def raw_file(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start: int, end: int, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape or [end - start], "data_offsets": [start, end]}


HOSTILE = {
    "header length 0 is not possible": ({}, b"", 0),
    "is not possible": ({}, b"", 1 << 40),
    "truncated inside its header": ({"a": entry(0, 1)}, b"", 5000),
    "not JSON": (b"{nope", b"", None),
    "stands twice": (b'{"a":1,"a":2}', b"", None),
    "not a JSON object": ([1], b"", None),
    "exactly dtype, shape": ({"a": {"dtype": "U8"}}, b"", None),
    "dtype 'Q4'": ({"a": entry(0, 1, "Q4")}, b"x", None),
    "not a list of counts": ({"a": entry(0, 1, "U8", [-1])}, b"x", None),
    "its offsets": ({"a": entry(0, 2, "U8", [3])}, b"xx", None),
    "begins at byte": ({"a": entry(0, 2), "b": entry(1, 3)}, b"xxx", None),
    "the one before ends at": ({"a": entry(0, 1), "b": entry(2, 3)}, b"xxx", None),
    "truncated: ": ({"a": entry(0, 4)}, b"xxx", None),
    "longer than its header": ({"a": entry(0, 2)}, b"xxx", None),
    "a map of texts": ({"__metadata__": {"a": 1}}, b"", None),
}


@pytest.mark.parametrize("expected", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, expected: str) -> None:
    header, data, length = HOSTILE[expected]
    path = raw_file(tmp_path / "x.safetensors", header, data, length=length)
    with pytest.raises(TrimtabError, match=expected) as caught:
        read_header(path)
    assert "x.safetensors" in str(caught.value)


def test_reading_equals_safetensors_own(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(ALL_DTYPES, path, metadata={"a": "b"})
    source = load_single(path)
    assert source.names() == sorted(ALL_DTYPES)
    assert source.metadata == {"a": "b"}
    for name, tensor in load_file(path).items():
        mine = source.get(name)
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape
        assert sha256_tensor(mine) == sha256_tensor(tensor) == sha256_tensors(path)[name]
    assert small_ints(source, "i64") == (0, 1, 2, 3)
    with pytest.raises(TrimtabError, match="holds no tensor 'zzz'"):
        source.get("zzz")


def test_a_tensor_read_does_not_depend_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_single(path, {"a": torch.ones(4)})
    tensor = load_single(path).get("a")
    path.write_bytes(b"\0" * path.stat().st_size)
    tensor += 1
    assert tensor.tolist() == [2, 2, 2, 2]


def test_written_files_are_read_by_safetensors_and_depend_on_nothing_else(tmp_path: Path) -> None:
    meta = {key: key * 2 for key in "hgfedcba"}
    write_single(tmp_path / "a.safetensors", ALL_DTYPES, metadata=meta)
    backwards = dict(reversed(ALL_DTYPES.items()))
    write_single(tmp_path / "b.safetensors", backwards, metadata=dict(reversed(meta.items())))
    assert sha256_file(tmp_path / "a.safetensors") == sha256_file(tmp_path / "b.safetensors")
    theirs = load_file(tmp_path / "a.safetensors")
    assert all(sha256_tensor(theirs[n]) == sha256_tensor(t) for n, t in ALL_DTYPES.items())
    infos, metadata = read_header(tmp_path / "a.safetensors")
    assert metadata == {"format": "pt", **meta}
    assert all(info.start % 4 == 0 for info in infos.values() if info.dtype in ("F32", "I32"))
    transposed = torch.rand(4, 6).t()
    write_single(tmp_path / "c.safetensors", {"t": transposed})
    assert torch.equal(load_single(tmp_path / "c.safetensors").get("t"), transposed)
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_c64_a_tensor_without_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=r"'a\.b' has no data \(device meta"):
        write_single(tmp_path / "x.safetensors", {"a.b": torch.empty(3, device="meta")})
    assert not list(tmp_path.iterdir())
    with pytest.raises(TrimtabError, match="'c' has dtype complex64"):
        write_single(tmp_path / "x.safetensors", {"c": torch.zeros(2, dtype=torch.complex64)})


def test_c15_missing_truncated_and_zeroed_shards(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "t")
    source = Checkpoint.open(folder)
    assert source.files() == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model-mtp.safetensors",
    ]
    assert source.stray == [] and source.problems == []
    shard = folder / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    messages = []
    for damage in (None, data[:-1], b"\0" * 8 + data[8:]):
        if damage is None:
            shard.unlink()
        else:
            shard.write_bytes(damage)
        with pytest.raises(TrimtabError) as caught:
            Checkpoint.open(folder)
        messages.append(caught.value.message)
    assert "shard model-00002-of-00002.safetensors is missing; the index places" in messages[0]
    assert "truncated" in messages[1] and "header length 0" in messages[2]
    assert len(Checkpoint.open(folder, verify=False).problems) == 1


def test_index_and_headers_must_agree(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "t")
    index = json.loads((folder / INDEX_NAME).read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index["weight_map"]["model.norm.weight"] = first
    index["weight_map"]["ghost"] = second
    atomic_write_json(folder / INDEX_NAME, index)
    problems = Checkpoint.open(folder, verify=False).problems
    assert any("the index places 'ghost' in" in line for line in problems)
    assert any("holds 'model.norm.weight', which the index places in" in line for line in problems)
    index["weight_map"] = {"a": "../other.safetensors"}
    atomic_write_json(folder / INDEX_NAME, index)
    with pytest.raises(TrimtabError, match=r"a shard is a \.safetensors file beside the index"):
        Checkpoint.open(folder)


def test_c51_stray_files_are_listed_and_not_read(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "t")
    before = Checkpoint.open(folder).names()
    for number in range(1, 5):
        name = f"model-0000{number}-of-00004.safetensors"
        save_file({"model.norm.weight": torch.zeros(256)}, folder / name)
    source = Checkpoint.open(folder)
    assert len(source.stray) == 4
    assert source.names() == before
    assert bool((source.get("model.norm.weight") != 0).any())


def test_folders_without_a_clear_set_of_weights(tmp_path: Path) -> None:
    folder = draft(tmp_path / "d")
    assert Checkpoint.open(folder).files() == ["model.safetensors"]
    save_file({"x": torch.ones(1)}, folder / "other.safetensors")
    with pytest.raises(TrimtabError, match="2 safetensors files and no index"):
        Checkpoint.open(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(TrimtabError, match="0 safetensors files"):
        Checkpoint.open(folder)
    (folder / "config.json").unlink()
    with pytest.raises(TrimtabError, match=r"config\.json: missing"):
        Checkpoint.open(folder)
    with pytest.raises(TrimtabError, match="not a folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_c68_shards_are_named_by_the_index(tmp_path: Path) -> None:
    folder = draft(tmp_path / "d")
    (folder / "model.safetensors").rename(folder / "dflash_draft_model-00001.safetensors")
    source = Checkpoint.open(folder)
    weight_map = {name: "dflash_draft_model-00001.safetensors" for name in source.names()}
    atomic_write_json(folder / INDEX_NAME, {"weight_map": weight_map})
    save_file({"fc.weight": torch.zeros(1)}, folder / "model.safetensors")
    source = Checkpoint.open(folder)
    assert len(source.names()) == len(weight_map) and source.stray == ["model.safetensors"]


def test_overlay_replaces_and_hides(tmp_path: Path) -> None:
    base = {"a.weight": torch.ones(8, 16), "n.weight": torch.ones(3), "b.weight": torch.ones(2, 8)}
    write_single(tmp_path / "base.safetensors", base)
    codes = torch.ones((8, 16), dtype=torch.int8)
    matrix = PackedMatrix.from_codes(codes, torch.ones(8, 1), Scheme(4, -1))
    write_single(tmp_path / "one.safetensors", {**matrix.tensors("a"), "n.weight": torch.zeros(3)})
    overlay = Overlay(load_single(tmp_path / "base.safetensors"), tmp_path / "one.safetensors")
    triple = ["a.weight_packed", "a.weight_scale", "a.weight_shape"]
    assert overlay.names() == [*triple, "b.weight", "n.weight"]
    assert "a.weight" not in overlay and overlay.get("n.weight").sum() == 0
    assert overlay.info("b.weight").shape == (2, 8)
    assert small_ints(overlay, "a.weight_shape") == (8, 16)
    write_single(tmp_path / "two.safetensors", {"a.weight": torch.zeros(8, 16)})
    again = Overlay(overlay, tmp_path / "two.safetensors")
    assert again.names() == ["a.weight", "b.weight", "n.weight"]
    assert again.get("a.weight").sum() == 0


def test_overlay_over_a_checkpoint_keeps_its_config(tmp_path: Path) -> None:
    base = Checkpoint.open(tiny(tmp_path / "t"))
    assert Overlay(base, tmp_path / "t").config == base.config


def big_tensors(count: int, size: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"layers.{i:02d}.w.weight", torch.full((size // 4,), float(i))) for i in range(count)]


def test_write_shards_bounds_shards_and_separates(tmp_path: Path) -> None:
    tensors = [*big_tensors(10, 1000), ("mtp.fc.weight", torch.ones(700))]
    write_shards(
        tmp_path / "w", tensors, max_shard_bytes=3500, separate={"mtp.": "mtp"}, metadata={"a": "b"}
    )
    atomic_write_json(tmp_path / "w" / "config.json", {})
    made = Checkpoint.open(tmp_path / "w")
    assert made.files() == [*(f"model-{i:05d}-of-00004.safetensors" for i in (1, 2, 3, 4)),
                            "model-mtp.safetensors"]  # fmt: skip
    assert list(read_header(tmp_path / "w" / "model-mtp.safetensors")[0]) == ["mtp.fc.weight"]
    for name, tensor in tensors:
        assert torch.equal(made.get(name), tensor)
    for file in made.files():
        assert sum(i.nbytes for i in read_header(tmp_path / "w" / file)[0].values()) <= 3500
    assert made.metadata["model-mtp.safetensors"] == {"format": "pt", "a": "b"}
    assert not [path for path in (tmp_path / "w").iterdir() if path.name.startswith(".")]
    with pytest.raises(TrimtabError, match="already holds model-00001"):
        write_shards(tmp_path / "w", tensors, max_shard_bytes=3500)
    with pytest.raises(TrimtabError, match="comes twice"):
        write_shards(tmp_path / "x", [tensors[0], tensors[0]], max_shard_bytes=10**6)
    with pytest.raises(TrimtabError, match="no tensors"):
        write_shards(tmp_path / "y", [], max_shard_bytes=10**6)


def test_write_shards_holds_one_shard_at_most(tmp_path: Path) -> None:
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def stream():  # type: ignore[no-untyped-def]
        nonlocal most
        for i in range(12):
            tensor = torch.full((1000,), float(i))
            alive.append(weakref.ref(tensor))
            yield f"{'mtp.' if i % 2 else ''}w{i:02d}", tensor
            del tensor
            most = max(most, sum(ref() is not None for ref in alive))

    write_shards(tmp_path / "w", stream(), max_shard_bytes=12_000, separate={"mtp.": "mtp"})
    assert most <= 4  # three of 4,000 bytes in the shard, and the next one
    assert len(list((tmp_path / "w").glob("model-mtp-*.safetensors"))) > 1


def test_c79_totals_count_logical_parameters(tmp_path: Path) -> None:
    codes = torch.zeros((16, 256), dtype=torch.int8)
    matrix = PackedMatrix.from_codes(codes, torch.ones(16, 2), Scheme(4, 128))
    tensors = {**matrix.tensors("a"), "n.weight": torch.ones(7).bfloat16()}
    for limit in (10**6, 1):  # one shard, and a shard a tensor
        folder = tmp_path / str(limit)
        write_shards(folder, tensors.items(), max_shard_bytes=limit)
        metadata = json.loads((folder / INDEX_NAME).read_text())["metadata"]
        assert metadata["total_parameters"] == 16 * 256 + 7
        assert metadata["total_size"] == sum(t.nbytes for t in tensors.values())


def test_c52_a_single_file_removes_an_old_index(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / INDEX_NAME, {"weight_map": {"a": "gone.safetensors"}})
    write_single(tmp_path / "part.safetensors", {"a": torch.ones(1)})
    assert (tmp_path / INDEX_NAME).exists()
    write_single(tmp_path / "model.safetensors", {"a": torch.ones(1)})
    assert not (tmp_path / INDEX_NAME).exists()
    save_file({"a": torch.ones(2)}, tmp_path / "model-2.safetensors")
    with pytest.raises(TrimtabError, match=r"'a' is in .* and in"):
        write_index(tmp_path)


def test_canonical_json_and_hashes(tmp_path: Path) -> None:
    assert canonical_json({"b": 1, "a": "ä"}) == '{\n  "a": "ä",\n  "b": 1\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})
    atomic_write_json(tmp_path / "x.json", {"a": 1})
    digest = hashlib.sha256((tmp_path / "x.json").read_bytes()).hexdigest()
    assert sha256_file(tmp_path / "x.json") == digest
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


LIGHT = (
    "checkpoint names ledger scheme manifest hub hub_commit fetching fetch_core card inventory "
    "quant_lookup agreement quant_config draft_hash structure accounting scales tokenizer_check "
    "drafter_check"
)


def test_light_modules_import_neither_torch_nor_transformers() -> None:
    code = (
        f"import sys\nfor name in {LIGHT.split()!r}: __import__('artifacts.' + name)\n"
        "heavy = {'torch', 'transformers', 'compressed_tensors', 'llmcompressor', 'datasets'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


STREAM = """
import sys
from pathlib import Path
import torch
from artifacts.checkpoint import Checkpoint, atomic_write_json, write_shards

def peak():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

root, shard = Path(sys.argv[1]), int(sys.argv[2])
tensors = ((f"w{i:02d}", torch.full((shard // 8,), i, dtype=torch.uint8)) for i in range(12))
write_shards(root / "a", tensors, max_shard_bytes=shard)
atomic_write_json(root / "a" / "config.json", {})
source = Checkpoint.open(root / "a")
write_shards(root / "b", ((n, source.get(n)) for n in source.names()), max_shard_bytes=shard)
print(peak())
"""


@pytest.mark.parametrize(
    "megabytes", [128, pytest.param(1024, marks=pytest.mark.full)], ids=lambda mb: f"{mb}MB"
)
def test_c64_copying_holds_one_shard(tmp_path: Path, megabytes: int) -> None:
    shard = megabytes << 20
    base = "import torch, artifacts.checkpoint\nfrom pathlib import Path\nprint([int(x.split()[1]) \
* 1024 for x in Path('/proc/self/status').read_text().splitlines() if x.startswith('VmHWM')][0])"

    def run(*command: object) -> list[int]:
        made = subprocess.run(
            [sys.executable, "-c", *map(str, command)], capture_output=True, text=True, check=True
        )
        return [int(word) for word in made.stdout.split()]

    (baseline,) = run(base)
    (most,) = run(STREAM, tmp_path, shard)
    shutil.rmtree(tmp_path)
    assert most - baseline < 1.5 * shard
