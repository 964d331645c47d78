"""The built-in multi-token-prediction head (`mtp.*`): refresh, chain, teacher-forced replay.

Axes: b batch, n rows of a call, t tokens, h hidden, a anchors, m key/value heads, d head dimension.
One row t of the head takes the token x_{t+1} and the hidden h_t (the target's, after its final
norm; in a chain the head's own z, after `mtp.norm`), and its z_t gives the logits of x_{t+2}:
    u = fc([offset_norm(embed(x_{t+1})), offset_norm(h_t)]);  z = norm(decoder_layer(u))
Row t stands at rope position t; chain step j after row t at t + j. Does not cover sampling.
Source: vLLM 0.33 `qwen3_5_mtp.py`. Invariant: forward, teacher_forced and chain agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts.checkpoint import TensorSource
from artifacts.errors import TrimtabError
from artifacts.runtime.draft_head import DraftHead
from artifacts.runtime.layers import FullAttention, Mlp, Norm, Rows
from artifacts.runtime.linear import Linear
from artifacts.runtime.loading import Taken
from artifacts.runtime.ops import two_part_attention
from artifacts.runtime.state import KvCache, Placement, place
from artifacts.runtime.target import Target


class MtpState:
    """The head's own key/value cache for a batch, and how many rows of it are true."""

    def __init__(self, cache: KvCache, lengths: list[int]) -> None:
        self.cache = cache
        self.lengths = lengths

    def truncate(self, length_b: Sequence[int] | Tensor) -> None:
        """Forget rows at and beyond length_b (chain rows, rejected drafts)."""
        lengths = [int(n) for n in length_b]
        if any(n > now for n, now in zip(lengths, self.lengths, strict=True)):
            raise ValueError(f"cannot truncate {self.lengths} to {lengths}")
        self.lengths = lengths

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keep only the given batch rows, in that order."""
        index = [int(r) for r in rows]
        self.cache = self.cache.rows(torch.tensor(index, device=self.cache.key_bmsd.device))
        self.lengths = [self.lengths[r] for r in index]


@dataclass
class MtpKv:
    """Depth-1 keys and values of teacher-forced rows, [b, m, t, d]."""

    key_bmtd: Tensor
    value_bmtd: Tensor


ChainEntries = list[tuple[Tensor, Tensor]]


class MtpHead:
    """A loaded head. It shares the target's embedding and, unless given another, its lm_head."""

    def __init__(
        self,
        target: Target,
        fc: Linear,
        norms: tuple[Norm, Norm, Norm, Norm, Norm],
        attention: FullAttention,
        mlp: Mlp,
        head: DraftHead,
    ) -> None:
        self.target = target
        self.fc = fc
        self.embedding_norm, self.hidden_norm, self.input_norm, self.post_norm, self.norm = norms
        self.attention = attention
        self.mlp = mlp
        self.head = head

    @classmethod
    def load(
        cls, source: TensorSource, target: Target, *, head: DraftHead | None = None
    ) -> MtpHead:
        """Build the head from all `mtp.*` tensors of `source`, packed or dense per matrix.

        head: a draft vocabulary's; by default the target's own.
        Raises: TrimtabError when the target has no full-attention layout with offset norms, when a
        parameter is missing or a tensor unread, or when fused parts are stored or declared unlike.
        """
        config = target.config
        if not config.offset_norm or config.mtp_layers != 1:
            raise TrimtabError(
                f"mtp: model_type {config.model_type!r} with mtp_num_hidden_layers "
                f"{config.mtp_layers}; the runtime knows one layer of the qwen3_5 kind"
            )
        taken = Taken(source, "mtp", dtype=target.dtype, device=target.device)
        h, eps = config.hidden_size, config.eps
        p = "mtp.layers.0"
        norms = tuple(
            Norm.load(taken, name, h, eps, offset=True)
            for name in (
                "mtp.pre_fc_norm_embedding",
                "mtp.pre_fc_norm_hidden",
                f"{p}.input_layernorm",
                f"{p}.post_attention_layernorm",
                "mtp.norm",
            )
        )
        fc = taken.linear("mtp.fc", h, 2 * h)
        attention = FullAttention.load(taken, f"{p}.self_attn", config.attention, h)
        mlp = Mlp.load(taken, f"{p}.mlp", h, config.intermediate_size)
        taken.finish(only="mtp.")
        return cls(
            target,
            fc,
            (norms[0], norms[1], norms[2], norms[3], norms[4]),
            attention,
            mlp,
            head or DraftHead.full(target),
        )

    def linears(self) -> list[Linear]:
        """Its matrices, for `observe`; the shared head is not among them."""
        return [self.fc, *self.attention.linears(), *self.mlp.linears()]

    def new_state(self, batch: int, capacity: int) -> MtpState:
        """An empty cache for `batch` rows of up to `capacity` rows of the head."""
        c = self.target.config.attention
        cache = KvCache.empty(
            batch,
            c.kv_heads,
            capacity,
            c.head_dim,
            dtype=self.target.dtype,
            device=self.target.device,
        )
        return MtpState(cache, [0] * batch)

    def logits(self, z: Tensor) -> Tensor:
        """fp32 logits [..., n] over the head's draft rows (all target ids with the full head)."""
        return self.head.logits(z)

    def _input(self, ids: Tensor, hidden: Tensor, observe: Rows) -> Tensor:
        """fc of the embedding first, the hidden second."""
        e = self.embedding_norm(self.target.embedding(ids))
        return self.fc(torch.cat((e, self.hidden_norm(hidden)), dim=-1), observe=observe)

    def _output(self, x: Tensor, mixed: Tensor, observe: Rows) -> Tensor:
        x = x + mixed
        return self.norm(x + self.mlp(self.post_norm(x), observe))

    def _place(
        self, starts: Sequence[int], n: int, counts: Sequence[int] | None
    ) -> tuple[Placement, Rows]:
        where = place(starts, n, counts=counts, device=self.target.device)
        where.cos, where.sin = self.target.rope.at(where.positions_bt, below=where.limit)
        return where, True if where.valid_bt is None else where.valid_bt

    @torch.no_grad()
    def forward(
        self,
        ids_bn: Tensor,
        hidden_bnh: Tensor,
        state: MtpState,
        lengths_b: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Append n rows to each sequence's cache: z [b, n, h].

        Row i of a sequence that holds L rows is row t = L + i: ids[i] = x_{t+1}, hidden[i] = h_t.
        lengths_b: valid rows per sequence; the others are garbage and not kept.
        """
        b, n = ids_bn.shape
        counts = [n] * b if lengths_b is None else [int(x) for x in lengths_b]
        where, observe = self._place(state.lengths, n, counts)
        x = self._input(ids_bn.to(self.target.device), hidden_bnh, observe)
        mixed = self.attention(self.input_norm(x), self.target.rope, where, state.cache, observe)
        state.lengths = [a + c for a, c in zip(state.lengths, counts, strict=True)]
        return self._output(x, mixed, observe)

    @torch.no_grad()
    def teacher_forced(
        self,
        ids_bt: Tensor,
        hidden_bth: Tensor,
        lengths_b: Sequence[int] | Tensor | None = None,
    ) -> tuple[Tensor, MtpKv]:
        """Depth 1 at every row in one causal pass: (z [b, t-1, h], keys and values of the rows).

        ids and hidden are those of the target's pass; row t reads ids[:, t+1] and hidden[:, t], so
        there is one row less than there are tokens. lengths_b: valid tokens per sequence (rows
        beyond length - 2 are garbage and not observed).
        """
        b, t = ids_bt.shape
        rows = t - 1
        counts = None if lengths_b is None else [max(0, int(n) - 1) for n in lengths_b]
        ids, hidden = ids_bt[:, 1:].to(self.target.device), hidden_bth[:, :-1]
        size = max(1, self.target.pass_tokens // max(1, rows))
        starts = range(0, b, size)
        done: list[tuple[Tensor, MtpKv] | None] = [None] * len(starts)

        def group(index: int) -> Callable[[], None]:
            def task() -> None:
                part = slice(starts[index], min(starts[index] + size, b))
                own = None if counts is None else counts[part]
                done[index] = self._causal(ids[part], hidden[part], own)

            return task

        self.target.rope.reserve(rows)
        observed = any(linear.observer is not None for linear in self.linears())
        self.target.run_groups([group(i) for i in range(len(starts))], serial=observed)
        parts = [x for x in done if x is not None]
        kv = MtpKv(
            torch.cat([kv.key_bmtd for _, kv in parts]),
            torch.cat([kv.value_bmtd for _, kv in parts]),
        )
        return torch.cat([z for z, _ in parts]), kv

    @torch.no_grad()
    def _causal(
        self, ids_bt: Tensor, hidden_bth: Tensor, counts: Sequence[int] | None
    ) -> tuple[Tensor, MtpKv]:
        """One causal pass over rows from position 0."""
        b, t = ids_bt.shape
        where, observe = self._place([0] * b, t, counts)
        x = self._input(ids_bt, hidden_bth, observe)
        q, k, v, gate = self.attention.project(
            self.input_norm(x), self.target.rope, where.cos, where.sin, observe
        )
        mixed = self.attention.finish(self.attention.mix(q, k, v, where), gate, observe)
        return self._output(x, mixed, observe), MtpKv(k, v)

    @torch.no_grad()
    def chain(
        self,
        kv: MtpKv,
        rows_a: Tensor,
        positions_a: Tensor,
        z_ah: Tensor,
        tokens_a: Tensor,
        entries: ChainEntries,
    ) -> Tensor:
        """One deeper step for many anchors at once: the z that follows, [a, h].

        Args:
            kv: depth-1 keys and values from `teacher_forced`.
            rows_a, positions_a: int64, each anchor's sequence and depth-1 row t.
            z_ah: the previous depth's z of each anchor (at first z[b, t] itself).
            tokens_a: the token drafted from it.
            entries: the chain's keys and values so far, [] at first; this step's are appended.

        Each anchor attends to depth-1 rows <= t of its sequence and to its own entries, which is
        what serving sees after truncating a rejected chain.
        """
        device = self.target.device
        rows_a, positions_a = rows_a.to(device), positions_a.to(device)
        tokens_a = tokens_a.to(device)
        depth = len(entries) + 1
        limit = int(positions_a.max()) + 1
        cos, sin = self.target.rope.at((positions_a + depth).unsqueeze(1), below=limit + depth)
        x = self._input(tokens_a.unsqueeze(1), z_ah.unsqueeze(1), True)
        q, k, v, gate = self.attention.project(self.input_norm(x), self.target.rope, cos, sin)
        entries.append((k, v))
        key, value = kv.key_bmtd[:, :, :limit], kv.value_bmtd[:, :, :limit]
        if not _is_range(rows_a, key.shape[0]):
            key, value = key[rows_a], value[rows_a]
        seen = torch.arange(limit, device=q.device) <= positions_a.view(-1, 1, 1)
        mixed = two_part_attention(
            q,
            (key, value, seen),
            (
                torch.cat([e[0] for e in entries], dim=2),
                torch.cat([e[1] for e in entries], dim=2),
                None,
            ),
        )
        return self._output(x, self.attention.finish(mixed, gate), True)[:, 0]


def _is_range(rows_a: Tensor, b: int) -> bool:
    return rows_a.shape[0] == b and bool((rows_a == torch.arange(b, device=rows_a.device)).all())
