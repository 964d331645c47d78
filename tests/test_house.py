"""The house's rules: package names are ours, nothing imports upwards, nothing is pickled."""

from __future__ import annotations

import ast
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"artifacts": set(), "calibration": {"artifacts"}, "pipeline": {"artifacts", "calibration"}}
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def imported_modules(path: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


def test_no_other_distribution_owns_our_package_names() -> None:
    owners = metadata.packages_distributions()
    for room in ROOMS:
        assert set(owners.get(room, ["trimtab"])) == {"trimtab"}, (
            f"{room} is owned by {owners[room]}"
        )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_upwards(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    forbidden = set(ROOMS) - ROOMS[room] - {room} | {"tests", "recipes"}
    upwards = {name for name in imported_modules(path) if name.split(".")[0] in forbidden}
    assert not upwards, f"{path.relative_to(ROOT)} imports {sorted(upwards)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_c84_no_pickle(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not {"pickle", "cPickle", "dill"} & {n.split(".")[0] for n in imported_modules(path)}
    assert "torch.load" not in text
    assert "torch.save" not in text
    assert "trust_remote_code=True" not in text
