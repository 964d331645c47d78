"""The draft vocabulary's files: C11, C26, exact rows, encodings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts import draft_hash
from artifacts.checkpoint import Checkpoint, load_single, sha256_tensors, write_single
from artifacts.draft_vocab import (
    HEAD_FILE,
    JSON_FILE,
    MODULE,
    check_binding,
    head_digest,
    head_of,
    read,
    write,
    write_from_head,
)
from artifacts.errors import TrimtabError
from artifacts.packing import PackedMatrix, Scheme
from tests.artifacts.builds import Built, edit_json, round_plain
from tests.checkpoints import tiny

IDS = [300, 7, 499, 128]


def heads() -> list[PackedMatrix | torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn((512, 256), generator=generator).bfloat16()
    return [plain, round_plain(plain, Scheme(4, 128)), round_plain(plain, Scheme(8, -1))]


def dense(head: PackedMatrix | torch.Tensor) -> torch.Tensor:
    return head.dense() if isinstance(head, PackedMatrix) else head.float()


@pytest.mark.parametrize("head", heads(), ids=["bf16", "int4", "int8"])
def test_c11_rows_are_exact_and_every_encoding_agrees(
    tmp_path: Path, head: PackedMatrix | torch.Tensor
) -> None:
    write(tmp_path, IDS, head, head_digest(head), {"coverage": 0.5})
    vocab = read(tmp_path)
    assert vocab.target_ids.tolist() == IDS and vocab.meta == {"coverage": 0.5}
    assert vocab.vocab_size == 512 and vocab.head_sha256 == head_digest(head)
    assert torch.equal(dense(vocab.head), dense(head)[IDS])
    states = torch.randn((3, 256), generator=torch.Generator().manual_seed(1))
    own = states @ dense(vocab.head).T
    assert torch.equal(own, (states @ dense(head)[IDS].T))
    assert check_binding(vocab, head) == []
    source = load_single(tmp_path / HEAD_FILE)
    draft_ids = torch.arange(len(IDS))
    assert (draft_ids + source.get("d2t")).tolist() == IDS
    assert source.get("t2d").nonzero().flatten().tolist() == sorted(IDS)


def test_c11_without_its_map_it_is_refused(tmp_path: Path) -> None:
    head = heads()[1]
    write(tmp_path, IDS, head, head_digest(head), {})
    source = load_single(tmp_path / HEAD_FILE)
    tensors = {name: source.get(name) for name in source.names() if name != "target_ids"}
    write_single(tmp_path / HEAD_FILE, tensors, metadata=source.metadata)
    with pytest.raises(TrimtabError, match="target_ids is missing; without it no draft id has"):
        read(tmp_path)
    (tmp_path / JSON_FILE).unlink()
    with pytest.raises(TrimtabError, match=r"draft_vocab\.json: missing"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 512], "id 512 is not a whole number in 0..511"),
        ([-1], "id -1 is"),
        ([4.0], "id 4.0 is"),
        ([True], "id True is"),
        ([3, 3], "2 ids, 1 distinct"),
        ([], "0 ids, 0 distinct"),
    ],
)
def test_bad_ids_are_refused(tmp_path: Path, ids: list[Any], expected: str) -> None:
    head = heads()[0]
    with pytest.raises(TrimtabError, match=expected):
        write(tmp_path, ids, head, head_digest(head), {})


def rewrite(folder: Path, **changes: torch.Tensor) -> None:
    source = load_single(folder / HEAD_FILE)
    tensors = {name: source.get(name) for name in source.names()} | changes
    write_single(folder / HEAD_FILE, tensors, metadata=source.metadata)


def test_inconsistent_files_are_refused(tmp_path: Path) -> None:
    head = heads()[1]
    write(tmp_path, IDS, head, head_digest(head), {})
    rewrite(tmp_path, d2t=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(TrimtabError, match="d2t or t2d say other ids"):
        read(tmp_path)
    write(tmp_path, IDS, head, head_digest(head), {})
    rewrite(tmp_path, target_ids=torch.tensor([300, 7, 499, 129]))
    with pytest.raises(TrimtabError, match="target_ids are not those of"):
        read(tmp_path)
    write(tmp_path, IDS, head, head_digest(head), {})
    edit_json(tmp_path / JSON_FILE, lambda record: record.update(head_sha256="0" * 64))
    with pytest.raises(TrimtabError, match="is cut from head"):
        read(tmp_path)


def test_more_ids_than_rows_are_refused(tmp_path: Path) -> None:
    head = heads()[0]
    write(tmp_path, IDS, head, head_digest(head), {})
    source = load_single(tmp_path / HEAD_FILE)
    rewrite(tmp_path, **{f"{MODULE}.weight": source.get(f"{MODULE}.weight")[:3]})
    with pytest.raises(TrimtabError, match="3 rows for 4 ids"):
        read(tmp_path)


def test_c26_another_head_is_noticed(tmp_path: Path) -> None:
    plain, packed, _ = heads()
    with pytest.raises(TrimtabError, match="the head's hash is"):
        write(tmp_path, IDS, packed, head_digest(plain), {})
    write(tmp_path, IDS, packed, head_digest(packed), {})
    assert isinstance(packed, PackedMatrix)
    codes = packed.codes()
    codes[7, 0] = 3 - codes[7, 0].clamp(-4, 3)
    other = PackedMatrix.from_codes(codes, packed.scale, packed.scheme)
    lines = check_binding(read(tmp_path), other)
    assert len(lines) == 2
    assert "cut from head" in lines[0]
    assert "1 rows differ from the head's, first row 1 (id 7)" in lines[1]
    assert "another form" in check_binding(read(tmp_path), plain)[1]


def test_the_digest_follows_from_tensor_hashes_alone(built: Built, tmp_path: Path) -> None:
    target = Checkpoint.open(built.build / "target")
    hashes: dict[str, str] = {}
    for name in target.files():
        hashes |= sha256_tensors(built.build / "target" / name)
    assert draft_hash.from_tensor_hashes(hashes) == head_digest(head_of(target))
    assert draft_hash.from_tensor_hashes({}) is None


def test_a_tied_head_is_found(tmp_path: Path) -> None:
    source = Checkpoint.open(tiny(tmp_path / "t", tied=True))
    write_from_head(tmp_path / "v", IDS, source, {})
    head = read(tmp_path / "v").head
    assert torch.equal(dense(head), source.get("model.embed_tokens.weight")[IDS].float())
