"""A model's own tokenizer and chat template, opened without network and without remote code.

Does: encode plain text, render chats with thinking on or off, state the hashes that identify the
tokenizer and the template. Does not: read prompt files (see `prompts`).

Input: a folder with tokenizer.json and its companions. Output: lists of token ids.

Invariant: nothing is added to what the tokenizer and the template themselves say.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from artifacts.errors import TrimtabError


class TextTokenizer:
    """A tokenizer folder opened by transformers, without network and without remote code.

    Attributes:
        tokenizer_sha256: of tokenizer.json.
        template_sha256: of the chat template's text, "" when the folder has none.
        size: number of ids the tokenizer knows, added tokens included.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `TrimtabError` when the folder has no tokenizer or it encodes to nothing."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TrimtabError(
                f"{folder}: no tokenizer.json", hint="fetch the model again with its tokenizer"
            )
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        self.tokenizer_sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        self.template_sha256 = hashlib.sha256(template.encode()).hexdigest() if template else ""
        self.size = len(self._tokenizer)
        if not self.encode("probe"):
            raise TrimtabError(
                f"{file}: the text 'probe' encodes to nothing; the vocabulary is empty or broken",
                hint="fetch the model again with its tokenizer",
            )

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no special tokens added."""
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [int(i) for i in ids]

    def render(self, messages: list[dict[str, str]], *, thinking: bool) -> list[int]:
        """Ids of a chat up to where the model's answer starts, by the model's own template."""
        if not self.template_sha256:
            raise TrimtabError(
                "the tokenizer has no chat template, so chats cannot be rendered",
                hint="fetch chat_template.jinja with the model, or use plain texts",
            )
        ids = self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            enable_thinking=thinking,
            tokenize=True,
            return_dict=False,
        )
        return [int(i) for i in ids]
