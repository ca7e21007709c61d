"""Finds an output that only repeats itself."""

from __future__ import annotations

from quire.protocol.sampling import RepetitionDetectionParams


def repeats(token_ids: list[int], params: RepetitionDetectionParams) -> bool:
    """Whether the tail is one pattern of an allowed size, `min_count` times in a row."""
    for size in range(params.min_pattern_size, params.max_pattern_size + 1):
        span = size * params.min_count
        if span > len(token_ids):
            return False
        if token_ids[-1] != token_ids[-1 - size]:
            continue
        tail = token_ids[-span:]
        if tail == tail[:size] * params.min_count:
            return True
    return False
