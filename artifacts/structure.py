"""Is a build whole and consistent? Everything that can be told without running a model.

Covers index, headers, files, stray shards and totals; the inventory against the source; config
against shards; scales; tokenizer, chat template and vocabulary sizes; the drafter's config; the
draft vocabulary's binding to the head. Does not cover numbers that need a forward pass (the gates).
In: a BUILD, and the sources it was made from where they are at hand. Out: problems, one line each.
Invariant: nothing is repaired, and no check stops another from being made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from artifacts.accounting import check_inventory
from artifacts.agreement import check_agreement
from artifacts.checkpoint import Checkpoint, TensorSource
from artifacts.drafter_check import check_drafter_config
from artifacts.errors import TrimtabError
from artifacts.files import read_json, sha256_file
from artifacts.ledger import LedgerEntry, read_ledger
from artifacts.manifest import DRAFTER_LEDGER, LEDGER, MANIFEST, PICKLES, verify
from artifacts.names import head_module, is_embedding, role
from artifacts.scales import check_scales
from artifacts.shards import index_totals
from artifacts.tokenizer_check import check_tokenizer

REWRITTEN = "config.json"
# Side files that belong to a checkpoint; others in the source (pictures, other formats) do not.
COPIED_KINDS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab")
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
TEMPLATES = "additional_chat_templates"


def check_build_structure(
    build: Path,
    base: TensorSource | None,
    *,
    drafter: TensorSource | None = None,
    dropped: Mapping[str, str] | None = None,
) -> list[str]:
    """All structural problems of a build, each a line that names the thing; [] if there is none.

    `base` and `drafter` are the sources; without them the comparisons with a source are left out.
    `dropped` maps source tensors that were left out on purpose to the reason.
    """
    build = Path(build)
    problems: list[str] = []
    target = _open(build / "target", problems)
    if target is not None:
        made = _Made(target, base, build / LEDGER, dropped or {})
        problems += [f"target: {line}" for line in _check_part(made)]
        problems += [f"target: {line}" for line in _collect(lambda: check_vocabulary(target))]
        root = base.root if isinstance(base, Checkpoint) else None
        problems += [f"target: {line}" for line in check_tokenizer(target, root)]
    if (build / "drafter").is_dir():
        own = _open(build / "drafter", problems)
        if own is not None:
            made = _Made(own, drafter, build / DRAFTER_LEDGER, {})
            problems += [f"drafter: {line}" for line in _check_part(made)]
            if target is not None:
                problems += [f"drafter: {line}" for line in check_drafter_config(own, target)]
    if (build / "draft_vocab").is_dir() and target is not None:
        problems += _collect(lambda: _check_draft_vocab(build / "draft_vocab", target))
    if (build / MANIFEST).exists():
        problems += _collect(lambda: verify(build))
    return problems


class _Made:
    """One artifact folder with what it was made from."""

    def __init__(
        self,
        made: Checkpoint,
        source: TensorSource | None,
        ledger: Path,
        dropped: Mapping[str, str],
    ) -> None:
        self.made, self.source, self.ledger, self.dropped = made, source, ledger, dropped


def _collect(check: Callable[[], list[str]]) -> list[str]:
    """A check's problems; an error that stops it is one of them."""
    try:
        return check()
    except TrimtabError as error:
        return [error.message]


def _open(folder: Path, problems: list[str]) -> Checkpoint | None:
    try:
        return Checkpoint.open(folder, verify=False)
    except TrimtabError as error:
        problems.append(error.message)
        return None


def _check_part(part: _Made) -> list[str]:
    problems = check_files(part.made)
    problems += _collect(lambda: check_agreement(part.made))
    problems += _collect(lambda: check_scales(part.made, part.source))
    if part.source is not None:
        source = part.source
        ledger: list[LedgerEntry] = read_ledger(part.ledger) if part.ledger.exists() else []
        problems += _collect(lambda: check_inventory(part.made, source, ledger, part.dropped))
        problems += check_config_fields(part.made.config, source.config)
        if isinstance(source, Checkpoint):
            problems += check_copied_files(part.made.root, source.root)
            problems += _check_parameters(part.made, source, part.dropped)
    return problems


def check_files(made: Checkpoint) -> list[str]:
    """Index against headers against files: missing, truncated, stray, pickled; totals."""
    root = made.root
    problems = list(made.problems)
    problems += [f"{name}: stray, the index does not name it" for name in made.stray]
    problems += [
        f"{path.relative_to(root).as_posix()}: a pickle"
        for path in sorted(root.rglob("*"))
        if path.name.endswith(PICKLES)
    ]
    if made.index is None:
        return problems
    if made.problems:
        return problems  # totals of an incomplete set say nothing
    metadata = read_json(made.index).get("metadata") or {}
    size, parameters = index_totals(root, made.files())
    for key, actual in (("total_size", size), ("total_parameters", parameters)):
        if metadata.get(key) != actual:
            problems.append(
                f"{made.index.name}: {key} is {metadata.get(key)}, the headers give {actual}"
            )
    return problems


def _check_parameters(
    made: Checkpoint, source: Checkpoint, dropped: Mapping[str, str]
) -> list[str]:
    """A packed model has the source's logical parameters."""
    if made.problems or source.problems:
        return []
    own = index_totals(made.root, made.files())[1]
    theirs = index_totals(source.root, source.files())[1]
    theirs -= sum(source.info(name).numel for name in dropped if name in source)
    return [] if own == theirs else [f"{own} logical parameters, the source has {theirs}"]


def check_config_fields(made: Mapping[str, Any], source: Mapping[str, Any]) -> list[str]:
    """Every field of the source's config but the quantization stands here, and no other."""
    ignored = {"quantization_config"}
    problems = []
    for key in sorted({*made, *source} - ignored):
        old, new = source.get(key), made.get(key)
        if key == "text_config" and isinstance(old, dict) and isinstance(new, dict):
            problems += [f"text_config.{line}" for line in check_config_fields(new, old)]
        elif key not in source:
            problems.append(f"config.json: {key} is not in the source's")
        elif key not in made:
            problems.append(f"config.json: {key} of the source is missing")
        elif old != new:
            problems.append(f"config.json: {key} is {new!r}, in the source {old!r}")
    return problems


def is_side_file(name: str) -> bool:
    """Whether a source's file belongs into every artifact made from it."""
    parts = name.split("/")
    if name == REWRITTEN or name.endswith(".index.json"):
        return False
    if len(parts) > 1 and parts[0] != TEMPLATES:
        return False
    return name.endswith(COPIED_KINDS) or parts[-1].upper().startswith(LICENCES)


def check_copied_files(made: Path, source: Path) -> list[str]:
    """Tokenizer, templates, licences and further configs of the source are here, byte for byte."""
    problems = []
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if not path.is_file() or not is_side_file(name):
            continue
        if not (made / name).is_file():
            problems.append(f"{name}: is in the source and missing here")
        elif sha256_file(made / name) != sha256_file(path):
            problems.append(f"{name}: differs from the source's")
    return problems


def check_vocabulary(target: TensorSource) -> list[str]:
    """Rows of embedding and head are the config's vocab_size; the tied flag fits the tensors."""
    inner = target.config.get("text_config") or {}
    vocab = target.config.get("vocab_size", inner.get("vocab_size"))
    if not isinstance(vocab, int):
        return ["config.json: vocab_size is missing"]
    problems = []
    head = head_module(target)
    tables = {name.rpartition(".")[0] for name in target.names()}
    for module in sorted(tables):
        if module != head and not (is_embedding(module) and role(module) == "embed_tokens"):
            continue
        leaf = "weight_packed" if f"{module}.weight_packed" in target else "weight"
        rows = target.info(f"{module}.{leaf}").shape[0]
        if rows != vocab:
            problems.append(f"{module}: {rows} rows, vocab_size is {vocab}")
    return problems


def _check_draft_vocab(folder: Path, target: TensorSource) -> list[str]:
    from artifacts.draft_vocab import check_binding, head_of, read

    return check_binding(read(folder), head_of(target, head_module(target)))
