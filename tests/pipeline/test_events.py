"""Bars on a terminal, plain lines elsewhere, and the environment that is resolved without torch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from artifacts.errors import TrimtabError
from pipeline import environment, events
from pipeline.events import EventLog, View, duration, read_log, size
from pipeline.runner import PeakMemory, Runner
from pipeline.stage import BaseStage, StageContext
from tests.pipeline.dummies import recipe


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(view: View) -> None:
    view.stage = "traffic"
    with view.task("replies", 4, "prompts") as task:
        for _ in range(4):
            task.advance()
        view.say("half of [bold]this[/bold] is markup-looking text")
    view.close()


def test_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    work(View(stream=stream))
    shown = stream.getvalue()
    assert "traffic replies" in shown
    assert "[bold]this[/bold]" in shown


def test_a_pipe_gets_lines_with_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "INTERVAL_S", 0.0)
    stream = io.StringIO()
    with EventLog(tmp_path) as log:
        work(View(log, stream))
    lines = stream.getvalue().splitlines()
    assert lines[1].startswith("  replies 2/4 prompts, 0.0 s, 0.0 s left")
    progress = [e for e in read_log(log.path) if e["event"] == "progress"]
    assert [e["done"] for e in progress][:4] == [1, 2, 3, 4]
    assert progress[0]["stage"] == "traffic"


def test_a_pipe_gets_no_more_than_a_line_a_second() -> None:
    stream = io.StringIO()
    view = View(stream=stream)
    with view.task("quick", 10_000) as task:
        for i in range(10_000):
            task(i)
    assert len(stream.getvalue().splitlines()) <= 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7801, "2 h 10 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes() -> None:
    assert [size(n) for n in (0, 999, 1280, 3.85e9, 5e13)] == [
        "0 B",
        "999 B",
        "1.28 kB",
        "3.85 GB",
        "50 TB",
    ]


def test_automatic_choices_come_with_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = recipe(tmp_path).model_copy(update={"device": "auto", "threads": None})
    monkeypatch.setattr(environment, "_cards", lambda: (0, "no CUDA driver"))
    found, reasons = environment.resolve(auto)
    assert (found.device, found.dtype) == ("cpu", "float32")
    assert reasons[0] == "device: cpu (no CUDA driver)"
    assert reasons[2].startswith("threads: ")
    monkeypatch.setattr(environment, "_cards", lambda: (2, "2 CUDA card(s)"))
    found, reasons = environment.resolve(auto)
    assert (found.device, found.dtype) == ("cuda", "bfloat16")


def test_a_stage_that_computes_gets_its_threads_and_dtype(tmp_path: Path) -> None:
    import torch

    class Computing(BaseStage):
        name = "computing"

        def run(self, ctx: StageContext) -> dict[str, Any]:
            (ctx.out / "x.bin").write_bytes(b"x")
            return {"threads": torch.get_num_threads(), "dtype": str(ctx.dtype)}

    before = torch.get_num_threads()
    try:
        result = Runner(recipe(tmp_path), tmp_path / "work", {"computing": Computing()}).run()
    finally:
        torch.set_num_threads(before)
    entry = result.entries["computing"]
    assert entry.summary == {"threads": 1, "dtype": "torch.float32"}
    assert set(entry.ingredients) >= {"versions", "environment", "code"}


@pytest.mark.skipif("environment._cards()[0] > 0")
def test_cuda_without_a_card_is_refused(tmp_path: Path) -> None:
    class Computing(BaseStage):
        name = "computing"

    asked = recipe(tmp_path).model_copy(update={"device": "cuda"})
    with pytest.raises(TrimtabError, match=r"device: cuda, but torch .* finds no card"):
        Runner(asked, tmp_path / "work", {"computing": Computing()}).run()


def test_peak_memory_counts_from_the_stages_start() -> None:
    block = bytearray(64 << 20)
    del block
    first = PeakMemory()
    low = first.read()
    block = bytearray(64 << 20)
    high = first.read()
    assert high["peak_rss_bytes"] >= low["peak_rss_bytes"]
    if high["peak_rss_scope"] == "stage":
        assert high["peak_rss_bytes"] - low["peak_rss_bytes"] > 48 << 20
    del block
