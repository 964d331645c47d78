"""The MTP head, one row at a time, from the formulas of its layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.oracles.rows import Tensors, attend, norm, rotate, swiglu

Entry = tuple[list[Tensor], list[Tensor]]
PREFIX = "mtp.layers.0"


class MtpOracle:
    """Rows are appended one by one; the cache is a plain list that callers may cut."""

    def __init__(self, tensors: Tensors, config: dict[str, Any]) -> None:
        self.t = tensors
        self.c = config
        self.rows: list[Entry] = []

    def row(self, token: int, hidden: Tensor, position: int) -> Tensor:
        """z of one row, whose key and value are appended to `rows`."""
        t, c = self.t, self.c
        eps, hd = c["rms_norm_eps"], c["head_dim"]
        nh, nkv = c["num_attention_heads"], c["num_key_value_heads"]
        theta = c["rope_parameters"]["rope_theta"]
        rotary = int(hd * c["rope_parameters"]["partial_rotary_factor"])
        embedding = t["model.embed_tokens.weight"][token]
        e = norm(embedding, t["mtp.pre_fc_norm_embedding.weight"], eps, offset=True)
        h = norm(hidden.double(), t["mtp.pre_fc_norm_hidden.weight"], eps, offset=True)
        x = t["mtp.fc.weight"] @ torch.cat([e, h])
        y = norm(x, t[f"{PREFIX}.input_layernorm.weight"], eps, offset=True)
        a = f"{PREFIX}.self_attn"
        k_all, v_all = t[f"{a}.k_proj.weight"] @ y, t[f"{a}.v_proj.weight"] @ y
        keys, values = [], []
        for m in range(nkv):
            key = norm(k_all[m * hd : (m + 1) * hd], t[f"{a}.k_norm.weight"], eps, offset=True)
            keys.append(rotate(key, position, rotary, theta))
            values.append(v_all[m * hd : (m + 1) * hd])
        self.rows.append((keys, values))
        qg = t[f"{a}.q_proj.weight"] @ y
        heads = []
        for n in range(nh):
            both = qg[n * 2 * hd : (n + 1) * 2 * hd]
            q = norm(both[:hd], t[f"{a}.q_norm.weight"], eps, offset=True)
            m = n // (nh // nkv)
            mixed = attend(
                rotate(q, position, rotary, theta),
                [r[0][m] for r in self.rows],
                [r[1][m] for r in self.rows],
            )
            heads.append(mixed * torch.sigmoid(both[hd:]))
        x = x + t[f"{a}.o_proj.weight"] @ torch.cat(heads)
        post = norm(x, t[f"{PREFIX}.post_attention_layernorm.weight"], eps, offset=True)
        x = x + swiglu(t, f"{PREFIX}.mlp", post)
        return norm(x, t["mtp.norm.weight"], eps, offset=True)
