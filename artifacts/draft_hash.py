"""The hash of a head, as the draft vocabulary records it. Needs no torch.

Covers combining the sha256 of a head's stored tensors into one, from tensors or from a manifest.
Invariant: the hash depends on the stored bytes alone, not on file names, shards or prefixes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

HEAD_LEAVES = ("weight", "weight_packed", "weight_scale", "weight_shape")


def combine(hashes: Mapping[str, str]) -> str:
    """sha256 of the canonical JSON {"weight_packed": sha256, ...} of a head's tensors."""
    text = json.dumps(dict(hashes), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def from_tensor_hashes(hashes: Mapping[str, str], module: str = "lm_head") -> str | None:
    """The head's hash from per-tensor hashes (a manifest's), or None if the head is not there."""
    found = {
        leaf: hashes[f"{module}.{leaf}"] for leaf in HEAD_LEAVES if f"{module}.{leaf}" in hashes
    }
    return combine(found) if found else None
