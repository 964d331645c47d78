"""llmcompressor without what it does to the process that uses it.

Covers importing it without its log lines on standard output, and running it so that environment,
random state, threads and log settings are afterwards what they were. Does not cover what it
computes (`solve`, `body`). Invariant: nothing outside the `with` changes.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

LOG_SWITCH = "LLM_COMPRESSOR_LOG_DISABLED"  # read when llmcompressor is imported


def import_quietly(name: str) -> ModuleType:
    """A module of llmcompressor or one that imports it.

    Its first import would otherwise reset loguru's sinks, print warnings and draw random numbers.
    """
    if name in sys.modules:
        return sys.modules[name]
    with _environment(), _random_state():
        os.environ[LOG_SWITCH] = "true"
        return importlib.import_module(name)


@contextmanager
def contained(*, seed: int, threads: int, folder: Path) -> Iterator[None]:
    """Runs a library with its global switches set, and sets all of them back.

    Set: torch's, numpy's and Python's random state from `seed`; torch's threads; its log off;
    the current folder. Restored: these, and the environment.
    """
    from transformers.utils import logging as transformers_logging

    thread_count = torch.get_num_threads()
    bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    with _environment(), chdir(folder), _random_state(), _silent_logs():
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            torch.set_num_threads(threads)
            transformers_logging.disable_progress_bar()
            transformers_logging.set_verbosity_error()
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()
            torch.set_num_threads(thread_count)


@contextmanager
def _environment() -> Iterator[None]:
    """os.environ as it was."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _random_state() -> Iterator[None]:
    """The random state of torch, numpy and Python as it was."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


@contextmanager
def _silent_logs() -> Iterator[None]:
    """The libraries' logs off (and one warning of torch's): what matters stands in the ledger."""
    from loguru import logger

    names = ("llmcompressor", "compressed_tensors")
    silent = {name for name, on in logger._core.activation_list if not on}  # type: ignore[attr-defined]
    tracing = logging.getLogger("torch.fx._symbolic_trace")
    level = tracing.level
    tracing.setLevel(logging.ERROR)
    for name in names:
        logger.disable(name)
    try:
        yield
    finally:
        tracing.setLevel(level)
        for name in names:
            if f"{name}." not in silent:
                logger.enable(name)
