"""The two ways in which a run may end badly without being a bug.

`TrimtabError` is for whatever the user can cause and mend: the command line prints its message and
hint, without a traceback, and exits 2. `GateFailed` says that a build is complete but not good
enough: exit 1. Everything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class TrimtabError(Exception):
    """A user's input cannot be used.

    Args:
        message: what happened, with the name and the value, and the rule that was broken.
        hint: the next thing to do, printed on a line of its own.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.hint}" if self.hint else self.message


class GateFailed(TrimtabError):
    """A gate's figure is on the wrong side of its threshold; the build stays, unvalidated."""

    exit_code = 1
