"""How many CPU threads a small model's step takes.

Step-by-step decoding of a small model runs many tiny operations; two threads that wait for each
other at each of them were 5 to 40 times slower than one (measured on two cores). So single-request
decoding of a model with hidden size up to 1,024 on the CPU uses one thread.
Invariant: the caller's thread count is restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from artifacts.runtime.target import Target

SMALL_HIDDEN = 1024


def decode_threads(target: Target) -> int | None:
    """Threads for batch-1 steps: 1 for a small model on the CPU, None to leave the setting."""
    small = target.config.hidden_size <= SMALL_HIDDEN
    return 1 if target.device.type == "cpu" and small else None


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run the block with `count` torch threads (None: as they are), then restore."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
