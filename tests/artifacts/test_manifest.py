"""Sealing and verifying: every file and tensor, determinism, hostile manifests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from artifacts.checkpoint import read_header, sha256_file
from artifacts.errors import TrimtabError
from artifacts.manifest import (
    CARD,
    MANIFEST,
    SUMS,
    failed_gates,
    list_files,
    load,
    script_name,
    seal,
    verify,
)
from tests.artifacts.builds import Built, edit_json, gates, info, make

SCRIPT = "fetch_tiny_test.py"


def test_the_seal_covers_everything_once(sealed: Built) -> None:
    manifest = load(sealed.build)
    everything = set(list_files(sealed.build))
    assert set(manifest.files) == everything - {MANIFEST, SUMS, SCRIPT}
    lines = (sealed.build / SUMS).read_text().splitlines()
    assert {line.split("  ", 1)[1] for line in lines} == everything - {SUMS}
    for name, entry in manifest.files.items():
        assert entry.sha256 == sha256_file(sealed.build / name)
        assert entry.size == (sealed.build / name).stat().st_size
    for name, tensors in manifest.tensors.items():
        assert set(tensors) == set(read_header(sealed.build / name)[0])
    assert {name for name in everything if name.endswith(".safetensors")} == set(manifest.tensors)
    assert verify(sealed.build) == []
    subprocess.run(["sha256sum", "--quiet", "-c", SUMS], cwd=sealed.build, check=True)


def test_figures_are_computed_from_the_bytes(sealed: Built) -> None:
    manifest = load(sealed.build)
    for part in ("target", "drafter"):
        headers: dict[str, Any] = {}
        for path in (sealed.build / part).glob("*.safetensors"):
            headers |= read_header(path)[0]
        entry = manifest.parts[part]
        assert entry.bytes == sum(tensor.nbytes for tensor in headers.values())
        assert entry.bytes == sum(section.bytes for section in entry.sections.values())
        assert len(entry.packed) == sum(name.endswith("weight_packed") for name in headers)
    target = manifest.parts["target"]
    assert target.packed["lm_head"] == "int8 g128" and target.packed["mtp.fc"] == "int4 g128"
    assert "model.embed_tokens" in target.kept and "lm_head" not in target.kept
    assert target.sections["lm_head"].parameters == 512 * 256
    assert target.source_bytes == 12_345_678
    assert manifest.parts["draft_vocab"].sections["rows"].parameters == 84 * 256
    assert manifest.ledger["target"]["methods"] == {"gptq": 35}
    assert manifest.parts["drafter"].config["block_size"] == 4


def test_two_equal_builds_are_sealed_with_equal_bytes(sealed: Built, tmp_path: Path) -> None:
    other = make(tmp_path / "again")
    before = os.times()
    seal(other.build, info())
    assert before is not None
    for name in (MANIFEST, SUMS, CARD, SCRIPT):
        assert (other.build / name).read_bytes() == (sealed.build / name).read_bytes(), name
    seal(other.build, info())
    assert (other.build / MANIFEST).read_bytes() == (sealed.build / MANIFEST).read_bytes()
    text = (other.build / MANIFEST).read_text() + (other.build / CARD).read_text()
    assert str(tmp_path) not in text


def copy_of(sealed: Built, tmp_path: Path) -> Path:
    return sealed.copy(tmp_path / "copy").build


def test_c73_one_flipped_bit_names_the_tensor(sealed: Built, tmp_path: Path) -> None:
    build = copy_of(sealed, tmp_path)
    path = next(
        path
        for path in sorted((build / "target").glob("*.safetensors"))
        if "model.norm.weight" in read_header(path)[0]
    )
    data = bytearray(path.read_bytes())
    data[read_header(path)[0]["model.norm.weight"].start + 3] ^= 1
    path.write_bytes(data)
    name = path.relative_to(build).as_posix()
    assert verify(build) == [f"{name}: changed, tensor model.norm.weight"]


def test_missing_changed_and_extra_files_are_all_named(sealed: Built, tmp_path: Path) -> None:
    build = copy_of(sealed, tmp_path)
    (build / "gates.json").unlink()
    (build / "target" / "old.safetensors").write_bytes(b"x")
    (build / CARD).write_text("buy now")
    with (build / "ledger.json").open("r+b") as stream:
        stream.seek(5)
        stream.write(b"!")
    (build / ".cache").mkdir()
    (build / ".cache" / "x").touch()
    problems = verify(build)
    assert len(problems) == 4
    assert "gates.json: missing" in problems
    assert "target/old.safetensors: extra, the manifest does not list it" in problems
    assert any(line.startswith("README.md: 7 bytes, the manifest says") for line in problems)
    assert "ledger.json: changed (sha256 differs)" in problems


def test_a_header_that_changed_and_sums_and_script(sealed: Built, tmp_path: Path) -> None:
    build = copy_of(sealed, tmp_path)
    path = build / "drafter" / "model-00001-of-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'{"format":"pt"}', b'{"format":"pT"}', 1))
    (build / SUMS).write_text("")
    script = (build / SCRIPT).read_text()
    digest = sha256_file(build / MANIFEST)
    (build / SCRIPT).write_text(script.replace(digest, "0" * 64))
    problems = verify(build)
    assert problems == [
        "drafter/model-00001-of-00001.safetensors: changed in its header (sha256 differs)",
        f"{SUMS}: does not list these files with these hashes",
        f"{SCRIPT}: was made for another {MANIFEST}",
    ]


def test_what_must_not_be_sealed(damaged: Built) -> None:
    build = damaged.build
    with pytest.raises(TrimtabError, match=r"gates\.json: not the gates"):
        seal(build, info(gates=gates(failing="target_perplexity")))
    for name, expected in (
        ("target/training_args.bin", "pickles are not published"),
        ("target/.hidden", "left over or hidden"),
        ("target/x.partial", "left over or hidden"),
    ):
        (build / name).touch()
        with pytest.raises(TrimtabError, match=expected):
            seal(build, info())
        (build / name).unlink()
    (build / "link").symlink_to(build / "gates.json")
    with pytest.raises(TrimtabError, match="a link; a build holds plain files"):
        seal(build, info())
    (build / "link").unlink()
    shard = next((build / "target").glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(TrimtabError, match="is missing"):
        seal(build, info())
    assert not (build / MANIFEST).exists()


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../b", "a//b", "C:x", "a\\b", "."])
def test_paths_that_leave_the_build_are_refused(sealed: Built, tmp_path: Path, path: str) -> None:
    build = copy_of(sealed, tmp_path)

    def plant(manifest: dict[str, Any]) -> None:
        manifest["files"][path] = {"size": 0, "sha256": "0" * 64}

    edit_json(build / MANIFEST, plant)
    with pytest.raises(TrimtabError, match="is not inside the build"):
        verify(build)


def test_malformed_manifests_are_refused(sealed: Built, tmp_path: Path) -> None:
    build = copy_of(sealed, tmp_path)
    edit_json(build / MANIFEST, lambda manifest: manifest.update(colour="red"))
    with pytest.raises(TrimtabError, match="colour: Extra inputs are not permitted"):
        load(build)
    edit_json(build / MANIFEST, lambda manifest: manifest.update(schema_version=2))
    with pytest.raises(TrimtabError, match="schema_version 2, this trimtab reads 1"):
        load(build)
    (build / MANIFEST).write_text("[]")
    with pytest.raises(TrimtabError, match="schema_version None"):
        load(build)
    (build / MANIFEST).unlink()
    with pytest.raises(TrimtabError, match=r"trimtab\.json: missing"):
        verify(build)


def test_every_field_is_documented() -> None:
    from artifacts import manifest as module

    for model in (module.Manifest, module.PartEntry, module.SectionEntry, module.FileEntry):
        assert all(field.description for field in model.model_fields.values()), model


def test_failed_gates_and_names() -> None:
    assert failed_gates(gates()) == []
    assert failed_gates(gates(failing="drafter_acceptance")) == ["drafter_acceptance"]
    assert failed_gates({}) == failed_gates({"gates": []}) == ["(no gates)"]
    assert script_name("Qwen3.8-27B") == "fetch_Qwen3_8_27B.py"


def test_hash_seed_does_not_matter(sealed: Built, tmp_path: Path) -> None:
    build = copy_of(sealed, tmp_path)
    code = (
        "import sys; from artifacts.manifest import BuildInfo, seal\n"
        "seal(sys.argv[1], BuildInfo.model_validate_json(sys.argv[2]))\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    given = info().model_dump_json()
    subprocess.run([sys.executable, "-c", code, str(build), given], check=True, env=environment)
    assert (build / MANIFEST).read_bytes() == (sealed.build / MANIFEST).read_bytes()
    assert json.loads((build / MANIFEST).read_text())["schema_version"] == 1
