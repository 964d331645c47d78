"""The manifest of a build: what it is, how it was made, and the sha256 of everything in it.

Covers sealing a folder (`trimtab.json`, `README.md`, `fetch_<name>.py`, `SHA256SUMS`) and verifying
one. Does not cover judging a build (`structure`, the gates) or moving it (`hub`, `fetching`).

In: a BUILD with `target/`, `drafter/`, `draft_vocab/` (those it has), `gates.json`, `ledger.json`.
The order of trust: `fetch_<name>.py` carries the sha256 of `trimtab.json`; `trimtab.json` lists
every file but itself, `SHA256SUMS` and the fetch script; `SHA256SUMS` lists every file but itself.
Invariant: the seal depends on the build's bytes and on `BuildInfo` alone (no clock, host or path),
so equal builds are sealed equally, and every figure in the manifest is computed or handed in once.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.errors import TrimtabError
from artifacts.files import atomic_write_text, canonical_json, read_json, sha256_file

MANIFEST = "trimtab.json"
SUMS = "SHA256SUMS"
CARD = "README.md"
GATES = "gates.json"
LEDGER = "ledger.json"
DRAFTER_LEDGER = "drafter_ledger.json"
FOREIGN = (".gitattributes", ".cache/", ".git/")  # what the Hub and its client add to a folder
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
DETERMINISM = (
    "Built again on the same device, with the same versions, seeds and thread count, this recipe "
    "gives the same bytes on the CPU. Drafted greedy text may differ from plain greedy text where "
    "two logits nearly tie in 16-bit arithmetic; in fp32 it is equal."
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Model):
    """One file of the build."""

    size: int = Field(ge=0, description="Bytes.")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="Of the whole file, in hex.")


class SectionEntry(_Model):
    """One part of a checkpoint: body, lm_head, embedding, mtp, vision, drafter, or draft head."""

    bytes: int = Field(description="Bytes of its tensors on disk.")
    parameters: int = Field(description="Logical parameters; a packed matrix counts n x k.")
    schemes: dict[str, int] = Field(
        description="Logical parameters by storage: 'int4 g128', 'int8 channel', 'BF16', ..."
    )


class PartEntry(_Model):
    """One artifact folder: target, drafter, draft_vocab."""

    bytes: int = Field(description="Bytes of its tensors on disk.")
    parameters: int = Field(description="Logical parameters.")
    source_bytes: int | None = Field(
        default=None, description="Bytes of the tensors it was made from, if known."
    )
    config: dict[str, Any] = Field(description="Facts of its config that the card tells.")
    sections: dict[str, SectionEntry] = Field(description="The same, by section.")
    packed: dict[str, str] = Field(description="Module -> scheme, for every packed matrix.")
    kept: list[str] = Field(description="Linears and embeddings that are stored as in the source.")


class BuildInfo(_Model):
    """What the pipeline knows of a build and its bytes do not say."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name on the card and of the script."
    )
    base_model: str = Field(description="Hub id or name of the model that was rebuilt.")
    base_revision: str | None = Field(default=None, description="Its commit, if it has one.")
    licence: str = Field(description="SPDX id or the Hub's licence id.")
    repo_id: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$",
        description="Hub repository the build goes to; None for a folder.",
    )
    tags: list[str] = Field(default_factory=list, description="Further tags for the card.")
    recipe: dict[str, Any] = Field(description="The resolved recipe, defaults filled in, no paths.")
    inputs: dict[str, str] = Field(description="Input -> sha256 or commit.")
    versions: dict[str, str] = Field(description="Library -> version.")
    seeds: dict[str, int] = Field(description="Use -> seed.")
    device: str = Field(description="Device type and compute dtype, such as 'cpu float32'.")
    determinism: str = Field(default=DETERMINISM, description="What is reproducible, in words.")
    gates: dict[str, Any] = Field(description="Content of gates.json: 'gates', and figures.")
    ledger: dict[str, Any] = Field(
        default_factory=dict, description="Summary of ledger.json; made from the file if empty."
    )
    drafters: list[dict[str, Any]] = Field(
        default_factory=list, description="One profile a way of drafting: method, sizes, figures."
    )
    prompt_sets: dict[str, str] = Field(
        default_factory=dict, description="Prompt set -> sha256 of its content."
    )
    source_bytes: dict[str, int] = Field(
        default_factory=dict, description="Part -> bytes of the tensors it was made from."
    )


class Manifest(BuildInfo):
    """`trimtab.json`."""

    schema_version: Literal[1] = Field(default=1, description="Of this file's layout.")
    parts: dict[str, PartEntry] = Field(description="Artifact folder -> sizes and schemes.")
    files: dict[str, FileEntry] = Field(description="Path -> size and hash, README.md included.")
    tensors: dict[str, dict[str, str]] = Field(
        description="Path of a safetensors file -> tensor -> sha256 of its bytes."
    )


def failed_gates(gates: dict[str, Any]) -> list[str]:
    """Names of the gates that did not pass; ["(no gates)"] when none was judged."""
    verdicts = gates.get("gates")
    if not isinstance(verdicts, list) or not verdicts:
        return ["(no gates)"]
    return [str(verdict.get("gate")) for verdict in verdicts if verdict.get("passed") is not True]


def script_name(name: str) -> str:
    """The fetch script's file name; dashes and dots become underscores."""
    return f"fetch_{re.sub(r'[^A-Za-z0-9]', '_', name)}.py"


def list_files(build: Path) -> list[str]:
    """All files below a folder as POSIX paths, sorted; what the Hub's client adds is left out.

    Raises TrimtabError for a symbolic link, which would be something else on another machine.
    """
    found: list[str] = []
    for path in build.rglob("*"):
        name = path.relative_to(build).as_posix()
        if name.startswith(FOREIGN):
            continue
        if path.is_symlink():
            raise TrimtabError(f"{path}: a link; a build holds plain files", hint="copy the file")
        if path.is_file():
            found.append(name)
    return sorted(found)


def _entry(path: Path) -> FileEntry:
    return FileEntry(size=path.stat().st_size, sha256=sha256_file(path))


def seal(build: Path | str, info: BuildInfo) -> Manifest:
    """Writes manifest, card, fetch script and sums into a finished build and returns the manifest.

    Raises TrimtabError when the build holds a pickle, a link or a half-written file, has no target,
    or its gates.json is not `info.gates`. Sealing again writes the same bytes.
    """
    from artifacts.card import render
    from artifacts.fetching import render_script
    from artifacts.inventory import describe_parts, summarize_ledgers

    build = Path(build)
    script = script_name(info.name)
    own = {MANIFEST, SUMS, CARD, script}
    content = [name for name in list_files(build) if name not in own]
    _refuse(build, content)
    if (build / GATES).exists() and read_json(build / GATES) != info.gates:
        raise TrimtabError(
            f"{build / GATES}: not the gates that the build is sealed with",
            hint="validate it again",
        )
    parts, tensors = describe_parts(build, content, info.source_bytes)
    ledger = info.ledger or summarize_ledgers(build)
    draft = Manifest(
        **{**info.model_dump(), "ledger": ledger},
        parts=parts,
        files={name: _entry(build / name) for name in content},
        tensors=tensors,
    )
    atomic_write_text(build / CARD, render(draft))
    files = {**draft.files, CARD: _entry(build / CARD)}
    manifest = draft.model_copy(update={"files": dict(sorted(files.items()))})
    text = dump(manifest)
    atomic_write_text(build / MANIFEST, text)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    atomic_write_text(build / script, render_script(manifest, digest))
    atomic_write_text(
        build / SUMS, sums_text(manifest, digest, script, sha256_file(build / script))
    )
    return manifest


def _refuse(build: Path, content: list[str]) -> None:
    for name in content:
        if name.endswith(PICKLES):
            raise TrimtabError(f"{build / name}: pickles are not published", hint="remove the file")
        if name.endswith(".partial") or PurePosixPath(name).name.startswith("."):
            raise TrimtabError(f"{build / name}: left over or hidden", hint="assemble it again")
    if not any(name.startswith("target/") and name.endswith(".safetensors") for name in content):
        raise TrimtabError(f"{build}: holds no target/*.safetensors", hint="assemble it again")


def dump(manifest: Manifest) -> str:
    """The text of `trimtab.json`."""
    return canonical_json(manifest.model_dump(mode="json"))


def sums_text(manifest: Manifest, manifest_sha256: str, script: str, script_sha256: str) -> str:
    """The text of `SHA256SUMS`, in the format of sha256sum, sorted by path."""
    sums = {name: entry.sha256 for name, entry in manifest.files.items()}
    sums |= {MANIFEST: manifest_sha256, script: script_sha256}
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def load(build: Path | str) -> Manifest:
    """Reads and checks `trimtab.json`; TrimtabError when it is missing, malformed or newer."""
    path = Path(build) / MANIFEST
    content = read_json(path)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != 1:
        raise TrimtabError(
            f"{path}: schema_version {version!r}, this trimtab reads 1", hint="update trimtab"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TrimtabError(f"{path}: {where}: {first['msg']}", hint="fetch it again") from error
    for name in (*manifest.files, *manifest.tensors):
        check_path(name)
    return manifest


def check_path(name: str) -> None:
    """Refuses a path that leaves its folder: absolute, with `..`, a drive or a backslash."""
    parts = name.split("/")
    if (
        not name
        or name.startswith("/")
        or re.search(r"[\\:\x00]", name)
        or {"", ".", ".."} & {*parts}
    ):
        raise TrimtabError(
            f"{MANIFEST}: path {name!r} is not inside the build", hint="do not use it"
        )


def verify(build: Path | str) -> list[str]:
    """Compares a folder with its manifest and its sums: problems, one line each; empty if intact.

    Names every missing, changed and extra file, and in a changed safetensors file the tensors whose
    bytes changed. Raises TrimtabError when there is no readable manifest.
    """
    build = Path(build)
    manifest = load(build)
    script = script_name(manifest.name)
    problems: list[str] = []
    expected = {**{name: entry.sha256 for name, entry in manifest.files.items()}}
    present = set(list_files(build))
    for name in sorted({*expected, SUMS, script} - present):
        problems.append(f"{name}: missing")
    for name in sorted(present - {*expected, MANIFEST, SUMS, script}):
        problems.append(f"{name}: extra, the manifest does not list it")
    for name in sorted(present & set(expected)):
        problems += _compare(build, name, manifest)
    if {SUMS, script} <= present:
        problems += _compare_sums(build, manifest, script)
    return problems


def _compare(build: Path, name: str, manifest: Manifest) -> list[str]:
    from artifacts.tensor_file import sha256_tensors

    entry, path = manifest.files[name], build / name
    size = path.stat().st_size
    if size != entry.size:
        return [f"{name}: {size} bytes, the manifest says {entry.size}"]
    if sha256_file(path) == entry.sha256:
        return []
    known = manifest.tensors.get(name)
    if not known:
        return [f"{name}: changed (sha256 differs)"]
    try:
        actual = sha256_tensors(path)
    except TrimtabError as error:
        return [f"{name}: changed; {error.message}"]
    changed = sorted(key for key in {*known, *actual} if known.get(key) != actual.get(key))
    return [f"{name}: changed, tensor {tensor}" for tensor in changed] or [
        f"{name}: changed in its header (sha256 differs)"
    ]


def _compare_sums(build: Path, manifest: Manifest, script: str) -> list[str]:
    digest = sha256_file(build / MANIFEST)
    problems: list[str] = []
    wanted = sums_text(manifest, digest, script, sha256_file(build / script))
    if (build / SUMS).read_bytes() != wanted.encode("utf-8"):
        problems.append(f"{SUMS}: does not list these files with these hashes")
    embedded = re.search(
        r'^MANIFEST_SHA256 = "([0-9a-f]*)"$',
        (build / script).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    if embedded is None or embedded[1] != digest:
        problems.append(f"{script}: was made for another {MANIFEST}")
    return problems
