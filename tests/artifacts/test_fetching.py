"""Fetching: the script on its own, resuming, and sources that lie (C72, C73)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artifacts import fetch_core
from artifacts.errors import TrimtabError
from artifacts.fetching import fetch, render_script, tag_of
from artifacts.manifest import MANIFEST, list_files, load, verify
from tests.artifacts.builds import Built, edit_json

SCRIPT = "fetch_tiny_test.py"


def run(script: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a fetch script as a user does: outside this project, its packages out of reach."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-I", str(script), *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_fetches_from_its_own_folder(sealed: Built, tmp_path: Path) -> None:
    done = run(sealed.build / SCRIPT, "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    count = len(load(sealed.build).files)
    assert f"tiny-test: {count} files" in done.stderr and "verified" in done.stderr
    assert verify(tmp_path / "here") == []
    assert list_files(tmp_path / "here") == list_files(sealed.build)
    again = run(sealed.build / SCRIPT, "here", cwd=tmp_path)
    assert again.returncode == 0


def test_the_script_is_self_contained(sealed: Built, tmp_path: Path) -> None:
    text = (sealed.build / SCRIPT).read_text()
    assert "@@" not in text and "artifacts" not in text.split("def main")[0].split('"""')[2]
    shutil.copyfile(sealed.build / SCRIPT, tmp_path / SCRIPT)
    alone = run(tmp_path / SCRIPT, "dest", cwd=tmp_path)
    assert alone.returncode == 2
    assert alone.stderr.strip() == (
        "error: this build was published to a folder: name it with --from FOLDER"
    )
    done = run(tmp_path / SCRIPT, "dest", "--from", sealed.build, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert verify(tmp_path / "dest") == []
    assert run(tmp_path / SCRIPT, "x", "--from", "no such", cwd=tmp_path).returncode == 2


def copy_of(sealed: Built, tmp_path: Path) -> Path:
    return sealed.copy(tmp_path / "source").build


def a_shard(build: Path) -> str:
    return sorted(name for name in load(build).files if name.endswith(".safetensors"))[0]


def test_c73_wrong_bytes_are_not_kept(sealed: Built, tmp_path: Path) -> None:
    build = copy_of(sealed, tmp_path)
    name = a_shard(build)
    data = bytearray((build / name).read_bytes())
    data[-1] ^= 1
    (build / name).write_bytes(data)
    with pytest.raises(TrimtabError, match=f"{name}: .* not the manifest's; not kept"):
        fetch(build, tmp_path / "dest", quiet=True)
    assert not (tmp_path / "dest" / name).exists()
    assert not (tmp_path / "dest" / MANIFEST).exists()
    shutil.copyfile(sealed.build / name, build / name)
    fetch(build, tmp_path / "dest", quiet=True)
    assert verify(tmp_path / "dest") == []


def test_another_manifest_is_refused_by_the_script(sealed: Built, tmp_path: Path) -> None:
    build = copy_of(sealed, tmp_path)
    edit_json(build / MANIFEST, lambda manifest: manifest.update(licence="mit"))
    done = run(build / SCRIPT, "dest", cwd=tmp_path)
    assert done.returncode == 2 and "is pinned" in done.stderr
    assert list_files(tmp_path / "dest") in ([], [f".partial/{MANIFEST}"])
    with pytest.raises(TrimtabError, match="is pinned"):
        fetch(build, tmp_path / "other", manifest_sha256="0" * 64, quiet=True)


class Cut(fetch_core.FolderSource):
    """A folder that dies in the middle of its n-th file, leaving half of it."""

    def __init__(self, root: Path, after: int) -> None:
        super().__init__(root)
        self.left = after
        self.copied: list[str] = []

    def stage(self, name: str, staging: Path, size: int | None, fresh: bool) -> Path:
        self.left -= 1
        if self.left == 0:
            staged = staging / name
            staged.parent.mkdir(parents=True, exist_ok=True)
            data = (self.root / name).read_bytes()
            staged.write_bytes(data[: len(data) * 6 // 10])
            raise KeyboardInterrupt
        self.copied.append(name)
        return super().stage(name, staging, size, fresh)


def test_c72_an_interrupted_fetch_goes_on(sealed: Built, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    for after in (1, 3, 9):
        with pytest.raises(KeyboardInterrupt):
            fetch_core.fetch_build(Cut(sealed.build, after), dest, quiet=True)
        assert not (dest / MANIFEST).exists()
    kept = [name for name in list_files(dest) if not name.startswith(".partial/")]
    assert len(kept) >= 6
    last = Cut(sealed.build, -1)
    fetch_core.fetch_build(last, dest, quiet=True)
    assert not set(kept) & set(last.copied)
    assert verify(dest) == [] and list_files(dest) == list_files(sealed.build)


def test_c72_a_partial_file_of_another_build_is_not_trusted(sealed: Built, tmp_path: Path) -> None:
    name = a_shard(sealed.build)
    staged = tmp_path / "dest" / ".partial" / name
    staged.parent.mkdir(parents=True)
    staged.write_bytes(b"garbage")
    fetch(sealed.build, tmp_path / "dest", quiet=True)
    assert verify(tmp_path / "dest") == []


def test_foreign_destinations_are_left_alone(sealed: Built, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(TrimtabError, match="not empty and no fetch of a build"):
        fetch(sealed.build, tmp_path / "mine", quiet=True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    fetch(sealed.build, tmp_path / "dest", quiet=True)
    (tmp_path / "dest" / "notes.txt").write_text("x")
    with pytest.raises(TrimtabError, match=r"notes\.txt: not of this build"):
        fetch(sealed.build, tmp_path / "dest", quiet=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrimtabError, match="not a folder of its own"):
        fetch(sealed.build, tmp_path / "link", quiet=True)


def test_links_inside_the_destination_are_refused(sealed: Built, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    dest = tmp_path / "dest"
    (dest / ".partial").mkdir(parents=True)
    (dest / "target").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrimtabError, match="target: a link; refused"):
        fetch(sealed.build, dest, quiet=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "a\\b", ".partial/x", "", 7])
def test_hostile_paths(path: Any) -> None:
    with pytest.raises(fetch_core.FetchError, match="refused"):
        fetch_core.safe_path(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["files"].update({"../x": {"size": 0, "sha256": "0" * 64}}),
        lambda m: m["files"].update({"GATES.json": {"size": 0, "sha256": "0" * 64}}),
        lambda m: m["files"].update({MANIFEST: {"size": 0, "sha256": "0" * 64}}),
        lambda m: m["files"].update(x={"size": "1", "sha256": "0" * 64}),
        lambda m: m.update(files=[]),
        lambda m: m.update(schema_version=9),
    ],
)
def test_hostile_manifests(sealed: Built, change: Any) -> None:
    manifest = json.loads((sealed.build / MANIFEST).read_text())
    change(manifest)
    with pytest.raises(fetch_core.FetchError):
        fetch_core.read_manifest(json.dumps(manifest).encode(), None)


def test_references(tmp_path: Path, sealed: Built) -> None:
    assert fetch_core.parse_repo("hf://a/b@v1") == ("a/b", "v1")
    assert fetch_core.parse_repo("a/b") == ("a/b", None)
    for text in ("a", "a/b/c", "/a/b", "./a", "a b/c"):
        assert fetch_core.parse_repo(text) is None
    with pytest.raises(TrimtabError, match="neither a folder nor owner/name"):
        fetch(tmp_path / "nowhere", tmp_path / "dest", quiet=True)
    text = render_script(load(sealed.build), "f" * 64, repo_id="acme/out")
    assert 'REPO_ID = "acme/out"' in text and f'REVISION = "{tag_of("f" * 64)}"' in text
    compile(text, "script", "exec")


def test_from_the_hub_every_file_is_of_one_commit(
    sealed: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    class Api:
        def repo_info(self, repo_id: str, revision: str) -> Any:
            assert (repo_id, revision) == ("acme/tiny", "v1")
            return SimpleNamespace(sha="c" * 40)

    def download(
        repo_id: str, name: str, *, revision: str, local_dir: Path, force_download: bool
    ) -> str:
        asked.append((name, revision))
        if name == "gates.json" and not force_download:
            (local_dir / name).write_bytes(b"cut")
        else:
            (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(sealed.build / name, local_dir / name)
        return str(local_dir / name)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    fetch("acme/tiny@v1", tmp_path / "dest", quiet=True)
    assert verify(tmp_path / "dest") == []
    assert {revision for _, revision in asked} == {"c" * 40}
    assert [name for name, _ in asked].count("gates.json") == 2

    def refuse(*_: object, **__: object) -> str:
        raise RuntimeError("403 Forbidden\nwith details")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(TrimtabError, match=r"acme/tiny@c+: .*: RuntimeError: 403 Forbidden") as it:
        fetch("acme/tiny@v1", tmp_path / "other", quiet=True)
    assert "with details" not in str(it.value)
