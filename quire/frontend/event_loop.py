"""`run_on_event_loop`: the one place that picks the event loop for HTTP, served or asked."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_on_event_loop(work: Coroutine[Any, Any, T]) -> T:
    """On uvloop where it is installed, else on asyncio's own loop."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(work)
    return uvloop.run(work)
