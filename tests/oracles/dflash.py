"""DFlash and DFlash2, one row, one head and one channel group at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.rows import Tensors, attend, norm, rotate, swiglu


class DraftOracle:
    """A drafter over the target's embedding and head, all float64."""

    def __init__(
        self, tensors: Tensors, config: dict[str, Any], embed: Tensor, head: Tensor
    ) -> None:
        self.t = tensors
        self.c = config
        self.inner = config["dflash_config"]
        self.embed = embed
        self.head = head
        self.eps = config["rms_norm_eps"]

    def feature(self, taps: Tensor) -> Tensor:
        return norm(
            self.t["fc.weight"] @ taps.double(),
            self.t["hidden_norm.weight"],
            self.eps,
            offset=False,
        )

    def _key(self, layer: int, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor]]:
        c, a = self.c, f"layers.{layer}.self_attn"
        hd = c["head_dim"]
        k_all, v_all = self.t[f"{a}.k_proj.weight"] @ x, self.t[f"{a}.v_proj.weight"] @ x
        keys, values = [], []
        for m in range(c["num_key_value_heads"]):
            key = norm(
                k_all[m * hd : (m + 1) * hd], self.t[f"{a}.k_norm.weight"], self.eps, offset=False
            )
            keys.append(rotate(key, position, hd, c["rope_theta"]))
            values.append(v_all[m * hd : (m + 1) * hd])
        return keys, values

    def _conv(self, name: str, side: int, u: list[Tensor], normed: list[Tensor]) -> list[Tensor]:
        """Side `side` of a dynamic convolution; coefficients from `normed`, applied to `u`."""
        if f"{name}.base_kernel" not in self.t:
            return u
        base = self.t[f"{name}.base_kernel"]
        group, taps = self.inner["conv_group_size"], self.inner["conv_kernel_size"]
        groups = base.shape[2] // group
        out = []
        for i in range(len(u)):
            d = self.t[f"{name}.kernel_projection.weight"] @ normed[i]
            y = torch.zeros_like(u[i])
            for tap in range(taps):
                if i - tap < 0:
                    continue
                for channel in range(y.shape[0]):
                    index = (side * taps + tap) * groups + channel // group
                    y[channel] += (base[side, tap, channel] + d[index]) * u[i - tap][channel]
            out.append(y)
        return out

    def block(self, anchor: int, position: int, features: list[Tensor]) -> list[Tensor]:
        """Final-norm hidden of rows 1..; `features` are those of positions 0..position-1."""
        c = self.c
        size = self.inner.get("block_size", c.get("block_size"))
        hd, nh, nkv = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
        ids = [anchor] + [self.inner["mask_token_id"]] * (size - 1)
        x = [self.embed[i] for i in ids]
        for layer in range(c["num_hidden_layers"]):
            p = f"layers.{layer}"
            a = f"{p}.self_attn"
            window = c["sliding_window"] if c["layer_types"][layer] == "sliding_attention" else None
            n1 = [norm(r, self.t[f"{p}.input_layernorm.weight"], self.eps, offset=False) for r in x]
            u = self._conv(f"{p}.attention_conv", 0, n1, n1)
            context = [self._key(layer, f, j) for j, f in enumerate(features)]
            own = [self._key(layer, r, position + i) for i, r in enumerate(u)]
            mixed = []
            for i, row in enumerate(u):
                pairs = list(enumerate(context)) + [(position + j, kv) for j, kv in enumerate(own)]
                seen = [kv for at, kv in pairs if window is None or at > position + i - window]
                if c["is_causal"]:
                    seen = seen[: len(seen) - (size - 1 - i)]
                q_all = self.t[f"{a}.q_proj.weight"] @ row
                heads = []
                for n in range(nh):
                    q = norm(
                        q_all[n * hd : (n + 1) * hd],
                        self.t[f"{a}.q_norm.weight"],
                        self.eps,
                        offset=False,
                    )
                    q = rotate(q, position + i, hd, c["rope_theta"])
                    m = n // (nh // nkv)
                    heads.append(attend(q, [kv[0][m] for kv in seen], [kv[1][m] for kv in seen]))
                mixed.append(self.t[f"{a}.o_proj.weight"] @ torch.cat(heads))
            mixed = self._conv(f"{p}.attention_conv", 1, mixed, n1)
            x = [r + y for r, y in zip(x, mixed, strict=True)]
            w = self.t[f"{p}.post_attention_layernorm.weight"]
            n2 = [norm(r, w, self.eps, offset=False) for r in x]
            v = self._conv(f"{p}.mlp_conv", 0, n2, n2)
            y = self._conv(f"{p}.mlp_conv", 1, [swiglu(self.t, f"{p}.mlp", r) for r in v], n2)
            x = [r + s for r, s in zip(x, y, strict=True)]
        return [norm(r, self.t["norm.weight"], self.eps, offset=False) for r in x[1:]]

    def walk(
        self, anchor: int, hidden: list[Tensor], temperature: float = 0.0, uniforms: Any = None
    ) -> tuple[list[int], list[dict[int, float]]]:
        """Tokens and, by step, the probabilities by token id (one entry of 1 when greedy)."""
        s = "candidate_selector"
        before, after = self.t[f"{s}.predecessor_codebook"], self.t[f"{s}.successor_codebook"]
        previous, tokens, laws = anchor, [], []
        for step, h in enumerate(hidden):
            logits = self.head @ h
            gate = self.t[f"{s}.hidden_projection.weight"] @ h
            ranked = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
            scores = {}
            for cand in ranked[: self.inner["selector_top_k"]]:
                edge = sum(
                    float(before[previous, r] * gate[r] * after[cand, r]) for r in range(len(gate))
                )
                scores[cand] = float(logits[cand]) + edge
            if temperature == 0:
                previous = max(scores, key=lambda i: scores[i])
                laws.append({previous: 1.0})
            else:
                best = max(scores.values())
                weights = {i: math.exp((v - best) / temperature) for i, v in scores.items()}
                total = sum(weights.values())
                law = {i: w / total for i, w in weights.items()}
                laws.append(law)
                goal, running = float(uniforms[step]), 0.0
                for i, p in law.items():
                    running += p
                    if running > goal:
                        previous = i
                        break
            tokens.append(previous)
        return tokens, laws
