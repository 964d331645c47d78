"""The key of a stage: everything its result may depend on, hashed.

Does: hash files (with a cache), output sets and parts of them, and the source of a stage with every
project module it can reach; put the key together. Does not: store anything (see `store`).

Inputs: the stage, the recipe, hashes of the inputs. Output: `Key` with its ingredients, which go
into the stage's record.

Invariant: equal keys mean equal inputs, code, library versions and environment; paths, clock times
and host names never enter.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from artifacts.checkpoint import atomic_write_json, sha256_file
from artifacts.errors import TrimtabError
from pipeline.stage import Environment, Stage

ROOMS = ("artifacts", "calibration", "pipeline")
LIBRARIES = ("torch", "transformers", "llmcompressor", "compressed-tensors", "tokenizers")
FRAMEWORK = frozenset(
    {
        "pipeline",
        "pipeline.stages",
        "pipeline.stage",
        "pipeline.recipe",
        "pipeline.sections",
        "pipeline.problems",
    }
)
"""Modules that reach a stage's result only through values that stand in its key."""
LATE_IMPORT = re.compile(r"""import_module\(\s*["']([\w.]+)["']""")
DATA_FILE = re.compile(r"""["']([\w-][\w.-]*\.(?:txt|json))["']""")


@dataclass(frozen=True)
class Key:
    """`hex` names the store's folder; `ingredients` say what it was made of."""

    hex: str
    ingredients: dict[str, Any]


class FileHashes:
    """sha256 of files, remembered by device, inode, size and mtime in a JSON file.

    Hard links of one file share their entry. A file changed without a change of any of the four is
    not seen: `--verify` reads it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, list[Any]] = {}
        self._changed = False
        if path is not None and path.is_file():
            try:
                self._known = dict(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                self._known = {}  # a cache: whatever is not in it is hashed again

    def known(self, path: Path) -> str | None:
        """The remembered hash if the file still looks the same, else None."""
        inode, look = _look(path)
        entry = self._known.get(inode)
        return entry[2] if entry is not None and entry[:2] == look else None

    def of(self, path: Path, *, fresh: bool = False) -> str:
        """The file's sha256; `fresh` reads it whatever is remembered."""
        known = None if fresh else self.known(path)
        if known is not None:
            return known
        before = _look(path)
        value = sha256_file(path)
        if _look(path) != before:
            raise TrimtabError(f"{path}: changed while it was read", hint="run again")
        self.remember(path, value)
        return value

    def remember(self, path: Path, sha256: str) -> None:
        """Take a hash that was computed elsewhere."""
        inode, look = _look(path)
        self._known[inode] = [*look, sha256, str(path.absolute())]
        self._changed = True

    def save(self) -> None:
        """Write the cache, if anything changed; entries of files that are gone are dropped."""
        if self._path is None or not self._changed:
            return
        self._known = {key: entry for key, entry in self._known.items() if Path(entry[3]).exists()}
        atomic_write_json(self._path, self._known)
        self._changed = False


def _look(path: Path) -> tuple[str, list[int]]:
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}", [stat.st_size, stat.st_mtime_ns]


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces; refuses NaN and anything that is not plain."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    """sha256 of the canonical JSON."""
    return hashlib.sha256(canonical(value)).hexdigest()


def part_of(outputs: Iterable[str], part: str) -> list[str]:
    """The output files that a need "STAGE/part" means: `part`, `part.*` and all below `part/`."""
    return sorted(
        name for name in outputs if name == part or name.startswith((f"{part}/", f"{part}."))
    )


def output_hash(outputs: Mapping[str, Mapping[str, Any]], part: str = "") -> str:
    """Hash of a stage's outputs (relative name to {"sha256", "size"}), or of a part of them.

    Raises:
        TrimtabError: no output belongs to `part`.
    """
    names = part_of(outputs, part) if part else sorted(outputs)
    if part and not names:
        raise TrimtabError(f"no output {part!r} among {', '.join(sorted(outputs)) or 'none'}")
    return digest([[name, outputs[name]["sha256"]] for name in names])


def make_key(
    stage: Stage,
    *,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    files: Mapping[str, str],
    environment: Environment,
) -> Key:
    """Put a key together from the hashes of inputs and files."""
    ingredients: dict[str, Any] = {
        "stage": stage.name,
        "config": dict(config),
        "inputs": dict(inputs),
        "files": dict(files),
        "code": code_hash(type(stage).__module__),
    }
    if stage.computes:
        ingredients["versions"] = library_versions()
        ingredients["environment"] = asdict(environment)
    return Key(digest(ingredients)[:32], ingredients)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What two keys' ingredients differ in, for people: "config.bits, code changed"."""
    names: list[str] = []
    for part in sorted({*old, *new}):
        before, after = old.get(part), new.get(part)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            inner = sorted({*before, *after})
            names += [f"{part}.{name}" for name in inner if before.get(name) != after.get(name)]
        else:
            names.append(part)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more} changed" if names else ""


@cache
def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "absent"


def library_versions() -> dict[str, str]:
    """Versions of the libraries that matter for results, without importing them."""
    return {library: _version(library) for library in LIBRARIES}


@cache
def code_hash(module: str) -> str:
    """sha256 over a module, every project module it can import, and text files they name."""
    return digest(
        [
            [name, hashlib.sha256(path.read_bytes()).hexdigest()]
            for name, path in sorted(closure(module).items())
        ]
    )


def closure(module: str) -> dict[str, Path]:
    """The module and all project modules reachable by imports, those inside functions included.

    Imports under `if TYPE_CHECKING:` do not count, nor do `FRAMEWORK` modules. A string constant
    that is the name of a .txt or .json file beside a module adds that file (package data).
    """
    loaded = sys.modules.get(module)
    start = Path(loaded.__file__) if loaded and loaded.__file__ else _locate(module)
    if start is None:
        raise TrimtabError(f"the source of module {module!r} cannot be found")
    found: dict[str, Path] = {module: start}
    todo = [module]
    while todo:
        name = todo.pop()
        imports, data_files = _reach(name, found[name])
        for data in data_files:
            found[f"{name}:{data.name}"] = data
        for imported in imports:
            path = None if imported in found or imported in FRAMEWORK else _locate(imported)
            if path is not None:
                found[imported] = path
                todo.append(imported)
    return found


@cache
def _reach(name: str, path: Path) -> tuple[frozenset[str], tuple[Path, ...]]:
    """The project modules that a module imports itself, and the text files it names."""
    text = path.read_text(encoding="utf-8")
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports = _imports(ast.parse(text), package) | set(LATE_IMPORT.findall(text))
    project = {module for module in imports if module.split(".")[0] in ROOMS}
    above = {
        ".".join(module.split(".")[:depth])
        for module in project
        for depth in range(1, module.count(".") + 1)
    }
    named = (path.parent / file for file in sorted(set(DATA_FILE.findall(text))))
    return frozenset(project | above), tuple(file for file in named if file.is_file())


@cache
def _room(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) if places else None


def _locate(module: str) -> Path | None:
    """The file of a project module, found without importing it; None for anything else."""
    room, *rest = module.split(".")
    root = _room(room) if room in ROOMS else None
    if root is None:
        return None
    place = root.joinpath(*rest)
    for path in (place / "__init__.py", place.with_suffix(".py")):
        if path.is_file() and (rest or path.name == "__init__.py"):
            return path
    return None


def _imports(tree: ast.Module, package: str) -> set[str]:
    """Names of all modules that a syntax tree imports, except under `if TYPE_CHECKING:`."""
    names: set[str] = set()
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def _statements(tree: ast.Module) -> Iterable[ast.AST]:
    """All statements at any depth; those that only a type checker sees are left out."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        test = node.test if isinstance(node, ast.If) else None
        seen_only_by_checkers = getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            found = getattr(node, part, None)
            if isinstance(found, list) and not (seen_only_by_checkers and part == "body"):
                todo.extend(found)
