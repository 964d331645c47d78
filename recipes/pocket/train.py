"""Train and measure the pocket family on one GPU (or, at toy sizes, on a CPU).

``configs``  write the config files of target and drafter
``target``   train the target with its MTP head, save it in bf16, measure it
``average``  mean of two checkpoints of the same run
``drafter``  make the pool of the target's own text and train the DFlash2 drafter on it
``counts``   count the tokens of the target's own sampled answers
``figures``  measure perplexity and tokens per step on the held-out sets

Training lengths are given in seconds: the learning rate falls linearly to zero with the time
spent, so a run ends on time whatever the machine. Random numbers come from local generators.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import (
    DATA,
    DOMAINS,
    HERE,
    TARGET,
    VOCAB,
    ChatBuilder,
    Tokens,
    load_tokenizer,
    read_jsonl,
)
from model import (
    DFlash2,
    DraftShape,
    Sampling,
    Shape,
    Target,
    generate,
    selector_walk,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

DRAFTER = HERE / "drafter"
EOT, IM_START, IM_END = (8163, 8164, 8165)
MASK_ID = 8180
SERVING = Sampling(temperature=0.7, top_k=20, top_p=0.95)
MTP_WEIGHTS = (0.3, 0.1, 0.1)


# --------------------------------------------------------------------- configs


def target_config(s: Shape) -> dict[str, Any]:
    """config.json of the target (flat, text only, no mrope)."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": IM_END,
        "full_attention_interval": s.interval,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.inter,
        "layer_types": [
            "full_attention" if s.full(i) else "linear_attention" for i in range(s.layers)
        ],
        "linear_conv_kernel_dim": s.conv,
        "linear_key_head_dim": s.lin_dim,
        "linear_num_key_heads": s.key_heads,
        "linear_num_value_heads": s.value_heads,
        "linear_value_head_dim": s.lin_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "output_gate_type": "swish",
        "pad_token_id": EOT,
        "rms_norm_eps": s.eps,
        "rope_parameters": {
            "partial_rotary_factor": s.rotary,
            "rope_theta": s.theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": s.vocab,
    }


def drafter_config(d: DraftShape, s: Shape) -> dict[str, Any]:
    """config.json of the drafter, fields as the released DFlash2 drafters have them."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "is_causal": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "hidden_size": d.hidden,
        "initializer_range": 0.02,
        "intermediate_size": d.inter,
        "layer_types": ["sliding_attention"] * d.layers,
        "max_position_embeddings": 4096,
        "max_window_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_hidden_layers": d.layers,
        "num_key_value_heads": d.kv_heads,
        "num_target_layers": s.layers,
        "rms_norm_eps": d.eps,
        "rope_scaling": None,
        "rope_theta": d.theta,
        "sliding_window": d.window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": d.vocab,
        "dflash_config": {
            "block_size": d.block,
            "conv_group_size": d.conv_group,
            "conv_kernel_size": d.conv_kernel,
            "mask_token_id": d.mask_id,
            "selector_rank": d.rank,
            "selector_top_k": d.top_k,
            "target_layer_ids": list(d.taps),
        },
    }


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a final line feed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def command_configs(_: argparse.Namespace) -> None:
    """Write the config files."""
    tokenizer = load_tokenizer()
    found = [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    if found != [EOT, IM_START, IM_END]:
        raise SystemExit(f"special token ids are {found}")
    write_json(TARGET / "config.json", target_config(Shape()))
    write_json(
        TARGET / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [IM_END, EOT],
            "pad_token_id": EOT,
            "temperature": SERVING.temperature,
            "top_k": SERVING.top_k,
            "top_p": SERVING.top_p,
        },
    )
    write_json(DRAFTER / "config.json", drafter_config(DraftShape(), Shape()))


# ------------------------------------------------------------------ load, save


def shard_of(name: str, layers: int) -> int:
    """Which of the three files a tensor of the target goes to."""
    if name.startswith("mtp."):
        return 3
    if name == "lm_head.weight" or name == "model.norm.weight":
        return 2
    parts = name.split(".")
    return 2 if parts[1] == "layers" and int(parts[2]) >= layers // 2 else 1


def save_target(model: Target, out: Path) -> None:
    """Write bf16 shards and the index."""
    out.mkdir(parents=True, exist_ok=True)
    parts: dict[int, dict[str, Tensor]] = {1: {}, 2: {}, 3: {}}
    weight_map: dict[str, str] = {}
    for name, value in sorted(model.state_dict().items()):
        number = shard_of(name, model.s.layers)
        parts[number][name] = value.detach().to("cpu", torch.bfloat16).contiguous()
        weight_map[name] = f"model-{number:05d}-of-00003.safetensors"
    for number, tensors in parts.items():
        file = out / f"model-{number:05d}-of-00003.safetensors"
        save_file(tensors, str(file), metadata={"format": "pt"})
    total = sum(t.numel() * 2 for part in parts.values() for t in part.values())
    write_json(
        out / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def load_target(folder: Path, device: str) -> Target:
    """The target in fp32 from its shards."""
    model = Target(Shape.from_config(json.loads((TARGET / "config.json").read_text())))
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        state.update(load_file(str(file)))
    model.load_state_dict({k: v.float() for k, v in state.items()})
    return model.to(device).requires_grad_(False).eval()


def load_drafter(folder: Path, device: str) -> DFlash2:
    """The drafter in fp32."""
    draft = DFlash2(DraftShape.from_config(json.loads((DRAFTER / "config.json").read_text())))
    state = load_file(str(folder / "model.safetensors"))
    draft.load_state_dict({k: v.float() for k, v in state.items()})
    return draft.to(device).requires_grad_(False).eval()


def round_to_bf16(model: torch.nn.Module) -> None:
    """Round every parameter to bf16 and keep it in its dtype."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16).to(p.dtype))


def target_hash(folder: Path) -> str:
    """sha256 over the shards, in order."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("model-*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------ data


@dataclass
class Corpus:
    """The training set: raw text as one stream, chat samples as another."""

    raw: Tokens
    prompts: Tokens
    responses: Tokens

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """From corpus.npz, or corpus.npz.xz."""
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
        with np.load(io.BytesIO(data)) as z:
            return cls(
                Tokens(z["raw"], z["raw_starts"]),
                Tokens(z["prompts"], z["prompt_starts"]),
                Tokens(z["responses"], z["response_starts"]),
            )

    def raw_stream(self) -> np.ndarray:
        """All pieces, <|endoftext|> after each."""
        return np.insert(self.raw.tokens, self.raw.starts[1:], EOT)

    def chat_stream(self) -> tuple[np.ndarray, np.ndarray]:
        """All chat samples one after the other, and where each starts."""
        p, r = self.prompts, self.responses
        parts: list[np.ndarray] = []
        for i in range(len(p)):
            parts += [p[i], r[i]]
        sizes = np.diff(p.starts) + np.diff(r.starts)
        return np.concatenate(parts), np.cumsum(sizes) - sizes


class Batches:
    """Windows of the two streams on the device: shuffled passes over each."""

    def __init__(
        self, corpus: Corpus, rows: int, chat_rows: int, length: int, device: str, seed: int
    ) -> None:
        chat, starts = corpus.chat_stream()
        self.raw = torch.from_numpy(corpus.raw_stream().astype(np.int32)).to(device)
        self.chat = torch.from_numpy(chat.astype(np.int32)).to(device)
        self.starts = torch.from_numpy(starts[starts < len(chat) - length])
        self.rows, self.chat_rows, self.length = rows, chat_rows, length
        self.g = torch.Generator().manual_seed(seed)
        self.device = device
        self.passes = 0.0

    def raw_starts(self) -> Iterator[int]:
        """Endless starts of raw windows: each pass tiles the stream with a new shift."""
        while True:
            shift = int(torch.randint(self.length, (1,), generator=self.g))
            n = (len(self.raw) - shift - self.length) // self.length
            yield from (shift + self.length * torch.randperm(n, generator=self.g)).tolist()

    def chat_starts(self) -> Iterator[int]:
        """Endless starts of chat windows."""
        while True:
            order = torch.randperm(len(self.starts), generator=self.g)
            yield from self.starts[order].tolist()

    def __iter__(self) -> Iterator[Tensor]:
        """Token batches [rows, length], raw and chat rows interleaved."""
        raw, chat = self.raw_starts(), self.chat_starts()
        offset = torch.arange(self.length, device=self.device)
        while True:
            plain = torch.tensor([next(raw) for _ in range(self.rows - self.chat_rows)])
            turns = torch.tensor([next(chat) for _ in range(self.chat_rows)])
            a = self.raw[plain.to(self.device)[:, None] + offset]
            b = self.chat[turns.to(self.device)[:, None] + offset]
            order = torch.randperm(self.rows, generator=self.g).to(self.device)
            self.passes += plain.numel() * self.length / len(self.raw)
            yield torch.cat([a, b])[order].long()


# ---------------------------------------------------------------- optimisation


def optimiser(model: torch.nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW; norms, embeddings, convolutions and small vectors are not decayed."""
    plain: list[Tensor] = []
    decayed: list[Tensor] = []
    for name, p in model.named_parameters():
        skip = p.dim() != 2 or "embed_tokens" in name or "codebook" in name
        (plain if skip else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)


class Clock:
    """Learning rate by time: linear warm-up over steps, then linear fall to zero at the end."""

    def __init__(self, seconds: float, peak: float, warmup: int) -> None:
        self.begin = time.monotonic()
        self.seconds, self.peak, self.warmup = seconds, peak, warmup

    def restart(self, seconds: float) -> None:
        """Begin counting now (after compilation)."""
        self.begin, self.seconds = time.monotonic(), seconds

    def rate(self, step: int) -> float:
        """Rate for a step; negative when time is over."""
        share = (time.monotonic() - self.begin) / self.seconds
        if share >= 1:
            return -1.0
        return self.peak * min(1.0, (step + 1) / self.warmup) * max(1 - share, 0.01)


def log(file: Path, **values: Any) -> None:
    """One JSON object a line, in the log and on the screen."""
    line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()})
    print(line, flush=True)
    with file.open("a") as out:
        out.write(line + "\n")


def apply_step(model: torch.nn.Module, opt: torch.optim.AdamW, loss: Tensor, rate: float) -> None:
    """Backward, clip, update."""
    for group in opt.param_groups:
        group["lr"] = rate
    opt.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()


def head_loss(hidden: Tensor, head: Tensor, wanted: Tensor) -> Tensor:
    """Mean cross-entropy of lm_head(hidden) against token ids, logits in fp32."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.float().flatten(0, 1), head)
        return F.cross_entropy(logits, wanted.flatten())


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def target_loss(
    model: Target, ids: Tensor, part: int, loss: Loss, joint: bool
) -> tuple[Tensor, list[Tensor]]:
    """Language-model loss plus the MTP chain's; deeper than one, only ``part`` rows are used.

    ids [b, t + 4]; chain depth d at row t takes token t + d and predicts token t + d + 1. Unless
    ``joint``, the chain's gradient stays in the MTP head.
    """
    t = ids.shape[1] - 4
    head = model.lm_head.weight
    hidden, _ = model.model(ids[:, :t])
    losses = [loss(hidden, head, ids[:, 1 : t + 1])]
    total = losses[0]
    state, table = hidden, model.model.embed_tokens.weight
    if not joint:
        state, head, table = state.detach(), head.detach(), table.detach()
    cache: list[tuple[Tensor, Tensor]] = []
    for depth, weight in enumerate(MTP_WEIGHTS, 1):
        if depth == 2:
            ids, state = ids[:part], state[:part]
            cache = [(k[:part], v[:part]) for k, v in cache]
        state = model.mtp.depth(F.embedding(ids[:, depth : depth + t], table), state, depth, cache)
        losses.append(loss(state, head, ids[:, depth + 1 : depth + 1 + t]))
        total = total + weight * losses[-1]
    return total, losses


def speed_up(layers: Any, device: str) -> None:
    """Compile layer by layer on a GPU."""
    if device == "cuda":
        for layer in layers:
            layer.compile(dynamic=False)


def compile_target(model: Target, device: str) -> Loss:
    """Compile layers, MTP chain and loss on a GPU; returns the loss to use."""
    speed_up(model.model.layers, device)
    if device != "cuda":
        return head_loss
    model.mtp.depth = torch.compile(model.mtp.depth, dynamic=False)  # type: ignore[method-assign]
    compiled: Loss = torch.compile(head_loss, dynamic=False)
    return compiled


def command_target(args: argparse.Namespace) -> None:
    """Train target and MTP head until ``--seconds`` after the start; save and measure.

    With ``--resume`` training goes on from saved weights with a new optimiser, and the MTP head's
    gradient no longer reaches the rest.
    """
    begin = time.monotonic()
    torch.set_float32_matmul_precision("high")
    shape = Shape.from_config(json.loads((TARGET / "config.json").read_text()))
    model = Target(shape)
    model.initialise(5)
    if args.resume:
        model.load_state_dict(load_target(args.resume, "cpu").state_dict())
    model.to(args.device)
    corpus = Corpus.load(args.corpus)
    chat, seed = round(args.rows * args.chat_share), 18 if args.resume else 17
    batches = Batches(corpus, args.rows, chat, args.length + 4, args.device, seed)
    opt = optimiser(model, args.rate, 0.1)
    loss = compile_target(model, args.device)
    clock = Clock(args.seconds, args.rate, 200)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "target.log"
    count = sum(p.numel() for p in model.parameters())
    shape_of_batch = {"rows": args.rows, "length": args.length, "resumed": bool(args.resume)}
    log(file, event="start", parameters=count, torch=torch.__version__, **shape_of_batch)
    for step, ids in enumerate(batches):
        if step == 8:
            clock.restart(args.seconds - (time.monotonic() - begin))
        rate = clock.rate(step)
        if rate < 0 or step == args.steps:
            break
        with torch.autocast(args.device, torch.bfloat16):
            total, losses = target_loss(model, ids, max(1, args.rows // 4), loss, not args.resume)
        apply_step(model, opt, total, rate)
        if step % 50 == 0 or step < 12:
            values = [float(x.detach()) for x in losses]
            log(
                file,
                step=step,
                seconds=time.monotonic() - begin,
                rate=rate,
                loss=values[0],
                mtp=[round(v, 4) for v in values[1:]],
                passes=batches.passes,
            )
            if step % 1000 == 0 and step:
                save_target(model, args.out / "target")
    torch.compiler.reset()
    log(
        file,
        event="trained",
        steps=step,
        seconds=time.monotonic() - begin,
        tokens=step * args.rows * args.length,
        passes=batches.passes,
    )
    measure_target(model, args, file)


def measure_target(model: Target, args: argparse.Namespace, file: Path) -> None:
    """Save, load what was saved, and log its held-out figures in fp32."""
    save_target(model, args.out / "target")
    measured = load_target(args.out / "target", args.device)
    torch.set_float32_matmul_precision("highest")
    result = {"perplexity": perplexity(measured, args.device)}
    log(file, event="held-out", **result["perplexity"])
    result["steps"] = tokens_per_step(measured, None, args.device, args.prompts)
    log(file, event="tokens per step", **result["steps"])


def command_average(args: argparse.Namespace) -> None:
    """Mean of two checkpoints of one training run: (1 - share) target + share resume, in bf16."""
    model, other = load_target(args.target, "cpu"), load_target(args.resume, "cpu")
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.lerp_(q, args.share)
    save_target(model, args.out)


# ----------------------------------------------------------------- measurement


@torch.no_grad()
def perplexity(model: Target, device: str) -> dict[str, Any]:
    """Perplexity and top-1 accuracy on heldout_text.jsonl, each text from its beginning."""
    tokenizer = load_tokenizer()
    rows = read_jsonl(DATA / "heldout_text.jsonl")
    losses: list[np.ndarray] = []
    right: list[np.ndarray] = []
    for row in rows:
        ids = torch.tensor([tokenizer.encode(row["text"]).ids], device=device)
        hidden, _ = model.model(ids[:, :-1])
        logp = model.logits(hidden)[0].log_softmax(-1)
        losses.append(-logp.gather(1, ids[0, 1:, None])[:, 0].double().cpu().numpy())
        right.append((logp.argmax(-1) == ids[0, 1:]).cpu().numpy())

    def score(keep: list[int], low: int, high: int) -> dict[str, Any]:
        part = np.concatenate([losses[i][low:high] for i in keep])
        hits = np.concatenate([right[i][low:high] for i in keep])
        return {
            "perplexity": round(float(np.exp(part.mean())), 4),
            "top1": round(float(hits.mean()), 4),
            "tokens": len(part),
            "texts": len(keep),
        }

    every = list(range(len(rows)))
    domains = {d: [i for i in every if rows[i]["domain"] == d] for d in DOMAINS}
    out = score(every, 0, 1 << 20)
    out["by_domain"] = {d: score(keep, 0, 1 << 20) for d, keep in domains.items()}
    out["first_512_tokens_of_each"] = score(every, 0, 512)
    return out


def render(row: dict[str, Any], tokenizer: Any) -> list[int]:
    """A prompt's tokens as the chat template renders it."""
    text = f"<|im_start|>user\n{row['messages'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    if not row["thinking"]:
        text += "<think>\n\n</think>\n\n"
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def padded(rows: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """Rows as one array (filled with <|endoftext|>) and their lengths."""
    lengths = torch.tensor([len(r) for r in rows])
    out = torch.full((len(rows), int(lengths.max())), EOT)
    for i, r in enumerate(rows):
        out[i, : len(r)] = torch.tensor(r)
    return out.to(device), lengths.to(device)


@torch.no_grad()
def mtp_drafts(model: Target, ids: Tensor, depth: int) -> Tensor:
    """Greedy chain drafts [b, t, depth] for an anchor at each position (position 0 unused)."""
    hidden, _ = model.model(ids[:, :-1])
    token, state = ids[:, 1:], hidden
    cache: list[tuple[Tensor, Tensor]] = []
    out = torch.zeros(*ids.shape, depth, dtype=torch.long, device=ids.device)
    for d in range(1, depth + 1):
        state = model.mtp.depth(model.model.embed_tokens(token), state, d, cache)
        token = model.logits(state).argmax(-1)
        out[:, 1:, d - 1] = token
    return out


@torch.no_grad()
def dflash_drafts(model: Target, draft: DFlash2, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(argmax, walk) drafts [b, t, block - 1] for an anchor at each position (0 unused)."""
    _, taps = model.model(ids, draft.d.taps)
    anchors = torch.arange(1, ids.shape[1], device=ids.device).expand(len(ids), -1)
    states = draft(model.model.embed_tokens.weight, ids, taps, anchors)
    single, walk = selector_walk(draft, states, model.lm_head.weight, ids[:, 1:])
    pad = torch.zeros_like(single[:, :1])
    return torch.cat([pad, single], 1), torch.cat([pad, walk], 1)


def replay(
    ids: Tensor, first: list[int], last: list[int], ended: list[bool], drafts: Tensor
) -> list[tuple[int, int, list[int]]]:
    """Draft-and-verify against cached greedy text; per row (tokens, steps, accepted per step).

    The anchor starts at ``first`` (the token that prefill gives) and moves on by the accepted
    drafts plus one. A row that ends with a stop token ends there; else the last step counts whole.
    """
    tokens, guess = ids.cpu().numpy(), drafts.cpu().numpy()
    out: list[tuple[int, int, list[int]]] = []
    for i in range(len(tokens)):
        p, steps, accepted = first[i], 0, []
        while p < last[i]:
            limit = min(guess.shape[2], tokens.shape[1] - 1 - p)
            if ended[i]:
                limit = min(limit, last[i] - p)
            a = 0
            while a < limit and guess[i, p, a] == tokens[i, p + 1 + a]:
                a += 1
            accepted.append(a)
            p += a + 1
            steps += 1
            if ended[i] and p > last[i]:
                p = last[i]
        out.append((p - first[i], steps, accepted))
    return out


def looping(values: list[int]) -> bool:
    """Whether the last 32 tokens repeat with a period of at most 16."""
    tail = values[-32:]
    return len(tail) == 32 and any(
        all(tail[i] == tail[i - p] for i in range(p, 32)) for p in range(1, 17)
    )


def bootstrap(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> list[float]:
    """95 % interval of the difference of pooled tokens per step, resampling prompts in pairs.

    ``one`` and ``two`` hold (tokens, steps) of the same prompts under two drafters.
    """
    a, b = np.asarray(one, float), np.asarray(two, float)
    pick = np.random.default_rng(1).integers(len(a), size=(4000, len(a)))
    x, y = a[pick].sum(1), b[pick].sum(1)
    low, high = np.percentile(x[:, 0] / x[:, 1] - y[:, 0] / y[:, 1], [2.5, 97.5])
    return [round(float(low), 4), round(float(high), 4)]


def summary(
    rows: list[tuple[int, int, list[int]]], loops: list[bool], width: int
) -> dict[str, Any]:
    """Pooled tokens per step, also split by looping, and acceptance by position."""
    flat = [a for r in rows for a in r[2]]

    def pooled(keep: list[bool]) -> float | None:
        steps = sum(r[1] for r, k in zip(rows, keep, strict=True) if k)
        tokens = sum(r[0] for r, k in zip(rows, keep, strict=True) if k)
        return round(tokens / steps, 4) if steps else None

    return {
        "tokens_per_step": pooled([True] * len(rows)),
        "steps": len(flat),
        "looping": pooled(loops),
        "not_looping": pooled([not x for x in loops]),
        "accepted_at_least": [round(sum(a > k for a in flat) / len(flat), 4) for k in range(width)],
    }


@torch.no_grad()
def tokens_per_step(
    model: Target, draft: DFlash2 | None, device: str, count: int, new: int = 64
) -> dict[str, Any]:
    """Replay all drafters on greedy fp32 continuations of held-out prompts."""
    tokenizer = load_tokenizer()
    rows = [render(r, tokenizer) for r in read_jsonl(DATA / "heldout.jsonl")[:count]]
    prompts, lengths = padded(rows, device)
    ids = generate(
        model, prompts, lengths, prompts.shape[1] + new + 12, Sampling(), 0, torch.float32
    )
    first = [len(r) for r in rows]
    last, ended, loops = [], [], []
    for i, row in enumerate(ids.tolist()):
        text = row[first[i] : first[i] + new]
        stop = next((j for j, t in enumerate(text) if t in (EOT, IM_END)), None)
        ended.append(stop is not None)
        last.append(first[i] + (new - 1 if stop is None else stop))
        loops.append(stop is None and looping(text))
    names: dict[str, Tensor] = {}
    chain = torch.cat([mtp_drafts(model, part, 4) for part in torch.split(ids, 64)])
    for depth in range(1, 5):
        names[f"mtp_{depth}"] = chain[..., :depth]
    if draft is not None:
        both = [dflash_drafts(model, draft, part) for part in torch.split(ids, 16)]
        names["dflash2_argmax"] = torch.cat([b[0] for b in both])
        names["dflash2_walk"] = torch.cat([b[1] for b in both])
    out: dict[str, Any] = {
        "prompts": len(rows),
        "new_tokens": new,
        "ended_with_a_stop_token": sum(ended),
        "looping_share": round(sum(loops) / len(rows), 4),
    }
    played = {n: replay(ids, first, last, ended, d) for n, d in names.items()}
    for name, result in played.items():
        out[name] = summary(result, loops, names[name].shape[2])
    if draft is not None:
        for other in ("mtp_3", "mtp_4", "dflash2_argmax"):
            pair = [[(r[0], r[1]) for r in played[n]] for n in ("dflash2_walk", other)]
            out[f"walk_minus_{other}_95"] = bootstrap(pair[0], pair[1])
    return out


# --------------------------------------------------------------------- drafter


def chat_prompts(corpus: Corpus, count: int, seed: int) -> list[list[int]]:
    """Rendered prompts of training samples, the empty think block included where it was used."""
    empty = np.asarray(ChatBuilder(load_tokenizer()).empty, np.uint16)
    order = np.random.default_rng(seed).permutation(len(corpus.prompts))
    rows: list[list[int]] = []
    for i in np.resize(order, count).tolist():
        head = corpus.responses[i][: len(empty)]
        rows.append(corpus.prompts[i].tolist() + (empty.tolist() if (head == empty).all() else []))
    return rows


def raw_prompts(corpus: Corpus, count: int, seed: int) -> list[list[int]]:
    """Windows of 24 to 120 tokens of the training text."""
    rng = np.random.default_rng(seed)
    stream = corpus.raw_stream()
    at = rng.integers(0, len(stream) - 128, count)
    size = rng.integers(24, 121, count)
    return [stream[a : a + n].tolist() for a, n in zip(at, size, strict=True)]


def make_pool(
    model: Target, corpus: Corpus, args: argparse.Namespace, file: Path
) -> tuple[Tensor, Tensor]:
    """(sequences [n, length], first position to anchor [n]): 7/8 own text, 1/8 corpus."""
    half = torch.bfloat16 if args.device == "cuda" else torch.float32
    small = Target(model.s)
    small.load_state_dict(model.state_dict())
    small.to(args.device, half).requires_grad_(False)
    begin = time.monotonic()
    ways = (Sampling(), Sampling(), SERVING, Sampling(temperature=1.0))
    parts: list[Tensor] = []
    firsts: list[Tensor] = []
    for number in range(args.pool_batches):
        chat = round(args.pool_rows * 0.7)
        rows = chat_prompts(corpus, chat, 100 + number)
        rows += raw_prompts(corpus, args.pool_rows - chat, 200 + number)
        prompts, lengths = padded(rows, args.device)
        out = generate(small, prompts, lengths, args.length, ways[number % 4], number, half)
        parts.append(out.to(torch.int32))
        firsts.append(lengths)
        log(file, event="pool", batch=number, seconds=time.monotonic() - begin)
        if time.monotonic() - begin > args.pool_seconds and number % 4 == 3:
            break
    own = len(parts) * args.pool_rows
    stream = torch.from_numpy(corpus.raw_stream().astype(np.int32))
    g = torch.Generator().manual_seed(9)
    at = torch.randint(len(stream) - args.length, (own // 7,), generator=g)
    parts.append(stream[at[:, None] + torch.arange(args.length)].to(args.device))
    firsts.append(torch.full((own // 7,), 8, device=args.device))
    pool, first = torch.cat(parts), torch.cat(firsts)
    log(file, event="pool", rows=len(pool), tokens=pool.numel(), seconds=time.monotonic() - begin)
    return pool, first


def draft_loss(
    states: Tensor, hidden: Tensor, head: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted forward KL, draft logits, target log-probabilities); states, hidden [m, k, h]."""
    with torch.autocast(states.device.type, enabled=False):
        logits = F.linear(states.float(), head)
        wanted = F.linear(hidden.float(), head).log_softmax(-1)
        kl = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1)
        return (kl * weight).mean() / weight.mean(), logits, wanted


def selector_loss(
    draft: DFlash2, states: Tensor, logits: Tensor, wanted: Tensor, previous: Tensor, weight: Tensor
) -> Tensor:
    """Cross-entropy of the selector's scores to the target's law on the candidates.

    The candidates are the draft's top-k with the target's best token put in the last place when
    it is missing; the predecessor is the true previous token.
    """
    with torch.no_grad():
        cand = logits.topk(draft.d.top_k, -1).indices
        best = wanted.argmax(-1)
        missing = (cand != best[..., None]).all(-1)
        cand[..., -1] = torch.where(missing, best, cand[..., -1])
        law = wanted.gather(-1, cand).softmax(-1)
    with torch.autocast(states.device.type, enabled=False):
        unary = logits.gather(-1, cand)
        score = draft.candidate_selector(states.float(), unary, cand, previous)
        loss: Tensor = -(law * score.log_softmax(-1)).sum(-1)
        return (loss * weight).mean() / weight.mean()


def pick_anchors(first: Tensor, length: int, count: int, block: int, g: torch.Generator) -> Tensor:
    """Sorted anchors [b, count], without repeats, between ``first`` and the last full block."""
    noise = torch.rand(len(first), length, generator=g, device=first.device)
    place = torch.arange(length, device=first.device)
    bad = (place < first[:, None]) | (place > length - block)
    return noise.masked_fill(bad, 2.0).topk(count, -1, largest=False).indices.sort(-1).values


def drafter_step(
    model: Target, draft: DFlash2, ids: Tensor, anchors: Tensor, weight: Tensor, losses: Any
) -> tuple[Tensor, Tensor]:
    """(KL, selector loss) of a batch."""
    with torch.no_grad():
        hidden, taps = model.model(ids, draft.d.taps)
    states = draft(model.model.embed_tokens.weight, ids, taps, anchors)[:, :, 1:]
    rows = anchors[..., None] + torch.arange(draft.d.block - 1, device=ids.device)
    flat = rows.flatten(1)
    true = hidden.gather(1, flat[..., None].expand(-1, -1, hidden.shape[-1]))
    previous = ids.gather(1, flat).view(-1, draft.d.block - 1)
    states = states.flatten(0, 1)
    true = true.view(states.shape)
    kl, logits, wanted = losses(states, true, model.lm_head.weight, weight)
    return kl, selector_loss(draft, states, logits, wanted, previous, weight)


def save_drafter(draft: DFlash2, out: Path) -> None:
    """Write the drafter in bf16."""
    out.mkdir(parents=True, exist_ok=True)
    state = {
        k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in draft.state_dict().items()
    }
    save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})


def command_drafter(args: argparse.Namespace) -> None:
    """Make the pool, train the drafter until ``--seconds`` after the start, save it."""
    begin = time.monotonic()
    torch.set_float32_matmul_precision("high")
    corpus = Corpus.load(args.corpus)
    model = load_target(args.target, args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "drafter.log"
    pool, first = make_pool(model, corpus, args, file)
    draft = DFlash2(DraftShape.from_config(json.loads((DRAFTER / "config.json").read_text())))
    draft.initialise(6)
    draft.to(args.device)
    opt = optimiser(draft, args.rate, 0.01)
    speed_up([*model.model.layers, *draft.layers], args.device)
    losses = torch.compile(draft_loss, dynamic=False) if args.device == "cuda" else draft_loss
    block = draft.d.block
    weight = torch.exp(-torch.arange(block - 1, device=args.device) / 4.0)
    order = torch.Generator(device=args.device).manual_seed(3)
    clock = Clock(1.0, args.rate, 100)
    clock.restart(args.seconds - (time.monotonic() - begin))
    log(file, event="start", parameters=sum(p.numel() for p in draft.parameters()), pool=len(pool))
    step = 0
    while (rate := clock.rate(step)) > 0 and step != args.steps:
        pick = torch.randint(len(pool), (args.rows,), generator=order, device=args.device)
        ids = pool[pick].long()
        anchors = pick_anchors(first[pick], ids.shape[1], args.anchors, block, order)
        with torch.autocast(args.device, torch.bfloat16):
            kl, choice = drafter_step(model, draft, ids, anchors, weight, losses)
        apply_step(draft, opt, kl + choice, rate)
        if step % 50 == 0:
            log(
                file,
                step=step,
                seconds=time.monotonic() - begin,
                rate=rate,
                kl=float(kl.detach()),
                selector=float(choice.detach()),
            )
        step += 1
        if step % 1500 == 0:
            save_drafter(draft, args.out / "drafter")
    torch.compiler.reset()
    log(
        file,
        event="trained",
        steps=step,
        seconds=time.monotonic() - begin,
        passes=step * args.rows / len(pool),
    )
    save_drafter(draft, args.out / "drafter")


# ---------------------------------------------------------------------- counts


def command_counts(args: argparse.Namespace) -> None:
    """Count sampled answers (stop token included) to chat prompts of training documents."""
    corpus = Corpus.load(args.corpus)
    half = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = load_target(args.target, args.device).to(half)
    marks = {"counts_20k": 20_000, "counts_200k": 200_000, "counts_1m": 1_000_000}
    out: dict[str, Tensor] = {}
    answers: list[np.ndarray] = []
    total = batch = 0
    begin = time.monotonic()
    while total < args.tokens and time.monotonic() - begin < args.seconds:
        prompts, lengths = padded(chat_prompts(corpus, args.pool_rows, 300 + batch), args.device)
        size = int(lengths.max()) + args.new
        ids = generate(model, prompts, lengths, size, SERVING, 400 + batch, half).cpu().numpy()
        for row, start in zip(ids, lengths.tolist(), strict=True):
            text = row[start : start + args.new]
            stop = np.flatnonzero((text == IM_END) | (text == EOT))
            answers.append(text[: stop[0] + 1] if len(stop) else text)
        total = sum(map(len, answers))
        batch += 1
    tokens = np.concatenate(answers)
    for name, size in marks.items():
        if size <= len(tokens):
            out[name] = torch.from_numpy(np.bincount(tokens[:size], minlength=VOCAB))
    out["counts_all"] = torch.from_numpy(np.bincount(tokens, minlength=VOCAB))
    out["counts"] = out["counts_all"].clone()
    out["text_counts"] = torch.from_numpy(np.bincount(corpus.raw.tokens, minlength=VOCAB))
    stopped = sum(a[-1] in (IM_END, EOT) for a in answers)
    meta = {
        "tokens": str(len(tokens)),
        "answers": str(len(answers)),
        "stopped": str(stopped),
        "text_tokens": str(len(corpus.raw.tokens)),
        "temperature": str(SERVING.temperature),
        "top_k": str(SERVING.top_k),
        "top_p": str(SERVING.top_p),
        "max_new_tokens": str(args.new),
        "seeds": f"prompts 300.., sampling 400.. ({batch} batches of {args.pool_rows})",
        "target_sha256": target_hash(args.target),
        "dtype": str(half).split(".")[1],
        "prompts": "chat prompts of training documents; output tokens only, stop token included",
        "device": device_name(args.device),
        "torch": torch.__version__,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.to(torch.int64) for k, v in out.items()},
        str(args.out / "own_counts.safetensors"),
        metadata=meta,
    )
    log(args.out / "counts.log", event="counts", seconds=time.monotonic() - begin, **meta)


# --------------------------------------------------------------------- figures


def device_name(device: str) -> str:
    """The device in words."""
    return torch.cuda.get_device_name() if device == "cuda" else f"cpu ({platform.machine()})"


def command_figures(args: argparse.Namespace) -> None:
    """Measure the saved family in fp32 and write figures.json."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = load_target(args.target, args.device)
    draft = load_drafter(args.drafter, args.device)
    begin = time.monotonic()
    figures: dict[str, Any] = {
        "conditions": {
            "arithmetic": "fp32 (no TF32), weights as saved in bf16",
            "decoding": "greedy",
            "device": device_name(args.device),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "perplexity": "heldout_text.jsonl, each text whole, first token not scored",
            "tokens_per_step": "replay against cached greedy text, pooled, last step whole",
            "looping": "last 32 of the new tokens repeat with a period of 16 or less",
        },
        "target": {
            "parameters": sum(p.numel() for n, p in model.named_parameters() if "mtp" not in n),
            "mtp_parameters": sum(p.numel() for p in model.mtp.parameters()),
            "drafter_parameters": sum(p.numel() for p in draft.parameters()),
            "sha256": target_hash(args.target),
        },
        "perplexity": perplexity(model, args.device),
        "tokens_per_step": tokens_per_step(model, draft, args.device, args.prompts),
    }
    figures["seconds"] = round(time.monotonic() - begin, 1)
    write_json(args.out / "figures.json", figures)
    print(json.dumps(figures, indent=2))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train and measure the pocket family.")
    commands = {
        "configs": command_configs,
        "target": command_target,
        "average": command_average,
        "drafter": command_drafter,
        "counts": command_counts,
        "figures": command_figures,
    }
    parser.add_argument("command", choices=commands)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--drafter", type=Path, default=DRAFTER)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--steps", type=int, default=-1, help="stop early (tests)")
    parser.add_argument("--resume", type=Path, help="go on from the weights of this folder")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--share", type=float, default=0.35, help="of the second checkpoint")
    parser.add_argument("--chat-share", type=float, default=0.28)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--pool-rows", type=int, default=4096)
    parser.add_argument("--pool-batches", type=int, default=16)
    parser.add_argument("--pool-seconds", type=float, default=120)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--new", type=int, default=384)
    parser.add_argument("--prompts", type=int, default=480)
    args = parser.parse_args()
    commands[args.command](args)


if __name__ == "__main__":
    main()
