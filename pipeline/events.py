"""What a run tells: an event log for machines, bars or plain lines for people.

Does: append one JSON object a line to `runs/ID.jsonl`, flushed at once; show rich bars with the
time left on a terminal and at most one plain line a second elsewhere; keep access tokens out of
both.
Does not: decide anything; losing the log loses no result.

Invariant: everything shown also stands in the log (bars at the rate of the plain lines).
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from pipeline.redaction import redact

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

INTERVAL_S = 1.0


class EventLog:
    """The JSON lines file of one run; a context manager that closes it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.id = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{os.getpid()}"
        self.path = folder / f"{self.id}.jsonl"
        self._stream = self.path.open("x", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        """One line with the time, the event's name and its values."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event}
        text = json.dumps({**line, **values}, ensure_ascii=False, default=str)
        self._stream.write(redact(text) + "\n")
        self._stream.flush()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The events of a log; a last line cut off by a kill is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            break
    return events


class View:
    """Lines and bars for people, on `stream` (standard error by default), and the same in the log.

    Attributes:
        stage: name of the stage at work, shown before each bar and line.
    """

    def __init__(self, log: EventLog | None = None, stream: IO[str] | None = None) -> None:
        self._log = log
        self._stream = stream or sys.stderr
        self.stage = ""
        self.fancy = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._bars: Bars | None = None

    def say(self, text: str) -> None:
        """One line."""
        text = redact(text)
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)
        self.record("line", text=text)

    def record(self, event: str, **values: Any) -> None:
        """An event for the log only."""
        if self._log is not None:
            self._log.write(event, **({"stage": self.stage} if self.stage else {}), **values)

    def task(self, label: str, total: int | None = None, unit: str = "") -> Bar:
        """A bar, to be used as a context manager."""
        return Bar(self, label, total, unit)

    def bars(self) -> Bars:
        """The running rich display of a terminal."""
        if self._bars is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}", markup=False),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bars.start()
        return self._bars

    def close(self) -> None:
        """Take the bars off the terminal."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


class Bar:
    """One task's progress: on a terminal a bar, elsewhere a line when a second has passed."""

    def __init__(self, view: View, label: str, total: int | None, unit: str) -> None:
        self._view, self._label, self._total, self._unit = view, label, total, unit
        self._done = 0
        self._start = self._last = time.monotonic()
        self._id: Any = None

    def __enter__(self) -> Bar:
        self._start = self._last = time.monotonic()
        if self._view.fancy:
            name = f"{self._view.stage} {self._label}".strip()
            self._id = self._view.bars().add_task(name, total=self._total, unit=self._unit)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._id is not None:
            self._view.bars().remove_task(self._id)
        if kind is None and time.monotonic() - self._start >= INTERVAL_S:
            self._show()

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self(self._done + count)

    def __call__(self, done: int, total: int | None = None) -> None:
        """So many are done, of `total` if it is known only now."""
        self._done = done
        self._total = total if total is not None else self._total
        if self._id is not None:
            self._view.bars().update(self._id, completed=done, total=self._total)
        if time.monotonic() - self._last >= INTERVAL_S:
            self._show()

    def _show(self) -> None:
        now = time.monotonic()
        self._last, elapsed = now, now - self._start
        left = None
        if self._total and self._done:
            left = elapsed * (self._total - self._done) / self._done
        if self._id is None and not self._view.fancy:
            of = f"/{self._total}" if self._total is not None else ""
            tail = f", {duration(left)} left" if left is not None else ""
            text = f"  {self._label} {self._done}{of} {self._unit}".rstrip()
            print(f"{text}, {duration(elapsed)}{tail}", file=self._view._stream, flush=True)
        self._view.record(
            "progress",
            label=self._label,
            done=self._done,
            total=self._total,
            unit=self._unit,
            elapsed_s=round(elapsed, 1),
            left_s=None if left is None else round(left, 1),
        )


def duration(seconds: float) -> str:
    """A duration for people: 0.4 s, 12 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(count: float) -> str:
    """Bytes for people, in powers of ten: 512 B, 3.8 MB, 1.28 GB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
