"""The law of sampled output: right for every drafter, and wrong for six planted mistakes.

Stub models: fixed logits over 8 ids. The target is a Markov chain (row `previous` of a table), so
that a conditional q can be told from a marginal one. A cell is (drafter, temperature, top-k):
200,000 independent verification steps of up to three drafted tokens, each completed to three tokens
from the target's own law; the joint law of the three is compared by chi-square. The drafting,
fusing and verifying code is the runtime's own; only the logits are stubs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from artifacts.errors import TrimtabError
from artifacts.runtime import verify
from artifacts.runtime.lookup import LookupConfig, SuffixLookup, fuse
from artifacts.runtime.proposal import Proposal, as_candidates, point_mass
from artifacts.runtime.sampling import SamplingParams, draw, process
from artifacts.runtime.selector import chained_rows, independent_rows, selector_walk
from artifacts.runtime.verify import Verdict, verify_batch

DRAWS = 200_000
V, LENGTH, ANCHOR = 8, 3, 2
DRAFTERS = [
    "mtp",
    "mtp-reduced",
    "dflash",
    "dflash2",
    "lookup",
    "dflash2+lookup-head",
    "dflash2+lookup-tail",
]
CELLS = [(d, t, k) for d in DRAFTERS for t in (0.6, 1.0, 1.5) for k in (None, 3)]
LIMIT = 0.001 / len(CELLS)


def _table(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


TARGET = _table(0, V, V)
CHAIN = TARGET + _table(1, V, V, scale=0.7)
ROWS = torch.stack([TARGET[ANCHOR], TARGET[5], TARGET.mean(0)]) + _table(2, LENGTH, V, scale=0.7)
REDUCED = torch.tensor([7, 0, 2, 5, 3])


def _history() -> list[int]:
    """Ends with the anchor, seen once before; likely (not the likeliest) ids followed it."""
    ids = [ANCHOR]
    for rank in (1, 0, 1):
        ids.append(int(TARGET[ids[-1]].argsort(descending=True)[rank]))
    other = next(i for i in range(V) if i not in ids)
    return [*ids, other, other, ANCHOR]


HISTORY = _history()


@dataclass
class Stub:
    """A cell: its parameters, its uniforms, and proposals from the runtime's drafting code."""

    params: SamplingParams
    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1000 + self.seed)

        def uniforms(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        self.draft_u = uniforms(DRAWS, LENGTH)
        self.accept_u = uniforms(DRAWS, LENGTH)
        self.final_u = uniforms(DRAWS)
        self.rest_u = uniforms(DRAWS, LENGTH)
        self.anchor = torch.full((DRAWS,), ANCHOR)

    def propose(
        self, drafter: str, temperature: float | None = None, *, greedy: bool = False
    ) -> Proposal:
        """A proposal at the cell's temperature, or another one; greedy: a walk without noise."""
        t = self.params.temperature if temperature is None else temperature
        if greedy:
            t = 0.0
        if drafter.startswith("mtp"):
            ids = REDUCED if drafter == "mtp-reduced" else None
            table = CHAIN if ids is None else CHAIN[:, ids]
            return chained_rows(
                table[self.anchor],
                lambda tokens_b: table[tokens_b],
                LENGTH,
                ids,
                replace(self.params, temperature=t),
                None if greedy else self.draft_u,
            )
        if drafter == "dflash":
            rows = ROWS.expand(DRAWS, -1, -1)
            return independent_rows(rows, None, temperature=t, uniforms_bs=self.draft_u)
        if drafter == "dflash2":
            return self.walk(LENGTH, t)
        match = self.match(tail=drafter.endswith("tail"))
        if drafter == "lookup":
            return point_mass(torch.tensor(match[1]).expand(DRAWS, -1))
        return fuse(
            self.walk(2 if drafter.endswith("tail") else LENGTH, t),
            torch.full((DRAWS,), match[0]),
            torch.tensor(match[1]).expand(DRAWS, -1),
            match[2],
            V,
        )

    def walk(self, steps: int, temperature: float) -> Proposal:
        unary, cand = ROWS[:steps].topk(5, dim=-1)
        return selector_walk(
            self.anchor,
            cand.expand(DRAWS, -1, -1),
            unary.expand(DRAWS, -1, -1),
            _table(4, steps, 3).expand(DRAWS, -1, -1),
            _table(5, V, 3, scale=0.8),
            _table(6, V, 3, scale=0.8),
            temperature=temperature,
            uniforms_bs=self.draft_u,
        )

    def match(self, *, tail: bool) -> tuple[int, tuple[int, ...], LookupConfig]:
        """(length, tokens, config) of a real suffix match on the history."""
        strong = 5 if tail else 1
        config = LookupConfig(strong_match=strong, tail_match=1, longest_match=6, tokens=LENGTH)
        lookup = SuffixLookup(config)
        lookup.extend(HISTORY)
        found = lookup.match()
        assert found.length == 1 and list(found.tokens) == HISTORY[1:4]
        return found.length, found.tokens, config

    def laws(self) -> Tensor:
        """Processed target laws by previous token [v, v]."""
        return process(TARGET, self.params)

    def rows(self, proposal: Proposal) -> Tensor:
        """p [draws, s + 1, v]: the target's law after each drafted prefix."""
        before = torch.cat([self.anchor.unsqueeze(1), proposal.tokens_bs.clamp(min=0)], dim=1)
        return self.laws()[before]

    def verdict(self, proposal: Proposal, final_u: Tensor | None = None) -> Verdict:
        u = self.final_u if final_u is None else final_u
        s = proposal.steps
        return verify_batch(proposal, self.rows(proposal), self.accept_u[:, :s], u)

    def p_value(self, proposal: Proposal, verdict: Verdict) -> float:
        """Chi-square of the joint law of three tokens against the target's."""
        laws = self.laws()
        output = torch.zeros(DRAWS, LENGTH + 1, dtype=torch.int64)
        output[:, : proposal.steps] = proposal.tokens_bs.clamp(min=0)
        row = torch.arange(DRAWS)
        output[row, verdict.accepted_b] = verdict.token_b
        for step in range(1, LENGTH):
            fresh = draw(laws[output[:, step - 1]], self.rest_u[:, step])
            output[:, step] = torch.where(step > verdict.accepted_b, fresh, output[:, step])
        index = (output[:, 0] * V + output[:, 1]) * V + output[:, 2]
        seen = torch.bincount(index, minlength=V**LENGTH).double()
        joint = laws[ANCHOR][:, None, None] * laws[:, :, None] * laws[None]
        expected = joint.flatten() * DRAWS
        if float(seen[expected == 0].sum()) > 0:
            return 0.0
        rare = expected < 10
        observed, wanted = seen[~rare], expected[~rare]
        if float(expected[rare].sum()) > 10:
            observed = torch.cat((observed, seen[rare].sum()[None]))
            wanted = torch.cat((wanted, expected[rare].sum()[None]))
        wanted = wanted * (observed.sum() / wanted.sum())
        return float(chisquare(observed.numpy(), wanted.numpy()).pvalue)


def _stub(cell: tuple[str, float, int | None]) -> Stub:
    _, temperature, top_k = cell
    return Stub(SamplingParams(temperature=temperature, top_k=top_k), CELLS.index(cell))


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c[0]}-T{c[1]}-k{c[2]}")
def test_the_right_verifier_gives_the_targets_law(cell: tuple[str, float, int | None]) -> None:
    stub = _stub(cell)
    proposal = stub.propose(cell[0])
    verdict = stub.verdict(proposal)
    assert 0.05 < float(verdict.accepted_b.double().mean()) < LENGTH
    assert stub.p_value(proposal, verdict) > LIMIT


@pytest.mark.parametrize("drafter", ["mtp", "dflash", "dflash2"])
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_greedy_drafts_as_point_masses_keep_the_law(drafter: str, temperature: float) -> None:
    stub = _stub((drafter, temperature, None))
    proposal = stub.propose(drafter, greedy=True)
    assert proposal.q_bsk is None
    assert stub.p_value(proposal, stub.verdict(proposal)) > LIMIT


def _raw_q(stub: Stub, drafter: str) -> tuple[Proposal, Verdict]:
    """q from the logits before temperature, for tokens drawn after it."""
    proposal = stub.propose(drafter)
    _, q = as_candidates(proposal, V)
    wrong = replace(proposal, q_bsk=(q.log() * stub.params.temperature).softmax(-1))
    return wrong, stub.verdict(wrong)


def _stale_q(stub: Stub, drafter: str) -> tuple[Proposal, Verdict]:
    """Each position scored with the q of the position before it."""
    proposal = stub.propose(drafter)
    ids, q = as_candidates(proposal, V)
    dense = torch.zeros(DRAWS, proposal.steps, V, dtype=torch.float64).scatter_add_(2, ids, q)
    stale = torch.cat((dense[:, :1], dense[:, :-1]), dim=1)
    stale = (stale + 1e-9) / (stale + 1e-9).sum(-1, keepdim=True)
    wrong = replace(proposal, q_bsk=stale, cand_ids_bsk=None)
    return wrong, stub.verdict(wrong)


def _greedy_with_softmax(stub: Stub, drafter: str) -> tuple[Proposal, Verdict]:
    """An argmax draft that is scored as if it had been drawn."""
    greedy = stub.propose(drafter, greedy=True)
    rows = process(ROWS, stub.params).expand(DRAWS, -1, -1)
    wrong = replace(greedy, q_bsk=rows, cand_ids_bsk=None)
    return wrong, stub.verdict(wrong)


def _shared_noise(stub: Stub, drafter: str) -> tuple[Proposal, Verdict]:
    """The emitted token is drawn with the number that drew the rejected one."""
    proposal = stub.propose(drafter)
    first = stub.verdict(proposal)
    at = first.accepted_b.clamp(max=LENGTH - 1)
    shared = torch.where(
        first.accepted_b < LENGTH, stub.draft_u[torch.arange(DRAWS), at], stub.final_u
    )
    return proposal, stub.verdict(proposal, shared)


def _agreement_gate(stub: Stub, drafter: str) -> tuple[Proposal, Verdict]:
    """A drawn token that equals the looked-up one is stored as a point mass."""
    proposal = stub.propose(drafter)
    ids, q = as_candidates(proposal, V)
    looked = torch.tensor(stub.match(tail=True)[1])
    agrees = (proposal.tokens_bs == looked).unsqueeze(-1)
    point = (ids == proposal.tokens_bs.unsqueeze(-1)).double()
    wrong = replace(proposal, q_bsk=torch.where(agrees, point, q), cand_ids_bsk=ids)
    return wrong, stub.verdict(wrong)


Mistake = Callable[[Stub, str], tuple[Proposal, Verdict]]
MISTAKES: list[tuple[Mistake, tuple[str, float, int | None]]] = [
    (_raw_q, ("mtp", 0.6, None)),
    (_raw_q, ("mtp", 1.5, None)),
    (_raw_q, ("dflash", 0.6, 3)),
    (_raw_q, ("dflash2", 1.5, 3)),
    (_stale_q, ("mtp", 1.0, None)),
    (_stale_q, ("dflash2", 0.6, None)),
    (_greedy_with_softmax, ("dflash", 1.0, None)),
    (_greedy_with_softmax, ("dflash", 0.6, 3)),
    (_shared_noise, ("mtp", 1.0, None)),
    (_shared_noise, ("dflash2", 1.5, None)),
    (_agreement_gate, ("dflash2+lookup-tail", 1.0, None)),
    (_agreement_gate, ("dflash2+lookup-tail", 0.6, 3)),
]


@pytest.mark.parametrize(
    ("mistake", "cell"), MISTAKES, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_planted_mistakes_fail(mistake: Mistake, cell: tuple[str, float, int | None]) -> None:
    stub = _stub(cell)
    assert stub.p_value(*mistake(stub, cell[0])) < LIMIT


@pytest.mark.parametrize("cell", [("mtp", 1.0, None), ("lookup", 1.5, None)])
def test_residual_not_renormalised_fails(
    cell: tuple[str, float, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sixth mistake: the residual's own total is taken to be one."""

    def unscaled(probs: Tensor, u: Tensor) -> Tensor:
        running = probs.cumsum(-1)
        return torch.searchsorted(running, u.unsqueeze(-1), right=True).squeeze(-1).clamp(max=V - 1)

    stub = _stub(cell)
    proposal = stub.propose(cell[0])
    monkeypatch.setattr(verify, "draw", unscaled)
    assert stub.p_value(proposal, stub.verdict(proposal)) < LIMIT


def test_temperature_one_hides_a_raw_q() -> None:
    """Why a test at T = 1 alone is no test."""
    cell = ("mtp", 1.0, None)
    stub = _stub(cell)
    assert stub.p_value(*_raw_q(stub, "mtp")) > LIMIT


def test_the_verifier_refuses_a_q_that_cannot_be_right() -> None:
    q = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]], dtype=torch.float64)
    p, u = torch.full((1, 2, 4), 0.25, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    good = Proposal(tokens_bs=torch.tensor([[1]]), q_bsk=q)
    verify_batch(good, p, u, u[0])
    with pytest.raises(TrimtabError, match="temperature"):
        verify_batch(replace(good, temperature_applied=False), p, u, u[0])
    with pytest.raises(TrimtabError, match="no probability"):
        verify_batch(replace(good, tokens_bs=torch.tensor([[2]])), p, u, u[0])


def test_verify_equals_the_scalar_rule() -> None:
    """Against the loop of the rejection rule, on random p, q, supports and placeholders."""
    from tests.oracles.rejection import verify_one

    generator = torch.Generator().manual_seed(8)
    for case in range(200):
        s, k = 1 + case % 4, 1 + case % 5
        p = torch.rand(1, s + 1, V, generator=generator, dtype=torch.float64)
        p = torch.where(torch.rand(p.shape, generator=generator) < 0.2, 0.0, p) + 1e-12
        p = p / p.sum(-1, keepdim=True)
        ids = torch.stack([torch.randperm(V, generator=generator)[:k] for _ in range(s)])
        q = torch.rand(s, k, generator=generator, dtype=torch.float64) + 0.01
        q = q / q.sum(-1, keepdim=True)
        u = torch.rand(s + 1, generator=generator, dtype=torch.float64)
        tokens = [
            int(ids[i, int(torch.multinomial(q[i], 1, generator=generator))]) for i in range(s)
        ]
        if case % 7 == 0:
            tokens[-1] = -1
        proposal = Proposal(tokens_bs=torch.tensor([tokens]), q_bsk=q[None], cand_ids_bsk=ids[None])
        verdict = verify_batch(proposal, p, u[None, :s], u[s:])
        laws = [dict(zip(ids[i].tolist(), q[i].tolist(), strict=True)) for i in range(s)]
        expected = verify_one(tokens, laws, p[0].tolist(), u[:s].tolist(), float(u[s]))
        assert (int(verdict.accepted_b), int(verdict.token_b)) == expected
