"""Hand-wired weights: a target that follows a known permutation, and drafters that know it.

All sublayers' outputs are zero, so the residual stream is the embedding and lm_head maps each token
to its successor. The MTP head passes the next token's embedding on. The block drafters see only the
mask's embedding, made so that the ids of a cycle are the candidates; the selector knows the order.
"""

from __future__ import annotations

import torch

from tests import checkpoints

CYCLE = list(range(10, 18))
FIXED = 30  # its own successor: the one text that independent rows can know


def successor(token: int) -> int:
    if token in CYCLE:
        return CYCLE[(CYCLE.index(token) + 1) % len(CYCLE)]
    return token


def _silent(tensors: checkpoints.Tensors) -> checkpoints.Tensors:
    quiet = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    return {n: torch.zeros_like(t) for n, t in tensors.items() if n.endswith(quiet)}


def target_tensors(mask_follows: list[int]) -> checkpoints.Tensors:
    """Replacements for TINY; the mask's embedding is the sum of those of `mask_follows`."""
    config = checkpoints.tiny_config()
    out = _silent(checkpoints.tiny_tensors(config))
    table = torch.randn(512, 256, generator=torch.Generator().manual_seed(5))
    table[checkpoints.MASK_ID] = table[mask_follows].sum(0)
    head = torch.zeros(512, 256)
    for token in range(512):
        if token != checkpoints.MASK_ID:
            head[successor(token)] += 20 * table[token] / 256
    eye = torch.eye(256)
    out |= {
        "model.embed_tokens.weight": table.to(torch.bfloat16),
        "lm_head.weight": head.to(torch.bfloat16),
        "model.norm.weight": torch.zeros(256, dtype=torch.bfloat16),
        "mtp.norm.weight": torch.zeros(256, dtype=torch.bfloat16),
        "mtp.pre_fc_norm_embedding.weight": torch.zeros(256, dtype=torch.bfloat16),
        "mtp.fc.weight": torch.cat([eye, 0 * eye], dim=1).to(torch.bfloat16),
    }
    return out


def draft_tensors(version: int) -> checkpoints.Tensors:
    """Replacements for DRAFT that go with `target_tensors(CYCLE)` (or [FIXED] for v1)."""
    out = _silent(checkpoints.draft_tensors(checkpoints.draft_config(version=version)))
    out["norm.weight"] = torch.ones(256, dtype=torch.bfloat16)
    if version == 1:
        return out
    mask = target_tensors(CYCLE)["model.embed_tokens.weight"][checkpoints.MASK_ID].float()
    unit = mask / mask.pow(2).mean().sqrt()
    before, after = torch.zeros(512, 32), torch.zeros(512, 32)
    for i, token in enumerate(CYCLE):
        before[token, i] = 10.0
        after[successor(token), i] = 1.0
    out |= {
        "candidate_selector.hidden_projection.weight": (unit / 256)
        .expand(32, 256)
        .contiguous()
        .to(torch.bfloat16),
        "candidate_selector.predecessor_codebook": before.to(torch.bfloat16),
        "candidate_selector.successor_codebook": after.to(torch.bfloat16),
    }
    return out
