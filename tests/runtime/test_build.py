"""Loading a whole sealed build, and what makes it refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from artifacts.errors import TrimtabError
from artifacts.manifest import seal
from artifacts.runtime.batch import generate_batch
from artifacts.runtime.build import load_build
from artifacts.runtime.decode import Decoder
from artifacts.runtime.sampling import SamplingParams
from tests.artifacts import builds


@pytest.fixture(scope="module")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = builds.make(tmp_path_factory.mktemp("build")).build
    seal(folder, builds.info())
    return folder


def _copy(build_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(build_folder, tmp_path / "b"))


def test_every_method_decodes_a_sealed_build(build_folder: Path) -> None:
    build = load_build(build_folder)
    assert build.stop_ids == (498, 495)
    assert build.sampling == SamplingParams(temperature=0.8, top_k=20, top_p=0.95)
    assert int(build.draftable.sum()) == 499 and not build.draftable[499]
    assert build.draft_vocab is not None and build.mtp is not None
    assert build.mtp.head is build.draft_head
    assert build.mtp.logits(torch.zeros(1, 256)).shape[-1] == len(builds.IDS)
    prompt = build.tokenizer.apply_chat_template(
        [{"role": "user", "content": "The captain"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    plain = generate_batch(build.target, [prompt], SamplingParams(), 16, [], build.stop_ids)[0]
    methods = build.methods()
    assert methods == ["none", "mtp", "dflash2", "lookup", "dflash2+lookup"]
    for method in methods:
        decoder = Decoder.of(build, method, depth=3)
        assert decoder.complete(prompt, SamplingParams(), 16, stop_ids=build.stop_ids) == plain


def test_parts_may_be_absent(build_folder: Path, tmp_path: Path) -> None:
    folder = _copy(build_folder, tmp_path)
    shutil.rmtree(folder / "drafter")
    shutil.rmtree(folder / "draft_vocab")
    with pytest.raises(TrimtabError, match="missing"):
        load_build(folder)
    build = load_build(folder, verify=False)
    assert build.drafter is None and build.draft_head is None and build.mtp is not None
    assert build.methods() == ["none", "mtp", "lookup"]
    with pytest.raises(TrimtabError, match="drafter"):
        Decoder.of(build, "dflash2")


def test_a_changed_byte_is_found(build_folder: Path, tmp_path: Path) -> None:
    folder = _copy(build_folder, tmp_path)
    shard = sorted((folder / "target").glob("model-0*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(TrimtabError, match=shard.name):
        load_build(folder)


def test_a_draft_vocabulary_of_another_head_is_refused(build_folder: Path, tmp_path: Path) -> None:
    """C26: rows and map belong to one head."""
    folder = _copy(build_folder, tmp_path)
    other = builds.make(tmp_path / "other", seed=1).build
    shutil.rmtree(folder / "draft_vocab")
    shutil.copytree(other / "draft_vocab", folder / "draft_vocab")
    with pytest.raises(TrimtabError, match="draft_vocab"):
        load_build(folder, verify=False)


@pytest.mark.parametrize("file", ["draft_head.safetensors", "draft_vocab.json"])
def test_half_a_draft_vocabulary_is_refused(file: str, build_folder: Path, tmp_path: Path) -> None:
    folder = _copy(build_folder, tmp_path)
    (folder / "draft_vocab" / file).unlink()
    with pytest.raises(TrimtabError, match="draft"):
        load_build(folder, verify=False)


def test_no_tokenizer_no_build(build_folder: Path, tmp_path: Path) -> None:
    folder = _copy(build_folder, tmp_path)
    (folder / "target" / "tokenizer.json").unlink()
    with pytest.raises(TrimtabError, match=r"tokenizer\.json"):
        load_build(folder, verify=False)


def test_stop_ids_fall_back_to_the_model_config(build_folder: Path, tmp_path: Path) -> None:
    folder = _copy(build_folder, tmp_path)
    (folder / "target" / "generation_config.json").unlink()
    build = load_build(folder, verify=False)
    assert build.generation == {} and build.sampling.greedy
    config = json.loads((folder / "target" / "config.json").read_text())
    assert build.stop_ids == (config["eos_token_id"],)


def test_a_folder_without_target(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="target"):
        load_build(tmp_path)
