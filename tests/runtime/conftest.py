"""Small loaded models shared by the runtime's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts.checkpoint import Checkpoint
from artifacts.runtime.dflash import Drafter
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.target import Target
from tests import checkpoints


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="session")
def target(tiny_folder: Path) -> Target:
    return Target.load(Checkpoint.open(tiny_folder))


@pytest.fixture(scope="session")
def mtp(tiny_folder: Path, target: Target) -> MtpHead:
    return MtpHead.load(Checkpoint.open(tiny_folder), target)


@pytest.fixture(scope="session")
def drafter(draft_folder: Path, target: Target) -> Drafter:
    return Drafter.load(Checkpoint.open(draft_folder), target)
