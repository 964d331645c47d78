"""Compare the forward passes of ``model.py`` with slow references written row by row in fp32.

``python check_forward.py``            on small random weights
``python check_forward.py --trained``  on the shipped weights, and against transformers

The references share no code with ``model.py``: they read tensors by name and loop over rows,
heads and taps. Every comparison prints its largest absolute difference; above 1e-3 is a failure.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from corpus import DATA, TARGET, load_tokenizer, read_jsonl
from model import DFlash2, DraftShape, Sampling, Shape, Target, generate, selector_walk
from torch import Tensor
from train import load_drafter, load_target, mtp_drafts, render

LIMIT = 1e-3
Weights = dict[str, Tensor]


def rms(x: Tensor, w: Tensor, offset: float) -> Tensor:
    """RMS norm of one vector with weight (offset + w)."""
    return x / math.sqrt(float((x * x).mean()) + 1e-6) * (offset + w)


def turn(x: Tensor, position: int, theta: float, size: int) -> Tensor:
    """Rope of one head vector, pair by pair."""
    out = x.clone()
    half = size // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / size)
        c, s = math.cos(angle), math.sin(angle)
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
    return out


def swiglu(w: Weights, p: str, x: Tensor) -> Tensor:
    """SwiGLU of one vector."""
    g = w[p + "gate_proj.weight"] @ x
    return w[p + "down_proj.weight"] @ (g * torch.sigmoid(g) * (w[p + "up_proj.weight"] @ x))


def soft_mix(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of one query head over lists of keys."""
    score = torch.stack([q @ k for k in keys]) / math.sqrt(len(q))
    weight = torch.softmax(score, 0)
    return sum((a * v for a, v in zip(weight, values, strict=True)), torch.zeros_like(q))


def slow_mtp(
    w: Weights, s: Shape, tokens: list[int], hidden: Tensor, anchor: int, depth: int
) -> list[Tensor]:
    """Chain states z_1..z_depth for an anchor, serving's way: one key list, grown by the chain."""
    d, p = s.head_dim, "mtp.layers.0."
    rotary = int(d * s.rotary)
    keys: list[list[Tensor]] = [[] for _ in range(s.kv_heads)]
    values: list[list[Tensor]] = [[] for _ in range(s.kv_heads)]

    def row(token: int, state: Tensor, position: int) -> Tensor:
        e = rms(w["model.embed_tokens.weight"][token], w["mtp.pre_fc_norm_embedding.weight"], 1.0)
        h = rms(state, w["mtp.pre_fc_norm_hidden.weight"], 1.0)
        x = w["mtp.fc.weight"] @ torch.cat([e, h])
        y = rms(x, w[p + "input_layernorm.weight"], 1.0)
        k = (w[p + "self_attn.k_proj.weight"] @ y).view(s.kv_heads, d)
        v = (w[p + "self_attn.v_proj.weight"] @ y).view(s.kv_heads, d)
        for j in range(s.kv_heads):
            key = rms(k[j], w[p + "self_attn.k_norm.weight"], 1.0)
            keys[j].append(turn(key, position, s.theta, rotary))
            values[j].append(v[j])
        both = (w[p + "self_attn.q_proj.weight"] @ y).view(s.heads, 2 * d)
        heads = []
        for i in range(s.heads):
            q = turn(
                rms(both[i, :d], w[p + "self_attn.q_norm.weight"], 1.0), position, s.theta, rotary
            )
            j = i // (s.heads // s.kv_heads)
            heads.append(soft_mix(q, keys[j], values[j]) * torch.sigmoid(both[i, d:]))
        x = x + w[p + "self_attn.o_proj.weight"] @ torch.cat(heads)
        x = x + swiglu(w, p + "mlp.", rms(x, w[p + "post_attention_layernorm.weight"], 1.0))
        return rms(x, w["mtp.norm.weight"], 1.0)

    out = [torch.zeros(0)]
    for t in range(anchor):
        out[0] = row(tokens[t + 1], hidden[t], t)
    for step in range(1, depth):
        token = int((w["lm_head.weight"] @ out[-1]).argmax())
        out.append(row(token, out[-1], anchor - 1 + step))
    return out


def convolve(
    w: Weights, p: str, d: DraftShape, inputs: list[Tensor], u: list[Tensor], side: int
) -> list[Tensor]:
    """One side of a block convolution; coefficients from ``inputs``."""
    groups = d.hidden // d.conv_group
    out = []
    for i in range(len(u)):
        c = w[p + "kernel_projection.weight"] @ inputs[i]
        y = torch.zeros(d.hidden)
        for tap in range(d.conv_kernel):
            if i - tap < 0:
                continue
            for channel in range(d.hidden):
                at = (side * d.conv_kernel + tap) * groups + channel // d.conv_group
                y[channel] += (w[p + "base_kernel"][side, tap, channel] + c[at]) * u[i - tap][
                    channel
                ]
        out.append(y)
    return out


def slow_block(
    w: Weights, d: DraftShape, embed: Tensor, token: int, taps: Tensor, anchor: int
) -> list[Tensor]:
    """Final states of one block's rows; taps [position, concatenated features]."""
    context = [rms(w["fc.weight"] @ taps[j], w["hidden_norm.weight"], 0.0) for j in range(anchor)]
    x = [embed[token].clone()] + [embed[d.mask_id].clone() for _ in range(d.block - 1)]

    def keys_of(p: str, row: Tensor, position: int) -> tuple[list[Tensor], Tensor]:
        k = (w[p + "k_proj.weight"] @ row).view(d.kv_heads, d.head_dim)
        v = (w[p + "v_proj.weight"] @ row).view(d.kv_heads, d.head_dim)
        return [
            turn(rms(a, w[p + "k_norm.weight"], 0.0), position, d.theta, d.head_dim) for a in k
        ], v

    for number in range(d.layers):
        base = f"layers.{number}."
        p = base + "self_attn."
        y = [rms(r, w[base + "input_layernorm.weight"], 0.0) for r in x]
        u = convolve(w, base + "attention_conv.", d, y, y, 0)
        old = [keys_of(p, c, j) for j, c in enumerate(context)]
        new = [keys_of(p, r, anchor + k) for k, r in enumerate(u)]
        mixed = []
        for k, r in enumerate(u):
            low = max(0, anchor + k - d.window + 1)
            seen = old[low:] + new
            q = (w[p + "q_proj.weight"] @ r).view(d.heads, d.head_dim)
            heads = []
            for i in range(d.heads):
                j = i // (d.heads // d.kv_heads)
                one = turn(rms(q[i], w[p + "q_norm.weight"], 0.0), anchor + k, d.theta, d.head_dim)
                heads.append(soft_mix(one, [a[0][j] for a in seen], [a[1][j] for a in seen]))
            mixed.append(w[p + "o_proj.weight"] @ torch.cat(heads))
        x = [
            a + b
            for a, b in zip(x, convolve(w, base + "attention_conv.", d, y, mixed, 1), strict=True)
        ]
        y = [rms(r, w[base + "post_attention_layernorm.weight"], 0.0) for r in x]
        m = [swiglu(w, base + "mlp.", r) for r in convolve(w, base + "mlp_conv.", d, y, y, 0)]
        x = [a + b for a, b in zip(x, convolve(w, base + "mlp_conv.", d, y, m, 1), strict=True)]
    return [rms(r, w["norm.weight"], 0.0) for r in x]


def slow_walk(
    w: Weights, d: DraftShape, head: Tensor, states: list[Tensor], token: int
) -> list[int]:
    """The selector's greedy walk, one candidate at a time."""
    out = []
    for state in states[1:]:
        logits = head @ state
        ids = sorted(range(len(logits)), key=lambda i: -float(logits[i]))[: d.top_k]
        gate = w["candidate_selector.hidden_projection.weight"] @ state
        left = w["candidate_selector.predecessor_codebook"][token] * gate
        score = [
            float(logits[i] + left @ w["candidate_selector.successor_codebook"][i]) for i in ids
        ]
        token = ids[score.index(max(score))]
        out.append(token)
    return out


FAILED: list[str] = []


def report(name: str, difference: float) -> None:
    """Print one comparison."""
    print(f"{name}: largest difference {difference:.2e}")
    if not difference < LIMIT:
        FAILED.append(name)


def check_delta() -> None:
    """Chunked delta rule against the recurrence, values and gradients."""
    from model import delta_rule

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 100, 16, generator=g) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -torch.rand(1, 2, 100, generator=g)
    beta = torch.rand(1, 2, 100, generator=g)
    inputs = [x.requires_grad_() for x in (q, k, v, decay, beta)]
    fast = delta_rule(q, k, v, decay, beta, 64)
    rows = []
    for h in range(2):
        state = torch.zeros(16, 16)
        for t in range(100):
            state = state * decay[0, h, t].exp()
            state = state + torch.outer(
                k[0, h, t], (v[0, h, t] - state.T @ k[0, h, t]) * beta[0, h, t]
            )
            rows.append(state.T @ q[0, h, t])
    slow = torch.stack(rows).view(1, 2, 100, 16)
    report("delta rule", float((fast - slow).detach().abs().max()))
    probe = torch.randn(fast.shape, generator=g)
    for name, a, b in zip(
        "qkvgb",
        torch.autograd.grad((fast * probe).sum(), inputs),
        torch.autograd.grad((slow * probe).sum(), inputs),
        strict=True,
    ):
        report(f"delta rule, gradient of {name}", float((a - b).abs().max()))


def check_mtp(model: Target, ids: Tensor) -> None:
    """MTP chain of depth 4 against the slow one at a few anchors."""
    hidden, _ = model.model(ids)
    w = dict(model.state_dict())
    drafts = mtp_drafts(model, ids, 4)
    row = ids[0].tolist()
    worst, same, total = 0.0, 0, 0
    for anchor in (1, 2, 9, ids.shape[1] - 1):
        slow = slow_mtp(w, model.s, row, hidden[0], anchor, 4)
        tokens = [int((w["lm_head.weight"] @ z).argmax()) for z in slow]
        same += sum(a == b for a, b in zip(tokens, drafts[0, anchor].tolist(), strict=True))
        total += 4
        cache: list[tuple[Tensor, Tensor]] = []
        state, token = hidden[:, :-1], ids[:, 1:]
        for d in range(4):
            state = model.mtp.depth(model.model.embed_tokens(token), state, d + 1, cache)
            token = model.logits(state).argmax(-1)
            worst = max(worst, float((state[0, anchor - 1] - slow[d]).abs().max()))
    report(f"MTP states, depth 1 to 4 ({same} of {total} tokens equal)", worst)


def check_drafter(model: Target, draft: DFlash2, ids: Tensor) -> None:
    """Blocks at a few anchors against the slow block; the walk against the slow walk."""
    _, taps = model.model(ids, draft.d.taps)
    anchors = torch.tensor([[1, 5, ids.shape[1] - 3]])
    embed, head = model.model.embed_tokens.weight, model.lm_head.weight
    states = draft(embed, ids, taps, anchors)
    _, walk = selector_walk(draft, states, head, ids.gather(1, anchors))
    w = dict(draft.state_dict())
    features = torch.cat(taps, -1)[0]
    worst, same, total = 0.0, 0, 0
    for n, anchor in enumerate(anchors[0].tolist()):
        token = int(ids[0, anchor])
        slow = slow_block(w, draft.d, embed, token, features, anchor)
        worst = max(worst, float((torch.stack(slow) - states[0, n]).abs().max()))
        tokens = slow_walk(w, draft.d, head, slow, token)
        same += sum(a == b for a, b in zip(tokens, walk[0, n].tolist(), strict=True))
        total += len(tokens)
    report(f"DFlash2 states ({same} of {total} walked tokens equal)", worst)


def check_generation(model: Target, ids: Tensor) -> None:
    """Step-by-step greedy tokens against the argmax of a full pass over them."""
    out = generate(
        model, ids, torch.tensor([ids.shape[1]]), ids.shape[1] + 40, Sampling(), 0, torch.float32
    )
    hidden, _ = model.model(out)
    wanted = model.logits(hidden).argmax(-1)[:, ids.shape[1] - 1 : -1]
    report("greedy decoding (tokens that differ)", float((wanted != out[:, ids.shape[1] :]).sum()))


def check_transformers(model: Target, ids: Tensor) -> None:
    """Logits, residual stream and greedy decoding of transformers' own class."""
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(str(TARGET), dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = other(ids, output_hidden_states=True)
        hidden, taps = model.model(ids, (1, 4, 6))
        report("transformers, logits", float((theirs.logits - model.logits(hidden)).abs().max()))
        gap = max(
            float((theirs.hidden_states[i + 1] - t).abs().max())
            for i, t in zip((1, 4, 6), taps, strict=True)
        )
        report("transformers, residual after layers 1, 4, 6", gap)
        out = other.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=-1)
        mine = generate(
            model,
            ids,
            torch.tensor([ids.shape[1]]),
            ids.shape[1] + 32,
            Sampling(),
            0,
            torch.float32,
        )
        report("transformers, greedy tokens that differ", float((out != mine).sum()))


def noisy(module: torch.nn.Module, seed: int) -> None:
    """Random weights everywhere, so that nothing is an identity."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.1)


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description="Check the forward passes.")
    parser.add_argument("--trained", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    check_delta()
    if args.trained:
        model, draft = load_target(TARGET, "cpu"), None
        if (Path(TARGET).parent / "drafter" / "model.safetensors").exists():
            draft = load_drafter(TARGET.parent / "drafter", "cpu")
        row = read_jsonl(DATA / "heldout.jsonl")[0]
        ids = torch.tensor([render(row, load_tokenizer())[:40]])
        check_transformers(model, ids)
    else:
        shape = Shape(vocab=128, hidden=64, inter=96, layers=4, head_dim=32, lin_dim=16)
        model = Target(shape)
        model.initialise(1)
        noisy(model, 2)
        draft = DFlash2(
            DraftShape(
                vocab=128,
                hidden=64,
                inter=96,
                head_dim=32,
                window=10,
                taps=(0, 1, 2),
                mask_id=127,
                rank=16,
            )
        )
        draft.initialise(3)
        noisy(draft, 4)
        ids = torch.randint(0, 120, (1, 20), generator=torch.Generator().manual_seed(5))
    model.requires_grad_(False)
    check_generation(model, ids)
    check_mtp(model, ids)
    if draft is not None:
        draft.requires_grad_(False)
        check_drafter(model, draft, ids)
    if FAILED:
        raise SystemExit(f"failed: {json.dumps(FAILED)}")


if __name__ == "__main__":
    main()
