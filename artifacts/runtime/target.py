"""The target model's forward pass: Qwen3.5-style hybrids and dense Qwen3 / Llama.

Axes: b batch, t tokens, h hidden, v vocabulary.
Covers teacher-forced passes from position 0, appending to a state (prefill of ragged batches,
decoding, verification with rollback), taps for drafters, logits. Does not cover images, mixture of
experts, scaled rope, sampling.
In: a `TensorSource`, packed or dense per matrix. Out: hidden states.
Invariant: equal to transformers in fp32 up to rounding, and independent of how a sequence is cut
into calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts.checkpoint import TensorSource
from artifacts.errors import TrimtabError
from artifacts.runtime.config import TargetConfig
from artifacts.runtime.layers import FullAttention, Norm
from artifacts.runtime.linear import Embedding, Linear
from artifacts.runtime.loading import Taken
from artifacts.runtime.ops import Rope
from artifacts.runtime.state import DeltaState, KvCache, TargetState, place
from artifacts.runtime.target_parts import Block, body_prefix, check_declared, load_block, load_head
from artifacts.runtime.threads import run_each

CPU_PASS_TOKENS = 1024  # a pass of more falls out of the caches
CPU_PASS_ROWS = 64  # rows of a group when few tokens are appended to many rows
CUDA_PASS_TOKENS = 65536


@dataclass
class TargetOutput:
    """hidden_bth: after the final norm. taps_bth: the residual stream after each tapped layer,
    before any final norm, concatenated along h in ascending layer order; None without taps.
    Rows at padding are garbage."""

    hidden_bth: Tensor
    taps_bth: Tensor | None


class Target:
    """A loaded target; see `load` and `forward`."""

    def __init__(
        self,
        config: TargetConfig,
        embedding: Embedding,
        blocks: Sequence[Block],
        norm: Norm,
        lm_head: Linear,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.blocks = list(blocks)
        self.norm = norm
        self.lm_head = lm_head
        self.dtype = dtype
        self.device = torch.device(device)
        self.rope = Rope(config.attention.rotary_dim, config.attention.rope_theta, device)
        on_cpu = self.device.type == "cpu"
        self.pass_tokens = CPU_PASS_TOKENS if on_cpu else CUDA_PASS_TOKENS
        self.pass_rows = CPU_PASS_ROWS if on_cpu else CUDA_PASS_TOKENS

    @classmethod
    def load(
        cls,
        source: TensorSource,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Target:
        """Build the target from all tensors of `source` but `mtp.*` and `model.visual.*`.

        Raises: TrimtabError for a config that the runtime does not compute, a missing or unread
        tensor, a wrong shape, fused parts stored unlike, or a tie flag that the tensors contradict.
        """
        config = TargetConfig.from_dict(source.config)
        check_declared(source)
        taken = Taken(source, "target", dtype=dtype, device=device)
        p = body_prefix(source)
        h, v = config.hidden_size, config.vocab_size
        embedding = taken.embedding(f"{p}embed_tokens", v, h)
        blocks = [load_block(taken, f"{p}layers.{i}", config, i) for i in range(config.num_layers)]
        norm = Norm.load(taken, f"{p}norm", h, config.eps, offset=config.offset_norm)
        head = load_head(taken, config, embedding)
        ignored = ["mtp."] + (["model.visual."] if config.model_type == "qwen3_5" else [])
        taken.finish(ignored=ignored)
        return cls(config, embedding, blocks, norm, head, dtype=dtype, device=device)

    def linears(self) -> list[Linear]:
        """All matrices of the body and the head, for `observe`."""
        body = [x for b in self.blocks for x in (*b.mixer.linears(), *b.mlp.linears())]
        return [*body, self.lm_head]

    def new_state(self, batch: int, capacity: int) -> TargetState:
        """An empty state: `batch` rows of up to `capacity` tokens, padding of a call included."""
        c = self.config.attention
        layers: list[KvCache | DeltaState] = []
        for block in self.blocks:
            if isinstance(block.mixer, FullAttention):
                layers.append(
                    KvCache.empty(
                        batch,
                        c.kv_heads,
                        capacity,
                        c.head_dim,
                        dtype=self.dtype,
                        device=self.device,
                    )
                )
            else:
                layers.append(block.mixer.empty_state(batch, device=self.device))
        return TargetState(layers, [0] * batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits over config.vocab_size, padding rows included; hidden is post final norm."""
        return self.lm_head(hidden).float()

    @torch.no_grad()
    def forward(
        self,
        ids_bt: Tensor,
        state: TargetState | None = None,
        *,
        lengths_b: Sequence[int] | Tensor | None = None,
        tap_ids: Sequence[int] = (),
        snapshots: bool = False,
    ) -> TargetOutput:
        """One pass over ids [b, t] (int64).

        Without a state: teacher-forced from position 0, rows right-padded; rows are computed in
        groups of similar length, so that padding costs little. With a state: the t tokens are
        appended to each row's committed ones. `lengths_b`: valid tokens of each row (default t).
        `snapshots`: nothing is committed until `state.commit(keep_b)` says how many tokens stay.
        """
        b, t = ids_bt.shape
        ids_bt = ids_bt.to(self.device)
        counts = None if lengths_b is None else [int(n) for n in lengths_b]
        if counts is not None and (len(counts) != b or not all(0 <= n <= t for n in counts)):
            raise ValueError(f"lengths {counts} do not fit ids of shape {[b, t]}")
        taps = sorted(set(tap_ids))
        if taps != list(tap_ids) or (taps and not 0 <= taps[0] <= taps[-1] < len(self.blocks)):
            raise TrimtabError(
                f"tap ids {list(tap_ids)} must be ascending layers 0..{len(self.blocks) - 1}"
            )
        if state is None:
            return self._teacher_forced(ids_bt, counts, taps)
        if state.batch != b or state.pending is not None:
            raise ValueError("the state has other rows, or an uncommitted call")
        if snapshots:
            out = self._pass(ids_bt, state, counts, taps, snapshots=True)
            state.pending = counts or [t] * b
            return out
        out = self._appended(ids_bt, state, counts, taps)
        added = counts or [t] * b
        state.lengths = [n + m for n, m in zip(state.lengths, added, strict=True)]
        return out

    def _teacher_forced(
        self, ids_bt: Tensor, counts: list[int] | None, taps: list[int]
    ) -> TargetOutput:
        """Groups of rows of similar length, each computed to its longest row."""
        b, t = ids_bt.shape
        lengths = counts or [t] * b
        order = sorted(range(b), key=lambda row: (-lengths[row], row))
        out = self._empty_output(b, t, taps)

        def group(rows: list[int]) -> Callable[[], None]:
            def task() -> None:
                width = max(1, lengths[rows[0]])
                index = torch.tensor(rows, device=self.device)
                own = [lengths[r] for r in rows]
                part = self._pass(ids_bt[index, :width], None, own, taps, snapshots=False)
                out.hidden_bth[index, :width] = part.hidden_bth
                if out.taps_bth is not None and part.taps_bth is not None:
                    out.taps_bth[index, :width] = part.taps_bth

            return task

        tasks: list[Callable[[], None]] = []
        start = 0
        while start < b:
            size = max(1, self.pass_tokens // max(1, lengths[order[start]]))
            tasks.append(group(order[start : start + size]))
            start += size
        self.rope.reserve(t)
        self.run_groups(tasks)
        return out

    def _appended(
        self, ids_bt: Tensor, state: TargetState, counts: list[int] | None, taps: list[int]
    ) -> TargetOutput:
        """Groups of neighbouring rows, each computed to its longest row.

        A group's state shares the memory of the batch's, so rows sorted by length cost least.
        """
        b, t = ids_bt.shape
        size = min(max(1, self.pass_tokens // t), self.pass_rows)
        if size >= b:
            return self._pass(ids_bt, state, counts, taps, snapshots=False)
        out = self._empty_output(b, t, taps)

        def group(rows: slice) -> Callable[[], None]:
            def task() -> None:
                own = None if counts is None else counts[rows]
                width = t if own is None else max(1, *own)
                memory = state.rows(rows.start, rows.stop)
                part = self._pass(ids_bt[rows, :width], memory, own, taps, snapshots=False)
                out.hidden_bth[rows, :width] = part.hidden_bth
                if out.taps_bth is not None and part.taps_bth is not None:
                    out.taps_bth[rows, :width] = part.taps_bth

            return task

        starts = range(0, b, size)
        self.rope.reserve(max(state.lengths) + t)
        self.run_groups([group(slice(s, min(s + size, b))) for s in starts])
        return out

    def run_groups(self, tasks: Sequence[Callable[[], None]], *, serial: bool = False) -> None:
        """Independent groups of rows, in parallel on the CPU, one torch thread each.

        One after the other on CUDA, if `serial`, and while the target's inputs are observed.
        """
        if self.device.type != "cpu":
            for task in tasks:
                task()
            return
        observed = any(linear.observer is not None for linear in self.linears())
        run_each(tasks, serial=serial or observed)

    def _empty_output(self, b: int, t: int, taps: list[int]) -> TargetOutput:
        h = self.config.hidden_size
        hidden = torch.zeros(b, t, h, dtype=self.dtype, device=self.device)
        wide = len(taps) * h
        return TargetOutput(hidden, hidden.new_zeros(b, t, wide) if taps else None)

    @torch.no_grad()
    def _pass(
        self,
        ids_bt: Tensor,
        state: TargetState | None,
        counts: list[int] | None,
        taps: list[int],
        *,
        snapshots: bool,
    ) -> TargetOutput:
        b, t = ids_bt.shape
        starts = [0] * b if state is None else state.lengths
        where = place(starts, t, counts=counts, device=self.device)
        where.cos, where.sin = self.rope.at(where.positions_bt, below=where.limit)
        observe = True if where.valid_bt is None else where.valid_bt
        x = self.embedding(ids_bt)
        kept: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            memory = None if state is None else state.layers[i]
            normed = block.input_norm(x)
            if isinstance(block.mixer, FullAttention):
                assert memory is None or isinstance(memory, KvCache)
                x = x + block.mixer(normed, self.rope, where, memory, observe)
            else:
                assert memory is None or isinstance(memory, DeltaState)
                x = x + block.mixer(normed, where, memory, snapshots=snapshots, observe=observe)
            x = x + block.mlp(block.post_norm(x), observe)
            if i in taps:
                kept.append(x)
        return TargetOutput(self.norm(x), torch.cat(kept, dim=-1) if kept else None)
