"""Python's garbage collector, kept out of the way of a busy engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

NEVER = 1 << 30

_lock = Lock()
_num_blocks = 0
_usual = NEVER


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Put off collections of the oldest objects until the end of the block, or of all blocks where
    engines in several threads overlap.

    One takes 0.1 s where torch is loaded, and the device would wait for it; many requests at once
    are reason enough for Python to start one. Young objects are collected as ever.
    """
    global _num_blocks, _usual
    with _lock:
        first, second, third = gc.get_threshold()
        if _num_blocks == 0:
            _usual = third
            gc.set_threshold(first, second, NEVER)
        _num_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _num_blocks -= 1
            if _num_blocks == 0:
                gc.set_threshold(*gc.get_threshold()[:2], _usual)
