"""Problems and notes found before any work: collected, not raised one by one.

Does: hold them in the order found, without repeats, and turn them into one error. Does not: find
them (see `checks_*` and the stages' own `check`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from artifacts.errors import TrimtabError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        where: the recipe's key or the file concerned.
        text: what is wrong, with the value and the rule.
        hint: what to do about it.
    """

    where: str
    text: str
    hint: str = ""

    def line(self) -> str:
        """On one line."""
        line = f"{self.where}: {self.text}" + (f" ({self.hint})" if self.hint else "")
        return " ".join(line.split())


@dataclass
class Problems:
    """All that was found: `found` stops a run, `notes` do not."""

    found: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)

    def add(self, where: str, text: str, hint: str = "") -> None:
        """A problem: the run would fail, or end in something broken."""
        problem = Problem(where, text, hint)
        if problem not in self.found:
            self.found.append(problem)

    def note(self, where: str, text: str, hint: str = "") -> None:
        """Worth knowing, and no reason to stop."""
        note = Problem(where, text, hint)
        if note not in self.notes:
            self.notes.append(note)

    def add_error(self, where: str, error: TrimtabError) -> None:
        """A problem that some function raised."""
        self.add(where, error.message, error.hint)

    def raise_if_any(self) -> None:
        """Raises `TrimtabError` with one line a problem."""
        if self.found:
            raise TrimtabError("\n".join(problem.line() for problem in self.found))
