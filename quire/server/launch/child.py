"""`Child`: a process of the server, spoken to in lines of JSON (`protocol/messages.py`), and how
one is noticed that hangs instead of dying."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from quire.protocol.codec import line, read_line

MAX_LINE_BYTES = 1 << 24
NUM_LOOKS = 8
"""A silence is made of so many shorter ones: a supervisor that was stopped itself for a while then
looks again before it blames the other."""


class Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, module: str, pass_fds: Sequence[int] = ()) -> Child:
        """Start a module. In a session of its own, so that Ctrl-C reaches the supervisor alone."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=pass_fds,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(line(message))

    async def reports(self, kind: Any) -> AsyncIterator[Any]:
        """What the child says, until it ends."""
        assert self._process.stdout is not None
        async for data in self._process.stdout:
            yield read_line(data, kind)

    async def wait(self) -> int:
        return await self._process.wait()

    def end(self) -> None:
        """Close its standard input, at which it ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


async def until_silent(ask: Callable[[], Awaitable[Any]], timeout_s: float) -> None:
    """Return when what `ask` awaits has not come for `timeout_s`; never if that is 0. An engine
    answers between two steps, an API process between two turns of its loop, so that a step or a
    turn which never ends is noticed too."""
    if not timeout_s:
        await asyncio.Event().wait()
    while True:
        await asyncio.sleep(timeout_s / NUM_LOOKS)
        if not await _answers(ask, timeout_s):
            return


async def _answers(ask: Callable[[], Awaitable[Any]], timeout_s: float) -> bool:
    answer = asyncio.ensure_future(ask())
    try:
        for _ in range(NUM_LOOKS):
            await asyncio.wait({answer}, timeout=timeout_s / NUM_LOOKS)
            if answer.done():
                return True
        return False
    finally:
        answer.cancel()
