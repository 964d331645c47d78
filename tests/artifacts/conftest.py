"""Fixtures of the artifacts tests: one build, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts.manifest import seal
from tests.artifacts import builds


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> builds.Built:
    """An unsealed build of TINY and DRAFT; tests must not change it."""
    return builds.make(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def sealed(built: builds.Built, tmp_path_factory: pytest.TempPathFactory) -> builds.Built:
    """The same, sealed; tests must not change it."""
    made = built.copy(tmp_path_factory.mktemp("sealed") / "build")
    seal(made.build, builds.info())
    return made


@pytest.fixture
def damaged(built: builds.Built, tmp_path: Path) -> builds.Built:
    """A copy of the build that a test may damage."""
    return built.copy(tmp_path / "build")
