"""Ctrl-C without harm: it takes effect between engine steps, never inside one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupts(notify: Callable[[], None] | None = None) -> Iterator[list[int]]:
    """Hold SIGINT back until the end of the block, then pass it on to the handler before.

    Yields the signals held back so far. `notify` is called when one comes, to end a wait; it runs
    between any two instructions of the main thread, and so must not take a lock.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT) if on_main_thread else None
    caught: list[int] = []
    if previous is None:  # signals reach other threads never, foreign handlers cannot be restored
        yield caught
        return

    def hold_back(number: int, frame: object) -> None:
        caught.append(number)
        if notify is not None:
            notify()

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught:
            os.kill(os.getpid(), signal.SIGINT)
