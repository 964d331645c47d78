"""Suffix match by trying every earlier place and every length."""

from __future__ import annotations


def longest_match(
    history: list[int], shortest: int, longest: int, count: int
) -> tuple[int, tuple[int, ...]]:
    """(length, continuation) of the longest suffix seen earlier, the most recent of equals."""
    n = len(history)
    for length in range(min(longest, n - 1), shortest - 1, -1):
        suffix = history[n - length :]
        for end in range(n - 1, length - 1, -1):
            if history[end - length : end] == suffix:
                text = list(history)
                while len(text) < end + count:
                    text.append(text[len(text) - (n - end)])
                return length, tuple(text[end : end + count])
    return 0, ()
