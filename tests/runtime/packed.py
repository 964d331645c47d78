"""Round-to-nearest packing for tests: some matrices of a checkpoint become triples."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from artifacts.packing import PackedMatrix
from artifacts.scheme import Scheme
from tests.checkpoints import Tensors


def pack(weight: Tensor, bits: int = 4, group: int = 128) -> PackedMatrix:
    n, k = weight.shape
    top = 2 ** (bits - 1) - 1
    w = weight.float().view(n, k // group, group)
    scale = (w.abs().amax(-1) / top).clamp(min=1e-6).to(torch.bfloat16)
    codes = (w / scale.float().unsqueeze(-1)).round().clamp(-top - 1, top).to(torch.int8)
    return PackedMatrix.from_codes(codes.view(n, k), scale, Scheme(bits, group))


def packed(tensors: Tensors, choose: Callable[[str], bool], bits: int = 4) -> Tensors:
    """The tensors with the chosen modules' weights replaced by their triples."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and tensor.ndim == 2 and choose(module):
            out |= pack(tensor, bits).tensors(module)
        else:
            out[name] = tensor
    return out


def dense(tensors: Tensors) -> Tensors:
    """The same tensors with every triple dequantized to fp32 again."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            scale = tensors[f"{module}.weight_scale"]
            n, k = (int(x) for x in tensors[f"{module}.weight_shape"])
            bits = tensor.shape[1] * 32 // k
            matrix = PackedMatrix(tensor, scale, (n, k), bits, k // scale.shape[1])
            out[f"{module}.weight"] = matrix.dense()
        elif leaf not in ("weight_scale", "weight_shape"):
            out[name] = tensor
    return out


def quantization_config(ignore: Iterable[str], targets: Iterable[str] = ("Linear",)) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "g": {"targets": list(targets), "weights": {**weights, "group_size": 128}}
        },
        "ignore": list(ignore),
    }
