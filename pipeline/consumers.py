"""What other programs make of a build: the check that it loads elsewhere and means the same.

Does: load a packed target with transformers and compressed-tensors and give its logits. Does not:
judge. Other consumers run in environments of their own.

Invariant: only files are shared with the consumer, none of our loading code.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def transformers_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """fp32 logits [b, t, v] of a packed checkpoint as transformers loads it, on the CPU.

    Raises whatever transformers raises: a build that does not load is not a build.
    """
    import logging

    import torch
    from transformers import AutoModelForCausalLM

    quiet = logging.getLogger("transformers.integrations")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # says on each load that optional kernels are missing
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        with torch.no_grad():
            logits: torch.Tensor = model.eval()(ids).logits.float()
    finally:
        quiet.setLevel(level)
    return logits
