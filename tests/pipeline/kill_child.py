"""What the fork server preloads: the whole stack once, so that a child starts in milliseconds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import datasets  # noqa: F401
import llmcompressor  # noqa: F401
import torch
import transformers  # noqa: F401

import pipeline.measure  # noqa: F401
from pipeline import recipe as recipes
from pipeline.runner import Runner
from pipeline.stages import registry


def run(recipe: Path, work: Path, until: str | None, kill_at: tuple[str, str] | None) -> None:
    """Run in this process; with `kill_at` = (stage, moment) die there without any goodbye."""
    log = os.open(work.parent / f"{work.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)

    def hook(stage: str, moment: str) -> None:
        if (stage, moment) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    Runner(recipes.load(recipe), work, registry(), hook=hook).run(until)
