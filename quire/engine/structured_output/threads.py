"""Threads on which llguidance compiles. It follows rules and references by recursion, and a stack
that overflows ends the process: theirs is as large as the longest form needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 1 << 30
"""Of address space; memory is taken as far as a form goes down. A form of 1 MiB needs 400 MB."""

_lock = threading.Lock()


def submit(pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: object) -> Future[T]:
    """As `pool.submit`; the thread that it may start gets the large stack."""
    with _lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            return pool.submit(function, *arguments)
        finally:
            threading.stack_size(before)
