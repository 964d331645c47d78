"""Suffix lookup against a brute-force search, and what `fuse` may and may not do."""

from __future__ import annotations

import pytest
import torch

from artifacts.errors import TrimtabError
from artifacts.runtime.lookup import LookupConfig, Match, SuffixLookup, fuse
from artifacts.runtime.proposal import Proposal
from tests.oracles.lookup import longest_match

CONFIG = LookupConfig(strong_match=4, tail_match=2, longest_match=6, tokens=5)


def test_match_equals_brute_force() -> None:
    generator = torch.Generator().manual_seed(2)
    for trial in range(60):
        lookup = SuffixLookup(CONFIG)
        history: list[int] = []
        for _ in range(30):
            size = int(torch.randint(1, 4, (1,), generator=generator))
            new = torch.randint(0, 2 + trial % 3, (size,), generator=generator).tolist()
            history += new
            lookup.extend(new)
            expected = longest_match(
                history, CONFIG.tail_match, CONFIG.longest_match, CONFIG.tokens
            )
            assert lookup.match() == Match(*expected)


def test_periodic_text_goes_on() -> None:
    lookup = SuffixLookup(CONFIG)
    lookup.extend([9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert lookup.match() == Match(5, (3, 1, 2, 3, 1))


def test_config_is_checked() -> None:
    with pytest.raises(TrimtabError, match="tail_match"):
        LookupConfig(strong_match=2, tail_match=3)


def _draft() -> Proposal:
    ids = torch.tensor([[[1, 2], [3, 4]]]).expand(4, -1, -1)
    q = torch.tensor([[[0.7, 0.3], [0.6, 0.4]]], dtype=torch.float64).expand(4, -1, -1)
    return Proposal(
        tokens_bs=torch.tensor([[1, 3], [1, 3], [1, 4], [1, 3]]), q_bsk=q, cand_ids_bsk=ids
    )


def test_fuse_by_request() -> None:
    """Strong match, agreeing weak match, disagreeing weak match, no match."""
    looked = torch.tensor([[1, 3, 7], [1, 3, 7], [1, 3, 7], [-1, -1, -1]])
    out = fuse(_draft(), torch.tensor([4, 2, 2, 0]), looked, CONFIG, 8)
    assert out.tokens_bs.tolist() == [[1, 3, 7], [1, 3, 7], [1, 4, -1], [1, 3, -1]]
    assert out.q_bsk is not None and out.cand_ids_bsk is not None
    q, ids = out.q_bsk, out.cand_ids_bsk
    assert q[0].tolist() == [[1, 0], [1, 0], [1, 0]]
    assert ids[0, :, 0].tolist() == [1, 3, 7]
    for row in (1, 2, 3):
        assert torch.equal(q[row, :2], _draft().q_bsk[row])
        assert torch.equal(ids[row, :2], _draft().cand_ids_bsk[row])
    assert q[1, 2].tolist() == [1, 0] and int(ids[1, 2, 0]) == 7
    assert q[2, 2].sum() == q[3, 2].sum() == 0


def test_head_law_never_depends_on_the_draw() -> None:
    """For one match, all possible draws leave the same q stored at the drafter's positions."""
    looked = torch.tensor([[1, 3, 7]]).expand(4, -1)
    for length in (0, 2, 4):
        out = fuse(_draft(), torch.full((4,), length), looked, CONFIG, 8)
        assert out.q_bsk is not None
        for row in range(1, 4):
            assert torch.equal(out.q_bsk[0, :2], out.q_bsk[row, :2])


def test_greedy_stays_a_point_mass_and_short_matches_are_not_padded() -> None:
    greedy = Proposal(tokens_bs=torch.tensor([[1, 3]]))
    looked = torch.tensor([[5, -1, -1]])
    out = fuse(greedy, torch.tensor([4]), looked, CONFIG, 8)
    assert out.q_bsk is None and out.tokens_bs.tolist() == [[5, -1, -1]]
