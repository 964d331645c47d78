"""What a build holds, computed from its files: sizes, parameters, schemes, tensor hashes.

In: a build's folder and the list of its files. Out: `parts` and `tensors` of a manifest, and the
summary of its ledgers. Does not cover whether any of it is right (`structure`). Needs no torch.
Invariant: every figure comes from the headers and bytes on disk.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from artifacts.agreement import expanded_ignore
from artifacts.checkpoint import Checkpoint, SingleFile, TensorSource, load_single, small_ints
from artifacts.ledger import LedgerEntry, read_ledger
from artifacts.manifest import DRAFTER_LEDGER, LEDGER, PartEntry, SectionEntry
from artifacts.names import is_embedding, packed_modules, role
from artifacts.scheme import packed_scheme
from artifacts.shards import PACKED_SUFFIXES
from artifacts.tensor_file import sha256_tensors

FACTS = ("architectures", "model_type", "vocab_size", "block_size", "mtp_num_hidden_layers")
DRAFT_IDS = ("target_ids", "d2t", "t2d")


def section_of(part: str, module: str) -> str:
    """The section of a part that a module's bytes are counted in."""
    if part != "target":
        return "rows" if part == "draft_vocab" else _drafter_section(module)
    if module.startswith("mtp."):
        return "mtp"
    if "visual." in module:
        return "vision"
    if role(module) == "lm_head":
        return "lm_head"
    return "embedding" if is_embedding(module) else "body"


def _drafter_section(module: str) -> str:
    for mark, section in (("_conv", "convolutions"), ("candidate_selector", "selector")):
        if mark in module:
            return section
    return "fc" if role(module) == "fc" else "layers"


def _describe(part: str, source: TensorSource, source_bytes: int | None) -> PartEntry:
    packed = {name: packed_scheme(source, name)[0] for name in packed_modules(source)}
    size: Counter[str] = Counter()
    count: Counter[str] = Counter()
    schemes: dict[str, Counter[str]] = {}
    for name in source.names():
        info = source.info(name)
        module, _, leaf = name.rpartition(".")
        section = "ids" if name in DRAFT_IDS else section_of(part, module or name)
        size[section] += info.nbytes
        stored = schemes.setdefault(section, Counter())
        if module in packed and leaf in PACKED_SUFFIXES:
            if leaf != "weight_shape":
                continue
            logical, kind = math.prod(small_ints(source, name)), str(packed[module])
        else:
            logical, kind = info.numel, info.dtype
        count[section] += logical
        stored[kind] += logical
    facts = {key: source.config[key] for key in FACTS if key in source.config}
    nested = source.config.get("dflash_config") or {}
    facts |= {key: nested[key] for key in FACTS if key in nested}
    return PartEntry(
        config=facts,
        bytes=sum(size.values()),
        parameters=sum(count[section] for section in size if section != "ids"),
        source_bytes=source_bytes,
        sections={
            section: SectionEntry(
                bytes=size[section],
                parameters=count[section],
                schemes=dict(sorted(schemes[section].items())),
            )
            for section in sorted(size)
        },
        packed={name: str(scheme) for name, scheme in sorted(packed.items())},
        kept=expanded_ignore(source),
    )


def describe_parts(
    build: Path, content: list[str], source_bytes: dict[str, int]
) -> tuple[dict[str, PartEntry], dict[str, dict[str, str]]]:
    """(parts, tensors) of a manifest: each folder's figures, and the sha256 of every tensor.

    Raises TrimtabError when a folder is not a whole checkpoint.
    """
    parts: dict[str, PartEntry] = {}
    for part in ("target", "drafter", "draft_vocab"):
        if not any(name.startswith(f"{part}/") for name in content):
            continue
        source: Checkpoint | SingleFile
        if part == "draft_vocab":
            source = load_single(build / part / "draft_head.safetensors")
        else:
            source = Checkpoint.open(build / part)
        parts[part] = _describe(part, source, source_bytes.get(part))
    tensors = {
        name: sha256_tensors(build / name) for name in content if name.endswith(".safetensors")
    }
    return parts, tensors


def summarize_ledgers(build: Path) -> dict[str, Any]:
    """Part -> summary of its ledger; {} when nothing was solved."""
    found = {"target": build / LEDGER, "drafter": build / DRAFTER_LEDGER}
    return {part: summarize(read_ledger(path)) for part, path in found.items() if path.exists()}


def summarize(entries: list[LedgerEntry]) -> dict[str, Any]:
    """Counts by method, the fallbacks with their reasons, the largest damping, mean errors."""
    fallbacks = {entry.name: entry.reason for entry in entries if entry.method == "rtn"}
    solved = [entry for entry in entries if entry.method == "gptq"]
    measured = [
        (entry.output_error, entry.rtn_output_error)
        for entry in solved
        if entry.output_error is not None and entry.rtn_output_error
    ]
    return {
        "matrices": len(entries),
        "methods": dict(sorted(Counter(entry.method for entry in entries).items())),
        "fallbacks": fallbacks,
        "fallback_share": len(fallbacks) / len(entries) if entries else 0.0,
        "least_rows": min((entry.rows for entry in solved), default=0),
        "largest_damping": max((entry.damping or 0.0 for entry in solved), default=0.0),
        "damping_retries": sum(max(entry.damping_tries - 1, 0) for entry in solved),
        "dead_inputs": sum(entry.dead_inputs for entry in entries),
        "mean_output_error_over_rtn": (
            sum(own / rtn for own, rtn in measured) / len(measured) if measured else None
        ),
    }
