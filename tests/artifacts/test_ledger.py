"""The ledger's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts.errors import TrimtabError
from artifacts.inventory import summarize
from artifacts.ledger import LedgerEntry, read_ledger, to_json, write_ledger


def entry(name: str, **values: object) -> LedgerEntry:
    base = {"method": "gptq", "bits": 4, "group_size": 128, "shape": (8, 256), "rows": 100}
    return LedgerEntry(name=name, **{**base, **values})  # type: ignore[arg-type]


def test_round_trip_sorted(tmp_path: Path) -> None:
    entries = [entry("b", damping=0.02), entry("a", method="rtn", reason="starved")]
    write_ledger(tmp_path / "l.json", entries)
    assert read_ledger(tmp_path / "l.json") == sorted(entries, key=lambda e: e.name)


def test_bad_ledgers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="method 'awq'"):
        entry("a", method="awq")
    with pytest.raises(TrimtabError, match="two entries for 'a'"):
        to_json([entry("a"), entry("a")])
    with pytest.raises(TrimtabError, match="unknown fields \\['colour'\\]"):
        LedgerEntry.from_json({**entry("a").to_json(), "colour": 1})
    with pytest.raises(TrimtabError, match="incomplete"):
        LedgerEntry.from_json({"name": "a", "shape": [1, 2]})
    (tmp_path / "l.json").write_text("{}")
    with pytest.raises(TrimtabError, match="a JSON list"):
        read_ledger(tmp_path / "l.json")


def test_c12_summary_counts_fallbacks() -> None:
    made = summarize(
        [
            entry("a", damping=0.04, damping_tries=3, output_error=0.05, rtn_output_error=0.1),
            entry("b", method="rtn", reason="3 rows for 256 inputs", rows=3),
        ]
    )
    assert made["methods"] == {"gptq": 1, "rtn": 1}
    assert made["fallbacks"] == {"b": "3 rows for 256 inputs"}
    assert made["fallback_share"] == 0.5
    assert made["damping_retries"] == 2
    assert made["mean_output_error_over_rtn"] == pytest.approx(0.5)
    assert made["least_rows"] == 100
