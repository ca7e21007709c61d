"""Markers in text that comes in pieces."""

from __future__ import annotations


def overlap(text: str, *markers: str) -> int:
    """How many characters at the end of `text` may be the beginning of one of the markers."""
    return max((_overlap(text, marker) for marker in markers), default=0)


def _overlap(text: str, marker: str) -> int:
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
