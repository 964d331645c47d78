"""Resolve `device`, `dtype` and `threads`, with the reason for every automatic choice.

Does: look for a CUDA driver without importing torch; count the usable cores. Does not: touch torch
until `prepare`, which is called once before a stage that computes.

Invariant: the resolved values stand in the key, so two machines that resolve differently never
share a result.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib import metadata

from artifacts.errors import TrimtabError
from pipeline.recipe import Recipe
from pipeline.stage import Environment


def resolve(recipe: Recipe) -> tuple[Environment, list[str]]:
    """The environment of a run, and one line for each choice the recipe left open."""
    reasons = []
    device: str = recipe.device
    dtype, threads = recipe.dtype, recipe.threads
    if device == "auto":
        device, why = choose_device()
        reasons.append(f"device: {device} ({why})")
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
        reasons.append(f"dtype: {dtype} (the rule for {device})")
    if threads is None:
        threads = len(os.sched_getaffinity(0))
        reasons.append(f"threads: {threads} (usable cores)")
    environment = Environment(device=device, dtype=dtype, threads=threads, seed=recipe.seed)
    return environment, reasons


def choose_device() -> tuple[str, str]:
    """("cuda" or "cpu", why): CUDA if this torch and a driver find a card."""
    cards, why = _cards()
    return ("cuda" if cards else "cpu"), why


def prepare(environment: Environment) -> None:
    """Import torch and set it up; raises `TrimtabError` when CUDA is asked for and not there."""
    import torch

    torch.set_num_threads(environment.threads)
    if environment.device == "cuda" and not torch.cuda.is_available():
        raise TrimtabError(
            f"device: cuda, but torch {torch.__version__} finds no card",
            hint="set device: cpu in the recipe, or install torch with CUDA",
        )


@cache
def _cards() -> tuple[int, str]:
    """Number of CUDA cards this torch could use, and how it was found out."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return 0, "torch is not installed"
    if version.endswith("+cpu"):
        return 0, f"torch {version} has no CUDA"
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "no CUDA driver"
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0, "the CUDA driver finds no card"
    return count.value, f"{count.value} CUDA card(s)"
