"""The collector: one sum per shared input, rows kept once, errors that name the row's prompt."""

from __future__ import annotations

import pytest
import torch

from artifacts.errors import TrimtabError
from calibration import collector as module
from calibration.capture import _Observed
from calibration.collector import Collector

NAMES = ["p0", "p1", "p2"]


def rows(count: int, k: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("flush_rows", [1, 3, 10**6])
def test_rows_over_several_calls_and_chunks(
    monkeypatch: pytest.MonkeyPatch, flush_rows: int
) -> None:
    monkeypatch.setattr(module, "FLUSH_ROWS", flush_rows)
    sums = Collector("x.", ("q", "k", "o"), "here")
    kept = []
    for chunk in range(3):
        sequence = torch.tensor([0, 0, 1, 2, 2])
        keep = torch.tensor([True, False, True, True, False])
        sums.expect(NAMES, sequence, keep)
        x = rows(5, seed=chunk)
        for part in (x[:2], x[2:]):
            sums("q", part)
            sums("k", part)
            sums("o", part.clone())
            sums("ignored", part)
        kept.append(x[keep])
        sums.expect(NAMES, torch.tensor([1, 2]))
        x = rows(2, seed=10 + chunk)
        sums("o", x)
        kept.append(x)
        sums.flush()
    found = sums.finish()
    assert sorted(found) == ["x.k", "x.o", "x.q"]
    assert found["x.q"] is found["x.k"] is not found["x.o"]
    x = torch.cat(kept[::2]).double()
    assert found["x.q"].rows == 9 and found["x.q"].source == "here"
    torch.testing.assert_close(found["x.q"].sum_kk.double(), x.T @ x, rtol=1e-5, atol=1e-5)
    x = torch.cat(kept).double()
    assert found["x.o"].rows == 15
    torch.testing.assert_close(found["x.o"].sum_kk.double(), x.T @ x, rtol=1e-5, atol=1e-5)


def test_rows_are_copied_before_their_owner_writes_to_them() -> None:
    sums = Collector("", ("q",), "")
    x = rows(3)
    before = x.double()
    sums.expect(NAMES, torch.arange(3))
    sums("q", x)
    x.zero_()
    torch.testing.assert_close(
        sums.finish()["q"].sum_kk.double(), before.T @ before, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("bad", range(4))
def test_the_prompt_of_a_bad_row_is_named(bad: int) -> None:
    sequence, keep = torch.tensor([0, 1, 1, 2]), torch.tensor([True, False, True, True])
    x = rows(4)
    x[bad, 1] = torch.nan
    sums = Collector("mtp.", ("fc",), "")
    sums.expect(NAMES, sequence, keep)
    sums("fc", x[:1])
    sums("fc", x[1:])
    if bad == 1:  # a row that does not count
        assert sums.finish()["mtp.fc"].rows == 3
        return
    with pytest.raises(TrimtabError, match=rf"mtp\.fc: prompt {NAMES[sequence[bad]]}:"):
        sums.flush()


def test_more_rows_than_announced_and_matrices_never_reached() -> None:
    sums = Collector("", ("q", "k"), "")
    sums.expect(NAMES, torch.arange(3))
    sums("q", rows(2))
    with pytest.raises(AssertionError, match="4 rows of 3 expected"):
        sums("q", rows(2))
    with pytest.raises(TrimtabError, match="no row reached k"):
        sums.finish()
    sums = Collector("", ("q", "k"), "")
    sums.expect(NAMES, torch.arange(3))
    sums("q", rows(3))
    sums("k", rows(3, seed=1))
    shared = rows(3)
    sums.expect(NAMES, torch.arange(3))
    sums("q", shared)
    with pytest.raises(AssertionError, match="shares its input in one call and not in another"):
        sums("k", shared)


@pytest.mark.parametrize(
    ("rows_per_anchor", "calls", "expected"),
    [(1, 2, [0, 2, 0, 2]), (3, 1, [0, 0, 0, 2, 2, 2])],
)
def test_the_order_of_the_rows_of_a_round(
    rows_per_anchor: int, calls: int, expected: list[int]
) -> None:
    """Chain rows come anchor by anchor in each call, block rows block by block in one call."""
    seen: list[list[int]] = []

    class Spy(Collector):
        def expect(
            self, names: object, sequence_t: torch.Tensor, keep_t: torch.Tensor | None = None
        ) -> None:
            assert keep_t is None
            seen.append(sequence_t.tolist())

    class Nothing:
        size = 1

        def accept(self, rows_a: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(rows_a)

    observed = _Observed(Nothing(), Spy("", (), ""), NAMES, rows_per_anchor, calls)
    anchors = torch.tensor([0, 2])
    assert observed.accept(anchors, anchors, anchors[:, None]).tolist() == [0, 0]
    assert seen == [expected]
