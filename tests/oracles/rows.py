"""Row-by-row arithmetic shared by the slow references of the drafters; float64 vectors.

Nothing here comes from the runtime: each formula is written out for one token and one head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

Tensors = dict[str, Tensor]


def load_all(folder: Path) -> Tensors:
    """Every tensor of every safetensors file in the folder, float64."""
    out: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= {name: tensor.double() for name, tensor in load_file(path).items()}
    return out


def norm(x: Tensor, weight: Tensor, eps: float, *, offset: bool) -> Tensor:
    scale = 1.0 / math.sqrt(float((x * x).mean()) + eps)
    return x * scale * ((1.0 + weight) if offset else weight)


def rotate(x: Tensor, position: int, rotary: int, theta: float) -> Tensor:
    """Neox halves: pairs (i, i + rotary/2) of the first `rotary` entries turn by position*f_i."""
    out = x.clone()
    half = rotary // 2
    for i in range(half):
        angle = position * theta ** (-2.0 * i / rotary)
        c, s = math.cos(angle), math.sin(angle)
        a, b = float(x[i]), float(x[i + half])
        out[i], out[i + half] = a * c - b * s, b * c + a * s
    return out


def attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """One head's softmax attention over a list of key and value vectors."""
    scores = torch.stack([(query @ key) / math.sqrt(query.shape[0]) for key in keys])
    weights = torch.softmax(scores, dim=0)
    return sum((w * v for w, v in zip(weights, values, strict=True)), torch.zeros_like(values[0]))


def swiglu(t: Tensors, name: str, x: Tensor) -> Tensor:
    gate, up = t[f"{name}.gate_proj.weight"] @ x, t[f"{name}.up_proj.weight"] @ x
    return t[f"{name}.down_proj.weight"] @ (gate / (1.0 + torch.exp(-gate)) * up)
