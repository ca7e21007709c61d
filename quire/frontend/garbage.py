"""Python's garbage collector, kept out of the way of a busy engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Put off collections of the oldest objects until the end of the block.

    One takes 0.1 s where torch is loaded, and the device would wait for it; many requests at once
    are reason enough for Python to start one. Young objects are collected as ever.
    """
    first, second, third = gc.get_threshold()
    gc.set_threshold(first, second, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(first, second, third)
