"""The stage fetch: what is taken, refused, reported and checked, from folders and from a Hub."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artifacts.errors import TrimtabError
from pipeline import hub_reading, skeleton
from pipeline import recipe as recipes
from pipeline.problems import Problems
from pipeline.runner import Result, Runner
from pipeline.stages.fetch import FetchStage, choose
from tests.pipeline import fakes

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_TESTTOKEN0123456789"


@pytest.fixture
def house(tmp_path: Path) -> Path:
    fakes.house(tmp_path)
    return tmp_path


def run(house: Path, text: str | None = None, hook: Any = None) -> Result:
    text = text if text is not None else (house / "recipe.yaml").read_text()
    loaded = recipes.parse(text, name="recipe.yaml", folder=house)
    return Runner(loaded, house / "work", {"fetch": FetchStage()}, hook=hook).run()


def record(result: Result) -> dict[str, Any]:
    found = json.loads((result.entries["fetch"].folder / "files.json").read_text())
    assert isinstance(found, dict)
    return found


def test_files_of_a_folder_are_linked_and_recorded(house: Path) -> None:
    result = run(house)
    folder = result.entries["fetch"].folder
    listed = record(result)
    assert set(listed) == {"target", "drafter"}
    for part, origin in (("target", "base"), ("drafter", "drafter")):
        names = {p.name for p in (house / origin).iterdir()}
        assert set(listed[part]["files"]) == names
        for name, entry in listed[part]["files"].items():
            made, source = folder / part / name, house / origin / name
            assert made.stat().st_ino == source.stat().st_ino, "a hard link"
            assert entry["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
            assert entry["size"] == source.stat().st_size
    assert run(house).ran == []


def test_another_file_system_gets_a_copy(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, destination: Path) -> None:
        raise OSError(18, "cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    folder = run(house).entries["fetch"].folder
    made, source = folder / "target" / "config.json", house / "base" / "config.json"
    assert made.stat().st_ino != source.stat().st_ino
    assert made.read_bytes() == source.read_bytes()


def test_pickles_are_refused_and_strangers_reported(house: Path) -> None:
    base = house / "base"
    (base / "evil.bin").write_bytes(b"cos\nsystem\n(S'touch sentinel'\ntR.")
    (base / "modeling.py").write_text("raise SystemExit")
    (base / "picture.png").write_bytes(b"png")
    (base / "README.md").write_text("card")
    (base / ".gitattributes").write_text("*")
    (base / "LICENSE").write_text("mit")
    (base / "pytorch_model.bin.index.json").write_text("{}")
    fakes.write_tensors(base / "consolidated.safetensors", {"x": (2, 2)})
    result = run(house)
    target = record(result)["target"]
    assert target["refused"] == ["evil.bin", "modeling.py"]
    assert target["unknown"] == ["README.md", "picture.png", "pytorch_model.bin.index.json"]
    assert target["stray"] == ["consolidated.safetensors"]
    assert "LICENSE" in target["files"]
    names = {p.name for p in (result.entries["fetch"].folder / "target").iterdir()}
    assert not names & {"evil.bin", "modeling.py", "README.md", ".gitattributes"}
    problems = Problems()
    FetchStage().check(recipes.load(house / "recipe.yaml"), problems)
    assert any("evil.bin, modeling.py" in note.line() for note in problems.notes)


def test_only_pickles_is_an_error(house: Path) -> None:
    for path in (house / "base").glob("*.safetensors*"):
        path.unlink()
    (house / "base" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(TrimtabError, match="0 safetensors files and no index"):
        run(house)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
        (lambda path: path.write_bytes(bytes(8) + path.read_bytes()[8:]), "header length 0"),
    ],
)
def test_damaged_shards_end_in_three_errors(house: Path, spoil: Any, words: str) -> None:
    spoil(house / "base" / "model-00002-of-00002.safetensors")
    with pytest.raises(TrimtabError, match=words):
        run(house)
    assert not list((house / "work" / "store").glob("fetch/*/record.json"))


def test_a_source_that_changes_meanwhile_is_refused(house: Path) -> None:
    def hook(stage: str, name: str) -> None:
        if name == "begin":
            fakes.edit_json(house / "base" / "config.json", comment="meanwhile")

    with pytest.raises(TrimtabError, match=r"base/config.json: changed while it was fetched"):
        run(house, hook=hook)
    assert run(house).ran == ["fetch"]


def test_an_edited_source_is_fetched_again(house: Path) -> None:
    first = run(house).entries["fetch"]
    os.utime(house / "base" / "config.json", ns=(1, 1))
    assert run(house).ran == [], "the same bytes with another date"
    fakes.edit_json(house / "base" / "config.json", comment="new")
    second = run(house).entries["fetch"]
    assert second.key != first.key
    assert json.loads((second.folder / "target" / "config.json").read_text())["comment"] == "new"


def test_names_that_lead_out_are_refused() -> None:
    with pytest.raises(TrimtabError, match="leads out"):
        choose(["../evil.json"], [])
    with pytest.raises(TrimtabError, match="leads out"):
        choose(["/etc/evil.json"], [])
    nested = choose(["onnx/a.json", "additional_chat_templates/tool.jinja", "a/b.safetensors"], [])
    assert nested.taken == ("additional_chat_templates/tool.jinja",)
    assert nested.unknown == ("onnx/a.json",)
    assert nested.stray == ("a/b.safetensors",)


@dataclass
class FakeHub:
    """Stands in for huggingface_hub: serves a folder, counts downloads, can cut one short."""

    root: Path
    sha: str = COMMIT
    cut: dict[str, int] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)
    lie: set[str] = field(default_factory=set)
    error: Exception | None = None

    def model_info(self, repo: str, revision: str, files_metadata: bool) -> Any:
        if self.error is not None:
            raise self.error
        siblings = []
        for path in sorted(self.root.iterdir()):
            data = path.read_bytes()
            sha256 = hashlib.sha256(data).hexdigest()
            if path.name in self.lie:
                sha256 = "0" * 64
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            large = path.suffix == ".safetensors"
            lfs = SimpleNamespace(sha256=sha256) if large else None
            siblings.append(
                SimpleNamespace(rfilename=path.name, size=len(data), lfs=lfs, blob_id=blob)
            )
        return SimpleNamespace(sha=self.sha, siblings=siblings)

    def parse_safetensors_file_metadata(self, repo: str, name: str, revision: str) -> Any:
        from artifacts.checkpoint import read_header

        infos, _ = read_header(self.root / name)
        tensors = {
            n: SimpleNamespace(dtype=i.dtype, shape=list(i.shape), data_offsets=(i.start, i.end))
            for n, i in infos.items()
        }
        return SimpleNamespace(tensors=tensors)

    def hf_hub_download(self, repo: str, name: str, revision: str, local_dir: Path) -> str:
        self.downloads.append(name)
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        (Path(local_dir) / ".cache").mkdir(exist_ok=True)
        data = (self.root / name).read_bytes()
        (Path(local_dir) / name).write_bytes(data[: self.cut.get(name, len(data))])
        return str(Path(local_dir) / name)

    def snapshot_download(self, repo: str, revision: str, allow_patterns: list[str]) -> str:
        place = self.root.parent / "hub-cache"
        place.mkdir(exist_ok=True)
        for name in allow_patterns:
            shutil.copyfile(self.root / name, place / name)
        return str(place)


@pytest.fixture
def hub(house: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    import huggingface_hub

    fake = FakeHub(house / "base")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def hub_text(house: Path) -> str:
    text = (house / "recipe.yaml").read_text()
    return text.replace("{path: base}", f"{{repo: some/base, revision: '{COMMIT}'}}")


def test_hub_and_folder_leave_the_same_files(house: Path, hub: FakeHub) -> None:
    (house / "base" / "consolidated.safetensors").write_bytes(b"never read")
    (house / "base" / "model.bin").write_bytes(b"never read")
    folder = run(house).entries["fetch"]
    remote = run(house, hub_text(house))
    assert {n: o for n, o in folder.outputs.items() if n != "files.json"} == {
        n: o for n, o in remote.entries["fetch"].outputs.items() if n != "files.json"
    }
    target = record(remote)["target"]
    assert target["source"] == {"repo": "some/base", "revision": COMMIT}
    assert target["stray"] == ["consolidated.safetensors"]
    assert target["refused"] == ["model.bin"]
    assert not {"consolidated.safetensors", "model.bin"} & set(hub.downloads)


def test_a_cut_download_is_noticed_and_gone_on_with(house: Path, hub: FakeHub) -> None:
    shard = "model-00002-of-00002.safetensors"
    hub.cut[shard] = 1000
    with pytest.raises(TrimtabError, match=r"some/base: .*00002.*: 1000 bytes, the Hub says"):
        run(house, hub_text(house))
    hub.cut.clear()
    hub.downloads.clear()
    assert run(house, hub_text(house)).ran == ["fetch"]
    assert hub.downloads == [shard], "what was verified is kept"


def test_killed_while_downloading(house: Path, hub: FakeHub) -> None:
    shard = "model-00001-of-00002.safetensors"
    child = os.fork()
    if child == 0:

        def hook(stage: str, name: str) -> None:
            if name == f"target/{shard}":
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            run(house, hub_text(house), hook)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    run(house, hub_text(house))
    assert hub.downloads == ["model-00002-of-00002.safetensors"]


def test_wrong_bytes_of_the_right_size(house: Path, hub: FakeHub) -> None:
    hub.lie.add("model-00001-of-00002.safetensors")
    with pytest.raises(
        TrimtabError, match=r"00001-of-00002.safetensors: hash .*, the Hub says 0000"
    ):
        run(house, hub_text(house))


def test_another_commit_is_refused(house: Path, hub: FakeHub) -> None:
    hub.sha = "f" * 40
    with pytest.raises(TrimtabError, match=f"asked for commit {COMMIT}, the Hub answered for fff"):
        run(house, hub_text(house))


def test_hub_errors_hold_no_token_and_say_what_to_do(house: Path, hub: FakeHub) -> None:
    import httpx
    from huggingface_hub import errors

    request = httpx.Request("GET", "https://hub", headers={"authorization": f"Bearer {TOKEN}"})
    response = httpx.Response(403, request=request, text=TOKEN)
    for error, words in (
        (errors.GatedRepoError(TOKEN, response=response), "gated"),
        (errors.RepositoryNotFoundError(TOKEN, response=response), "no such repository"),
        (errors.RevisionNotFoundError(TOKEN, response=response), "no such commit"),
        (errors.HfHubHTTPError(TOKEN, response=response), "HTTP 403"),
        (httpx.ConnectTimeout(TOKEN), "ConnectTimeout"),
    ):
        hub.error = error
        with pytest.raises(TrimtabError, match=words) as caught:
            hub_reading.listing("some/base", COMMIT)
        assert "TESTTOKEN" not in str(caught.value)
        assert caught.value.hint


def test_skeleton_of_a_repository_equals_the_folders(house: Path, hub: FakeHub) -> None:
    problems = Problems()
    here = recipes.load(house / "recipe.yaml").base
    there = recipes.parse(hub_text(house), name="r", folder=house).base
    local, remote = (skeleton.read("base", source, problems) for source in (here, there))
    assert problems.found == []
    assert local is not None
    assert remote is not None
    assert remote.config == local.config
    assert {n: i.shape for n, i in remote.infos.items()} == {
        n: i.shape for n, i in local.infos.items()
    }
    assert hub.downloads == [], "no weights"
    (house / "base" / "model-00002-of-00002.safetensors").unlink()
    skeleton.read("base", there, problems)
    assert "shard model-00002-of-00002.safetensors is named by the index" in problems.found[0].text
