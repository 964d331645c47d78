"""Keeping access tokens out of everything that is shown or written.

Invariant: what passes through `redact` holds nothing that looks like a Hub token or a bearer
header.
"""

from __future__ import annotations

import re

TOKEN = re.compile(r"hf_[A-Za-z0-9_]{8,}|(?i:bearer )\S+")


def redact(text: str) -> str:
    """The text without anything that looks like an access token."""
    return TOKEN.sub("[token]", text)
