"""The model card of a build, made from its manifest alone.

Covers the README with the Hub's metadata: sizes, gates, drafting figures, how to fetch and serve,
how it was made. Does not compute anything: each figure is copied from the manifest, which computed
it from the files or was handed it with the build.
Invariant: no figure of speed or acceptance is printed for a build that failed a quality gate; it is
withheld, and the card says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from artifacts.manifest import CARD, Manifest, PartEntry, failed_gates, script_name

SPEED_WORDS = ("tokens_per_s", "acceptance", "accepted", "sampled_ratio", "speed")
PART_TITLES = {"target": "target", "drafter": "drafter", "draft_vocab": "draft vocabulary"}
WITHHELD = "withheld"


def is_speed(name: str) -> bool:
    """Whether a figure's name says speed or acceptance."""
    return any(word in name for word in SPEED_WORDS)


def quality_failures(gates: dict[str, Any]) -> list[str]:
    """The failed gates other than those of speed; "(no gates)" if none was judged."""
    return [name for name in failed_gates(gates) if not is_speed(name)]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; pipes in cells are escaped."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def size_text(count: int | None) -> str:
    """Bytes in a decimal unit with four digits, or a dash."""
    if count is None:
        return "-"
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} B"


def number(value: object) -> str:
    """A figure as printed: five digits; a dash for what was not measured."""
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def render(manifest: Manifest) -> str:
    """The text of README.md, metadata block included."""
    from huggingface_hub import ModelCard, ModelCardData

    target = manifest.parts["target"]
    tags = ["compressed-tensors", "trimtab", *manifest.tags]
    if "drafter" in manifest.parts or any(name.startswith("mtp.") for name in target.packed):
        tags.append("speculative-decoding")
    data = ModelCardData(
        base_model=manifest.base_model,
        base_model_relation="quantized",
        library_name="transformers",
        license=manifest.licence,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(tags)),
    )
    sections = [
        f"# {manifest.name}",
        _intro(manifest),
        _banner(manifest),
        "## Sizes\n\n" + _sizes(manifest),
        "## Gates\n\n" + _gates(manifest),
        _drafting(manifest),
        "## Fetch and verify\n\n" + _fetching(manifest),
        "## Serve\n\n" + _serving(manifest),
        "## How it was made\n\n" + _making(manifest),
    ]
    text = "\n\n".join(section for section in sections if section)
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n"))


def _parts(manifest: Manifest) -> dict[str, PartEntry]:
    """The parts in one order, whether the manifest was made or read."""
    return {name: manifest.parts[name] for name in PART_TITLES if name in manifest.parts}


def _intro(manifest: Manifest) -> str:
    base = manifest.base_model
    if manifest.base_revision:
        base += f" at `{manifest.base_revision}`"
    parts = ", ".join(PART_TITLES[name] for name in _parts(manifest))
    return f"A rebuild of {base} by Trimtab. It holds: {parts}."


def _banner(manifest: Manifest) -> str:
    failed = failed_gates(manifest.gates)
    if not failed:
        return ""
    text = f"> **Not validated.** These gates did not pass: {', '.join(failed)}."
    if quality_failures(manifest.gates):
        text += " Figures of speed and acceptance are withheld."
    return text


def _schemes(part: PartEntry, section: str) -> str:
    schemes = part.sections[section].schemes
    return ", ".join(sorted(schemes, key=lambda name: (-schemes[name], name)))


def _sizes(manifest: Manifest) -> str:
    rows: list[list[object]] = []
    for name, part in _parts(manifest).items():
        rows.append(
            [
                f"**{PART_TITLES[name]}**",
                f"{part.parameters:,}",
                "",
                size_text(part.source_bytes),
                size_text(part.bytes),
            ]
        )
        rows += [
            [section, f"{entry.parameters:,}", _schemes(part, section), "", size_text(entry.bytes)]
            for section, entry in sorted(part.sections.items())
        ]
    heads = ("part", "parameters", "stored as", "source", "here")
    return table(heads, rows) + "\n\nSizes are the tensors' bytes, 1 GB = 10^9 bytes."


def _gates(manifest: Manifest) -> str:
    verdicts = manifest.gates.get("gates") or []
    if not verdicts:
        return "None were judged."
    hide = bool(quality_failures(manifest.gates))
    rows = []
    for verdict in verdicts:
        name = str(verdict.get("gate"))
        secret = hide and is_speed(name + str(verdict.get("statistic")))
        relation = {"at_most": "at most", "at_least": "at least"}.get(str(verdict.get("side")), "")
        rows.append(
            [
                name,
                WITHHELD if secret else number(verdict.get("value")),
                f"{verdict.get('bound', 'point')}, {relation} {number(verdict.get('threshold'))}",
                f"{verdict.get('sample', '-')} {verdict.get('unit', '')}".strip(),
                "passed" if verdict.get("passed") is True else "**failed**",
            ]
        )
    return table(("gate", "value", "rule", "sample", "verdict"), rows)


def _drafting(manifest: Manifest) -> str:
    if not manifest.drafters:
        return ""
    found = {key for profile in manifest.drafters for key in profile}
    keys = sorted(found, key=lambda key: (key != "method", key))
    hide = bool(quality_failures(manifest.gates))
    rows = [
        [
            WITHHELD if hide and is_speed(key) and key in profile else _value(profile.get(key))
            for key in keys
        ]
        for profile in manifest.drafters
    ]
    heads = [key.replace("_", " ") for key in keys]
    return "## Drafting\n\n" + table(heads, rows)


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value)
    return f"{value:.3f}" if isinstance(value, float) else number(value)


def _fetching(manifest: Manifest) -> str:
    script = script_name(manifest.name)
    sizes = [entry.size for name, entry in manifest.files.items() if name != CARD]
    lines = [f"    python {script} DEST"]
    if manifest.repo_id:
        lines = [f"    hf download {manifest.repo_id} {script} --local-dir .", *lines]
        lines += ["", "or", "", f"    trimtab fetch {manifest.repo_id} DEST"]
    return "\n".join(
        [
            *lines,
            "",
            f"fetches this card and {len(sizes)} files, {size_text(sum(sizes))}, and checks each "
            "against the sha256 in `trimtab.json`, whose own sha256 the script carries. "
            "`sha256sum -c SHA256SUMS` checks a copy that is there already.",
        ]
    )


def _serving(manifest: Manifest) -> str:
    lines = ["    trimtab generate DEST --prompt 'Hello'", ""]
    lines += ["vLLM 0.32 or later, without a patch:" if not _patches(manifest) else "vLLM:", ""]
    lines.append("    vllm serve DEST/target")
    block = manifest.parts["drafter"].config.get("block_size") if "drafter" in manifest.parts else 0
    if block:
        spec = {"method": "dflash", "model": "DEST/drafter", "num_speculative_tokens": block - 1}
        lines.append(f"    vllm serve DEST/target --speculative-config '{json.dumps(spec)}'")
    if "mtp" in manifest.parts["target"].sections:
        spec = {"method": "mtp", "num_speculative_tokens": 3}
        lines.append(f"    vllm serve DEST/target --speculative-config '{json.dumps(spec)}'")
    notes = _patches(manifest) + _warnings(manifest)
    return "\n".join(lines) + ("\n\n" + "\n".join(f"- {note}" for note in notes) if notes else "")


def _patches(manifest: Manifest) -> list[str]:
    """What stock vLLM does not load."""
    packed = manifest.parts["target"].packed
    if any(name.endswith("embed_tokens") for name in packed):
        return ["The packed embedding needs a patch in vLLM and in transformers for this family."]
    return []


def _warnings(manifest: Manifest) -> list[str]:
    """What other consumers do with this layout; see the sizes table for what is packed."""
    notes = []
    if "draft_vocab" in manifest.parts:
        notes.append(
            "The draft vocabulary is used by trimtab's own runtime; stock vLLM drafts with the "
            "full head."
        )
    drafter = manifest.parts.get("drafter")
    if "mtp.fc" in manifest.parts["target"].packed or (drafter and "fc" in drafter.packed):
        notes.append("SGLang 0.5.23 leaves a packed `fc` random without a word: do not use it.")
    return notes


def _making(manifest: Manifest) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))
    seeds = ", ".join(f"{name} {seed}" for name, seed in sorted(manifest.seeds.items()))
    lines = [f"Device: {manifest.device}. Versions: {versions}. Seeds: {seeds}.", ""]
    for part, summary in sorted(manifest.ledger.items(), reverse=True):
        if isinstance(summary, dict) and "methods" in summary:
            methods = ", ".join(
                f"{count} by {name}" for name, count in sorted(summary["methods"].items())
            )
            share = number(float(summary.get("fallback_share", 0.0)))
            lines += [f"Matrices of the {part}: {methods}; share of fallbacks {share}.", ""]
    lines += [manifest.determinism, ""]
    if manifest.prompt_sets:
        rows = [[name, f"`{digest}`"] for name, digest in sorted(manifest.prompt_sets.items())]
        lines += [table(("prompt set", "sha256"), rows), ""]
    lines += [table(("input", "hash"), [[k, f"`{v}`"] for k, v in sorted(manifest.inputs.items())])]
    kept = {PART_TITLES[name]: len(part.kept) for name, part in _parts(manifest).items()}
    counts = ", ".join(f"{count} in the {name}" for name, count in kept.items() if count)
    if counts:
        lines += ["", f"Matrices kept as in the source: {counts}; `trimtab.json` names them."]
    lines += ["", "The resolved recipe is in `trimtab.json` under `recipe`."]
    return "\n".join(lines)
