"""A whole recipe on TINY and DRAFT: random weights, tiny sets, every stage real.

The gates' thresholds are wide (random weights prove nothing about quality) but every gate is
measured and judged. Invariant: same folder name, same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests import checkpoints

TEXT = """the captain asked for a small vessel and read what the weather in the harbour had been
while nobody wanted to wait until morning so they began at once and worked through the night with
sails ropes engine rudder lines numbers question answer model temperature file stream path"""
WORDS = TEXT.split()
WIDE = (
    "lm_head_kl",
    "lm_head_kl_upper",
    "body_perplexity",
    "target_perplexity",
    "target_kl",
    "loops",
)
NARROW = (
    "mtp_acceptance",
    "mtp_acceptance_lower",
    "mtp_sampled_acceptance",
    "drafter_acceptance",
    "drafter_acceptance_lower",
    "drafter_sampled_acceptance",
    "distinct",
)


def sentence(seed: int, words: int) -> str:
    """Words in an order that only depends on `seed`."""
    state, chosen = seed * 2654435761 % 2**32, []
    for _ in range(words):
        state = (state * 1664525 + 1013904223) % 2**32
        chosen.append(WORDS[state % len(WORDS)])
    return " ".join(chosen)


def write_rows(path: Path, kind: str, first: int, count: int, words: int) -> None:
    """JSON lines of prompts or texts, each its own document."""
    rows = []
    for number in range(first, first + count):
        text = sentence(number, words)
        body = (
            {"text": text}
            if kind == "texts"
            else {"messages": [{"role": "user", "content": text}], "thinking": number % 2 == 0}
        )
        rows.append(
            {
                "id": f"row-{number}",
                "document": f"document-{number}",
                "domain": ("code", "docs")[number % 2],
                "language": "en",
                **body,
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(folder: Path, extra: str = "", **sections: str) -> Path:
    """Write checkpoints, sets and `tiny.yaml` into `folder`; the recipe's path.

    sections: YAML flow mappings that replace those below, such as lm_head="{bits: 8}".
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "target").exists():
        checkpoints.tiny(folder / "target")
        checkpoints.draft(folder / "drafter")
        for name, kind, first, count, words in (
            ("calibration", "prompts", 0, 12, 8),
            ("calibration_texts", "texts", 100, 12, 60),
            ("development", "prompts", 200, 6, 8),
            ("heldout", "prompts", 300, 6, 8),
            ("texts", "texts", 400, 4, 40),
        ):
            write_rows(folder / f"{name}.jsonl", kind, first, count, words)
    values = {
        "base": "{path: target}",
        "drafter": "{path: drafter, bits: 4, group_size: 64}",
        "target": "{samples: 8, sequence_length: 64}",
        "traffic": "{max_new_tokens: 24, heldout_new_tokens: 16, chunk: 4}",
        "capture": "{depth: 2, heldout_rows: 32}",
        "lm_head": "{bits: 4, group_size: 128}",
        "mtp": "{bits: 4, group_size: 64, depth: 2}",
        "draft_vocab": "{fraction: 0.5, compare: [0.25], floor: 0.0, minimum_sample: 1}",
        "publish": "{to: {path: hub/tiny}, licence: apache-2.0}",
        **sections,
    }
    sets = ("calibration", "calibration_texts", "development", "heldout", "texts")
    gates = [f"  {name}: {{threshold: 1.0e+9, minimum_sample: 1}}" for name in WIDE]
    gates += [f"  {name}: {{threshold: 0, minimum_sample: 1}}" for name in NARROW]
    text = [
        "name: tiny",
        "seed: 7",
        "threads: 1",
        "device: cpu",
        *[f"{key}: {value}" for key, value in values.items()],
        "prompts:",
        *[f"  {name}: {{path: {name}.jsonl}}" for name in sets],
        "gates:",
        *gates,
        extra,
    ]
    path = folder / "tiny.yaml"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path
