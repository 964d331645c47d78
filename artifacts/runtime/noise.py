"""The noise streams of one request: drafting, acceptance, and the emitted token.

Each purpose has a generator of its own, seeded with a hash of the request's seed and the purpose,
so that draft noise is independent of verification noise whatever happens in between.
Invariant: no global generator is read or changed.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class Noise:
    """Uniform numbers in [0, 1), float64, from a CPU generator; `purpose` separates the streams."""

    def __init__(self, seed: int, purpose: str, device: torch.device | str = "cpu") -> None:
        digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        self._device = device

    def uniforms(self, *shape: int) -> Tensor:
        """The next numbers of the stream."""
        u = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        return u.to(self._device)
