"""Publishing: what is refused, folders swapped whole, one commit on the Hub."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.hf_api import BlobLfsInfo, RepoFile

from artifacts import hub_commit
from artifacts.errors import GateFailed, TrimtabError
from artifacts.hub import parse_destination, publish
from artifacts.manifest import MANIFEST, list_files, load, seal, verify
from tests.artifacts.builds import Built, edit_json, gates, info

SCRIPT = "fetch_tiny_test.py"


def test_to_a_folder_and_again(sealed: Built, tmp_path: Path) -> None:
    dest = tmp_path / "out" / "pocket"
    dry = publish(sealed.build, dest, dry_run=True)
    assert dry.changed and not dest.parent.exists()
    done = publish(sealed.build, dest)
    assert done.kind == "folder" and done.changed and done.files == len(list_files(dest))
    assert done.bytes == sum(path.stat().st_size for path in dest.rglob("*") if path.is_file())
    assert verify(dest) == [] and list_files(dest) == list_files(sealed.build)
    assert [path.name for path in dest.parent.iterdir()] == ["pocket"]
    before = dest.stat().st_ino
    assert publish(sealed.build, dest).changed is False
    assert dest.stat().st_ino == before


def resealed(sealed: Built, folder: Path, **overrides: Any) -> Path:
    build = sealed.copy(folder).build
    seal(build, info(**overrides))
    return build


def test_an_earlier_publication_is_replaced_whole(sealed: Built, tmp_path: Path) -> None:
    dest = tmp_path / "pocket"
    publish(sealed.build, dest)
    other = resealed(sealed, tmp_path / "other", licence="mit")
    (tmp_path / ".pocket.partial").mkdir()
    (tmp_path / ".pocket.partial" / "rest").touch()
    assert publish(other, dest).changed
    assert verify(dest) == [] and load(dest).licence == "mit"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    (dest / "gates.json").unlink()
    assert publish(other, dest).changed
    assert verify(dest) == []


def test_a_failed_rename_brings_the_old_one_back(
    sealed: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = tmp_path / "pocket"
    publish(sealed.build, dest)
    other = resealed(sealed, tmp_path / "other", licence="mit")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == ".pocket.partial":
            raise OSError("disk on fire")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="disk on fire"):
        publish(other, dest)
    monkeypatch.undo()
    assert verify(dest) == [] and load(dest).licence == "apache-2.0"


def test_killed_between_the_renames(sealed: Built, tmp_path: Path) -> None:
    dest = tmp_path / "pocket"
    publish(sealed.build, dest)
    dest.rename(tmp_path / ".pocket.old")
    assert publish(sealed.build, dest).changed
    assert verify(dest) == [] and [p.name for p in tmp_path.iterdir()] == ["pocket"]


def test_foreign_folders_are_refused(sealed: Built, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").touch()
    with pytest.raises(TrimtabError, match="not empty and no earlier publication"):
        publish(sealed.build, tmp_path / "mine")
    (tmp_path / "file").touch()
    with pytest.raises(TrimtabError, match="not a folder"):
        publish(sealed.build, tmp_path / "file")
    for inside in (sealed.build, sealed.build / "out", sealed.build.parent):
        with pytest.raises(TrimtabError, match="inside the build"):
            publish(sealed.build, inside)
    (tmp_path / "empty").mkdir()
    assert publish(sealed.build, tmp_path / "empty").changed


def test_failed_gates_are_not_published(sealed: Built, tmp_path: Path) -> None:
    build = sealed.copy(tmp_path / "b").build
    failing = gates(failing="target_perplexity")
    (build / "gates.json").unlink()
    seal(build, info(gates=failing))
    with pytest.raises(GateFailed, match="gates failed: target_perplexity; nothing") as caught:
        publish(build, tmp_path / "out")
    assert caught.value.exit_code == 1 and not (tmp_path / "out").exists()
    with pytest.raises(TrimtabError, match="no gate is called 'perplexity'"):
        publish(build, tmp_path / "out", allow_failed=["perplexity"])
    done = publish(build, tmp_path / "out", allow_failed=["target_perplexity"])
    assert done.failed_gates == ["target_perplexity"]
    assert "Not validated" in (tmp_path / "out" / "README.md").read_text()
    seal(build, info(gates={}))
    with pytest.raises(GateFailed, match=r"\(no gates\)"):
        publish(build, tmp_path / "none")


def test_c51_a_build_that_changed_is_refused(sealed: Built, tmp_path: Path) -> None:
    build = sealed.copy(tmp_path / "b").build
    (build / "target" / "stray.safetensors").touch()
    with pytest.raises(TrimtabError, match=r"target/stray\.safetensors: extra"):
        publish(build, tmp_path / "out")
    (build / "target" / "stray.safetensors").unlink()
    edit_json(build / "target" / "config.json", lambda config: config.update(x=1))
    with pytest.raises(TrimtabError, match=r"not as it was sealed: target/config\.json"):
        publish(build, tmp_path / "out")


def test_destinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_destination("acme/tiny") == parse_destination("hf://acme/tiny")
    assert parse_destination("acme/tiny") == ("hub", "acme/tiny")
    for text in ("./acme/tiny", "/acme/tiny", "out", "a/b/c"):
        assert parse_destination(text) == ("folder", text)
    assert parse_destination(Path("acme/tiny")) == ("folder", "acme/tiny")
    with pytest.raises(TrimtabError, match="not hf://owner/name"):
        parse_destination("hf://acme")
    with pytest.raises(TrimtabError, match="not to a revision"):
        parse_destination("acme/tiny@v1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    with pytest.raises(TrimtabError, match="a folder here, and a repository's name"):
        parse_destination("acme/tiny")


# --- the Hub -------------------------------------------------------------------------------------


class Server:
    """A repository in memory behind HfApi's methods; counts commits, fails when told to."""

    def __init__(self) -> None:
        self.commits: list[dict[str, bytes]] = [{".gitattributes": b"", "notes.md": b"kept"}]
        self.preuploads = 0
        self.tags: dict[str, str] = {}
        self.failures: list[tuple[int, bool]] = []  # (status, whether the commit is made)
        self.spoil = False

    def create_repo(self, repo_id: str, exist_ok: bool) -> None:
        assert exist_ok

    def repo_info(self, repo_id: str, revision: str) -> Any:
        number = len(self.commits) - 1 if revision == "main" else int(revision)
        return SimpleNamespace(sha=str(number))

    def list_repo_tree(self, repo_id: str, recursive: bool, revision: str) -> list[RepoFile]:
        return [self._stated(n, data) for n, data in self.commits[int(revision)].items()]

    def _stated(self, name: str, data: bytes) -> RepoFile:
        blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        made = RepoFile(path=name, size=len(data), oid=blob)
        if name.endswith(".safetensors"):
            digest = hashlib.sha256(data).hexdigest()
            made.lfs = BlobLfsInfo(size=len(data), sha256=digest, pointer_size=1)
        return made

    def preupload_lfs_files(self, repo_id: str, additions: Any, free_memory: bool) -> None:
        assert len(self.commits) == 1 or self.commits
        self.preuploads += 1

    def create_commit(
        self, repo_id: str, operations: Any, commit_message: str, parent_commit: str
    ) -> Any:
        assert parent_commit == str(len(self.commits) - 1)
        status, made = self.failures.pop(0) if self.failures else (200, True)
        if made:
            files = dict(self.commits[-1])
            for operation in operations:
                if isinstance(operation, CommitOperationDelete):
                    del files[operation.path_in_repo]
                elif isinstance(operation, CommitOperationAdd):
                    with operation.as_file() as stream:
                        files[operation.path_in_repo] = stream.read()
            if self.spoil:
                files["target/config.json"] = b"{}"
            self.commits.append(files)
        if status != 200:
            raise http_error(status)
        return SimpleNamespace(oid=str(len(self.commits) - 1))

    def create_tag(self, repo_id: str, tag: str, revision: str, exist_ok: bool) -> None:
        self.tags[tag] = revision


def http_error(status: int) -> Exception:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    request = httpx.Request("POST", "http://127.0.0.1/api")
    response = httpx.Response(status, request=request, headers={"Retry-After": "3"})
    return HfHubHTTPError(f"{status} from the server", response=response)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: made)
    made.waits = []  # type: ignore[attr-defined]
    monkeypatch.setattr(hub_commit.time, "sleep", made.waits.append)  # type: ignore[attr-defined]
    return made


def test_c76_the_hub_gets_exactly_one_commit(sealed: Built, tmp_path: Path, server: Server) -> None:
    server.commits[0] |= {"model-old.safetensors": b"x", "target/old.json": b"x"}
    done = publish(sealed.build, "hf://acme/tiny")
    assert len(server.commits) == 2 and server.preuploads == 1
    assert done.kind == "hub" and done.revision == "1" and done.changed
    assert done.deleted == ["model-old.safetensors", "target/old.json"]
    files = server.commits[-1]
    assert set(files) == {*list_files(sealed.build), ".gitattributes", "notes.md"}
    assert server.tags == {f"build-{done.manifest_sha256[:12]}": "1"}
    for name, data in files.items():
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "copy" / "notes.md").unlink()
    assert verify(tmp_path / "copy") == []
    assert 'REPO_ID = "acme/tiny"' in files[SCRIPT].decode()
    assert files[MANIFEST] == (sealed.build / MANIFEST).read_bytes()
    again = publish(sealed.build, "acme/tiny")
    assert again.changed is False and len(server.commits) == 2


def test_dry_run_asks_no_network(sealed: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", None)
    assert publish(sealed.build, "acme/tiny", dry_run=True).changed


def test_c75_a_refusal_is_final_and_others_are_waited_for(sealed: Built, server: Server) -> None:
    server.failures = [(403, False)]
    with pytest.raises(TrimtabError, match=r"refused or did not answer: .*403"):
        publish(sealed.build, "acme/tiny")
    assert server.waits == [] and len(server.commits) == 1  # type: ignore[attr-defined]
    server.failures = [(429, False)] * 3
    assert publish(sealed.build, "acme/tiny").changed
    assert server.waits == [3.0, 3.0, 3.0]  # type: ignore[attr-defined]
    assert len(server.commits) == 2


def test_c75_a_commit_that_was_made_is_not_made_twice(sealed: Built, server: Server) -> None:
    server.failures = [(504, True)]
    done = publish(sealed.build, "acme/tiny")
    assert done.revision == "1" and len(server.commits) == 2


def test_attempts_are_bounded(sealed: Built, server: Server) -> None:
    server.failures = [(503, False)] * 99
    with pytest.raises(TrimtabError, match="503"):
        publish(sealed.build, "acme/tiny")
    assert len(server.waits) == hub_commit.ATTEMPTS - 1  # type: ignore[attr-defined]


def test_what_the_hub_holds_is_read_back(sealed: Built, server: Server) -> None:
    server.spoil = True
    with pytest.raises(TrimtabError, match=r"another target/config\.json than was published"):
        publish(sealed.build, "acme/tiny")
    assert server.tags == {}
