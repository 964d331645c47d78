"""How CPU threads are used: one per step of a small model, one per group of rows of a batch.

Step-by-step decoding of a small model runs many tiny operations; two threads that wait for each
other at each of them were 5 to 40 times slower than one (measured on two cores). So single-request
decoding of a model with hidden size up to 1,024 on the CPU uses one thread. Batches are cut into
groups of rows by a rule that does not know the thread count, and each group runs on one thread;
there is nothing to wait for but the end, and the result is the same for every thread count.
Invariant: the caller's thread count is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
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


def run_each(tasks: Sequence[Callable[[], None]], *, serial: bool = False) -> None:
    """Run independent tasks, each with one torch thread, as many at a time as torch has threads.

    serial: one after the other, in order (for tasks that call back into code that is not made for
    threads). Raises: what the first failed task, in order, raised.
    """
    count = torch.get_num_threads()
    if serial or count == 1 or len(tasks) == 1:
        with threads(1):
            for task in tasks:
                task()
        return
    workers = min(count, len(tasks))
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for future in [pool.submit(task) for task in tasks]:
                future.result()
    finally:
        torch.set_num_threads(count)
