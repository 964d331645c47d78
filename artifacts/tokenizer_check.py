"""Does the tokenizer of an artifact say what its source's says? Without loading a model.

Covers the presence of tokenizer and chat template, a probe text with every special token, and ids
against the vocabulary. Needs the `tokenizers` library, not transformers.
Invariant: a folder without a usable tokenizer never passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from artifacts.checkpoint import Checkpoint
from artifacts.errors import TrimtabError
from artifacts.files import read_json

PROBE = (
    "The rudder turned, 3.14 times; naïve café, 你好 мир 🚀\n\tdef f(x):\n        return x ** 2\n"
    "<think>\nwhy?\n</think>\n<tool_call>{}</tool_call>"
)
FILE = "tokenizer.json"


def check_tokenizer(target: Checkpoint, source: Path | None) -> list[str]:
    """Problems of the tokenizer, the chat template and the special ids of a checkpoint.

    `source` is the folder whose tokenizer it must agree with, if that is at hand.
    """
    problems: list[str] = []
    try:
        tokenizer = _load(target.root)
        problems += _probe(tokenizer, None if source is None else _load(source))
        problems += _ids(tokenizer, target)
    except TrimtabError as error:
        problems.append(error.message)
    if not has_chat_template(target.root) and (source is None or has_chat_template(source)):
        problems.append(
            "no chat template: neither chat_template.jinja nor in tokenizer_config.json"
        )
    return problems


def has_chat_template(folder: Path) -> bool:
    """Whether a chat template stands in a file of its own or in the tokenizer's config."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))


def _load(folder: Path) -> Any:
    from tokenizers import Tokenizer

    path = folder / FILE
    if not path.is_file():
        raise TrimtabError(f"{path}: missing; without it text encodes to nothing")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TrimtabError(f"{path}: not a tokenizer: {error}") from error


def _specials(tokenizer: Any) -> dict[int, str]:
    return {i: str(token.content) for i, token in tokenizer.get_added_tokens_decoder().items()}


def _probe(tokenizer: Any, reference: Any | None) -> list[str]:
    """The probe, and each added token alone and in a text, encode as in the source."""
    if not tokenizer.encode(PROBE, add_special_tokens=False).ids:
        return [f"{FILE}: the probe text encodes to nothing"]
    problems = []
    for index, token in sorted(_specials(tokenizer).items()):
        if tokenizer.encode(token, add_special_tokens=False).ids != [index]:
            problems.append(f"{FILE}: {token!r} does not encode to its id {index}")
    if reference is None:
        return problems
    if _specials(tokenizer) != _specials(reference):
        changed = sorted(set(_specials(tokenizer).items()) ^ set(_specials(reference).items()))
        problems.append(f"{FILE}: added token {changed[0][1]!r} differs from the source's")
    texts = [PROBE, *(f"a {token} b" for token in _specials(reference).values())]
    for text in texts:
        for special in (False, True):
            own = tokenizer.encode(text, add_special_tokens=special).ids
            if own != reference.encode(text, add_special_tokens=special).ids:
                problems.append(f"{FILE}: {text[:40]!r} encodes to other ids than in the source")
                break
    return problems


def _ids(tokenizer: Any, target: Checkpoint) -> list[str]:
    """Ids of the tokenizer and of generation_config are rows of the vocabulary."""
    inner = target.config.get("text_config") or {}
    vocab = int(target.config.get("vocab_size", inner.get("vocab_size", 0)))
    problems = []
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if ids and max(ids) >= vocab:
        problems.append(f"{FILE}: id {max(ids)} is outside vocab_size {vocab}")
    path = target.root / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = generation.get(key)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and tokenizer.id_to_token(token) is None:
                problems.append(f"generation_config.json: {key} {token} is no id of the tokenizer")
    return problems
