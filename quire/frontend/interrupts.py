"""Ctrl-C without harm: it takes effect between engine steps, never inside one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the end of the block, then pass it on to whoever handled it before."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT) if on_main_thread else None
    if previous is None:  # signals reach other threads never, foreign handlers cannot be restored
        yield
        return
    caught: list[object] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught:
            os.kill(os.getpid(), signal.SIGINT)
