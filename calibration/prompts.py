"""Prompt sets and plain-text sets: read through `datasets`, rendered by the model's own template.

Does: read local JSON files or a pinned Hub data set, render chats with the target's tokenizer and
chat template (thinking on or off as each row says), choose the requested number of rows, count
everything that was dropped and why. Does not: generate (see `traffic`), or hold and save sets (see
`tokensets`, whose `PromptSet` is re-exported here).

Inputs: a `Source`, a folder with tokenizer files. Output: a `PromptSet`.

Invariant: the set obtained has exactly the requested number of rows, or the call fails stating both
numbers; which rows those are does not depend on the order of the file.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artifacts.errors import TrimtabError
from calibration.text_tokenizer import TextTokenizer
from calibration.tokensets import (
    Entry,
    PromptSet,
    lengths,
    refuse_overlap,
    split_by_document,
    stable_unit,
)

__all__ = [
    "Entry",
    "PromptSet",
    "Source",
    "TextTokenizer",
    "build_set",
    "read_rows",
    "refuse_overlap",
    "split_by_document",
]

FIELDS = ("messages", "text", "id", "domain", "language", "thinking", "document")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where rows come from and what stands in for columns they lack.

    Attributes:
        files: local .json or .jsonl files, read in this order; exclusive with `dataset`.
        dataset: "owner/name" of a Hub data set; needs `revision`.
        revision: 40 hexadecimal digits, a commit: a branch would move under the result.
        subset: configuration name of the Hub data set.
        split: which split of the Hub data set.
        max_rows: read at most this many rows of a Hub data set (streamed), None for all.
        columns: field of `FIELDS` to the source's column name, where they differ.
        domain: label of rows without a domain column.
        language: label of rows without a language column.
        thinking_share: share of the rows without a thinking column that have thinking on.
    """

    files: tuple[Path, ...] = ()
    dataset: str | None = None
    revision: str | None = None
    subset: str | None = None
    split: str = "train"
    max_rows: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    domain: str = "general"
    language: str = "en"
    thinking_share: float = 0.0

    def __post_init__(self) -> None:
        if bool(self.files) == (self.dataset is not None):
            raise TrimtabError("a prompt source needs either files or a dataset, and not both")
        if self.dataset is not None and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise TrimtabError(
                f"data set {self.dataset!r}: revision {self.revision!r} is not a commit "
                "(40 hexadecimal digits)",
                hint=f"take the commit from https://huggingface.co/datasets/{self.dataset}/commits",
            )
        unknown = sorted(set(self.columns) - set(FIELDS))
        if unknown:
            raise TrimtabError(f"columns: field {unknown[0]!r} is none of {', '.join(FIELDS)}")
        if not 0 <= self.thinking_share <= 1:
            raise TrimtabError(f"thinking_share {self.thinking_share} is not between 0 and 1")

    def label(self) -> dict[str, Any]:
        """What the set's header says of the source; no machine paths, file hashes instead."""
        if self.dataset is not None:
            return {
                "dataset": self.dataset,
                "revision": self.revision,
                "subset": self.subset,
                "split": self.split,
                "max_rows": self.max_rows,
            }
        return {
            "files": [
                {"name": f.name, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
                for f in self.files
            ]
        }


def read_rows(source: Source) -> list[dict[str, Any]]:
    """All rows of a source as dicts of the source's own columns.

    Local files are read without touching the network; nothing is left in a cache.

    Raises:
        TrimtabError: a file is missing or is not JSON rows, or the Hub set cannot be read.
    """
    missing = [str(f) for f in source.files if not f.is_file()]
    if missing:
        raise TrimtabError(f"{missing[0]}: no such prompt file")
    import datasets

    shown = datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    name = source.dataset or ", ".join(f.name for f in source.files)
    try:
        with tempfile.TemporaryDirectory() as cache:
            if source.dataset is None:
                table = datasets.load_dataset(
                    "json",
                    data_files=[str(f) for f in source.files],
                    split="train",
                    cache_dir=cache,
                )
                rows = table.to_list()
            else:
                table = datasets.load_dataset(
                    source.dataset,
                    source.subset,
                    split=source.split,
                    revision=source.revision,
                    streaming=source.max_rows is not None,
                    cache_dir=cache,
                )
                rows = list(table if source.max_rows is None else table.take(source.max_rows))
    except Exception as error:  # datasets raises its own, pyarrow's, the Hub's and OSError
        raise TrimtabError(
            f"{name}: not readable as rows of JSON ({type(error).__name__}: {_first_line(error)})",
            hint="each line must be one JSON object, with the same types in every line",
        ) from error
    finally:
        if not shown:
            datasets.enable_progress_bars()
    return [dict(row) for row in rows]


def build_set(
    name: str,
    kind: str,
    source: Source,
    tokenizer: TextTokenizer,
    *,
    count: int | None,
    seed: int,
    max_tokens: int,
    min_tokens: int = 1,
    allow_shortfall: bool = False,
) -> PromptSet:
    """Read, render and choose rows.

    Args:
        name: of the set, for errors and files.
        kind: "prompts" renders `messages` (or `text` as one user turn) by the chat template, up to
            the last user turn; "texts" encodes `text` plainly and cuts it at `max_tokens`.
        count: rows requested, None for every usable row. Chosen by the stable hash of seed and id.
        max_tokens: longer prompts are dropped and counted; longer texts are cut.
        min_tokens: shorter rows are dropped and counted.
        allow_shortfall: accept fewer rows than `count`; the header states both numbers.

    Raises:
        TrimtabError: fewer usable rows than requested (the message has "obtained/requested" and
            each reason with its count), no usable row, or `kind` is unknown.
    """
    if kind not in ("prompts", "texts"):
        raise TrimtabError(f"set {name!r}: kind {kind!r} is neither 'prompts' nor 'texts'")
    rows = read_rows(source)
    dropped: Counter[str] = Counter()
    found: dict[tuple[int, ...], tuple[list[int], Entry]] = {}
    for row in rows:
        made = _make_row(row, kind, source, tokenizer, seed, max_tokens, min_tokens)
        if isinstance(made, str):
            dropped[made] += 1
            continue
        ids, entry = made
        key = tuple(ids)
        if key in found:
            dropped["duplicate of another row"] += 1
            if found[key][1].id <= entry.id:  # which of two equal rows stays: not file order
                continue
        found[key] = (ids, entry)
    chosen = sorted(found.values(), key=lambda made: (stable_unit(seed, made[1].id), made[1].id))
    chosen = chosen[:count]
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items())) or "none dropped"
    wanted = len(chosen) if count is None else count
    if not chosen or (len(chosen) < wanted and not allow_shortfall):
        raise TrimtabError(
            f"set {name!r}: {len(chosen)}/{wanted} rows usable of {len(rows)} read ({reasons})",
            hint="add rows, raise max_tokens, lower the count, or set allow_shortfall",
        )
    header = {
        "source": source.label(),
        "seed": seed,
        "requested": count,
        "obtained": len(chosen),
        "rows_read": len(rows),
        "dropped": dict(sorted(dropped.items())),
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "tokenizer_sha256": tokenizer.tokenizer_sha256,
        "template_sha256": tokenizer.template_sha256 if kind == "prompts" else "",
        **lengths([ids for ids, _ in chosen]),
    }
    return PromptSet(
        name=name,
        kind=kind,
        ids=[ids for ids, _ in chosen],
        entries=[entry for _, entry in chosen],
        header=header,
    )


def _make_row(
    row: Mapping[str, Any],
    kind: str,
    source: Source,
    tokenizer: TextTokenizer,
    seed: int,
    max_tokens: int,
    min_tokens: int,
) -> tuple[list[int], Entry] | str:
    """Ids and entry of one row, or the reason why it is dropped."""
    values = {name: row.get(source.columns.get(name, name)) for name in FIELDS}
    content, reason = _chat(values) if kind == "prompts" else _text(values)
    if not content:
        return reason
    row_id = str(values["id"]) if values["id"] is not None else _content_id(content)
    thinking = values["thinking"]
    if thinking is None:
        thinking = stable_unit(seed, f"thinking:{row_id}") < source.thinking_share
    elif not isinstance(thinking, bool):
        return "whose thinking field is not true or false"
    if isinstance(content, str):
        thinking, ids = False, tokenizer.encode(content)[:max_tokens]
    else:
        ids = tokenizer.render(content, thinking=thinking)
    if len(ids) > max_tokens:
        return f"longer than {max_tokens} tokens"
    if len(ids) < min_tokens:
        return f"shorter than {min_tokens} tokens"
    return ids, Entry(
        id=row_id,
        domain=str(values["domain"] if values["domain"] is not None else source.domain),
        language=str(values["language"] if values["language"] is not None else source.language),
        thinking=thinking,
        document=str(values["document"] if values["document"] is not None else row_id),
    )


def _text(values: Mapping[str, Any]) -> tuple[str, str]:
    """The plain text of a row, or "" and the reason why it has none."""
    text = values["text"]
    return (text, "") if isinstance(text, str) and text.strip() else ("", "without text")


def _chat(values: Mapping[str, Any]) -> tuple[list[dict[str, str]], str]:
    """The chat up to its last user turn, or [] and the reason why there is none."""
    messages = values["messages"]
    if messages is None:
        text, _ = _text(values)
        return ([{"role": "user", "content": text}], "") if text else ([], "without messages")
    if not isinstance(messages, list):
        return [], "whose messages are not a list"
    turns = []
    for turn in messages:
        if not (isinstance(turn, dict) and isinstance(turn.get("content"), str)):
            return [], "with a message that has no text content"
        turns.append({"role": str(turn.get("role")), "content": turn["content"]})
    while turns and turns[-1]["role"] != "user":
        turns.pop()
    if not turns or not turns[-1]["content"].strip():
        return [], "without a user turn"
    return turns, ""


def _content_id(content: list[dict[str, str]] | str) -> str:
    """An id derived from the content, for rows without one."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
