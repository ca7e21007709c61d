"""`PreparationPool`: the processes that prepare requests for one API process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from quire.frontend.inputs import Prompt
from quire.protocol.codec import encode
from quire.protocol.errors import OverloadedError, RequestError
from quire.server.preparation.prepare import PreparationSettings, Prepared, PreparedKind
from quire.server.preparation.wire import (
    CONTENT,
    DONE,
    END,
    ENDED,
    ENDS,
    FORK,
    FRAME,
    HEAD,
    HEADS,
    JOB,
    MAX_TEMPLATE_S,
    ORDER,
    PIECE_BYTES,
    PROMPT_LISTS,
    PROMPTS,
    READY,
    TOO_MUCH_MEMORY,
    Content,
    End,
    Head,
    Refusal,
    from_head,
)

logger = logging.getLogger("quire.server")

LARGE_BYTES = 1 << 18
"""A body from this size on gets a fork of its own, and its memory goes with that."""
MAX_LARGE = 2
MAX_SMALL = 4
"""Forks at a time, by the size of bodies: the large ones must not keep the others waiting."""
MAX_SAID = 1000
MAX_END_S = 1.0


class ForkEnded(Exception):
    """A fork ended before its answer did."""


@dataclass(eq=False)
class Fork:
    """One process, which does one job at a time."""

    number: int
    socket: socket.socket
    _received: bytearray = field(default_factory=bytearray)

    async def run(
        self, kind: PreparedKind, body: list[bytes], size: int, is_large: bool
    ) -> tuple[Any, End]:
        path = kind.path.encode()
        loop = asyncio.get_running_loop()
        try:
            order = JOB.pack(len(path), size, is_large) + path
            if not is_large:
                await loop.sock_sendall(self.socket, order + b"".join(body))
            else:
                await loop.sock_sendall(self.socket, order)
                for piece in body:
                    await loop.sock_sendall(self.socket, piece)
        except OSError:
            raise ForkEnded from None
        head: Any = None
        prompts: list[Prompt] = []
        content: list[bytes] = []
        while True:
            sort, part = await self._frame()
            if sort == HEAD:
                head = HEADS.decode(part)
            elif sort == PROMPTS:
                prompts += PROMPT_LISTS.decode(part)
            elif sort == CONTENT:
                content.append(part)
            elif sort == DONE:
                return _result(head, kind, prompts, content), ENDS.decode(part)

    async def _frame(self) -> tuple[int, bytes]:
        sort, size = FRAME.unpack(await self._take(FRAME.size))
        return sort, await self._take(size)

    async def _take(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        while len(self._received) < size:
            try:
                part = await loop.sock_recv(self.socket, PIECE_BYTES)
            except OSError:
                part = b""
            if not part:
                raise ForkEnded
            self._received += part
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken


def _result(head: Any, kind: PreparedKind, prompts: list[Prompt], content: list[bytes]) -> Any:
    if isinstance(head, Refusal):
        return head.error()
    if isinstance(head, Content):
        return b"".join(content)
    assert isinstance(head, Head) and len(prompts) == head.num_prompts
    return from_head(head, kind.body, prompts)


class ForkServer:
    """The process that forks, and its forks. Ends when it is closed or let go."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quire.server.preparation.process"],
                stdin=theirs.fileno(),
                start_new_session=True,  # Ctrl-C is the supervisor's
            )
        self._control.setblocking(False)
        self._numbers = itertools.count()
        self._endings: dict[int, asyncio.Future[tuple[int, str]]] = {}
        self._following: asyncio.Task[None] | None = None
        self.is_alive, self.is_told = True, False
        self.loaded = asyncio.Event()
        """It takes orders; before that they could fill what it has not read yet."""

    def tell(self, settings: bytes) -> None:
        """The first thing that it is told; a client that leaves meanwhile does not cut it off."""
        self.is_told = True
        self._following = asyncio.create_task(self._follow(settings))

    def fork(self) -> Fork:
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                order = ORDER.pack(FORK, number)
                socket.send_fds(self._control, [order], [theirs.fileno()])
            except OSError:
                self.is_alive = False
        return Fork(number, ours)

    async def end(self, fork: Fork) -> tuple[int, str]:
        """Its exit status, and what it was doing that has a limit."""
        fork.socket.close()
        if not self.is_alive:
            return -signal.SIGKILL, ""
        ended = self._endings[fork.number] = asyncio.get_running_loop().create_future()
        try:
            self._control.send(ORDER.pack(END, fork.number))
            return await ended
        except OSError:
            return -signal.SIGKILL, ""
        finally:
            self._endings.pop(fork.number, None)

    async def _follow(self, settings: bytes) -> None:
        try:
            with contextlib.suppress(OSError):  # it has ended
                await self._send(settings)
                await self._receive()
        finally:  # also when it is closed
            self.is_alive = False
            self.loaded.set()
            for ending in self._endings.values():
                if not ending.done():
                    ending.set_result((-signal.SIGKILL, ""))

    async def _send(self, settings: bytes) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._control, FRAME.pack(0, len(settings)))
        for start in range(0, len(settings), PIECE_BYTES):
            await loop.sock_sendall(self._control, settings[start : start + PIECE_BYTES])

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        data = bytearray()
        while part := await loop.sock_recv(self._control, 1 << 16):
            data += part
            while len(data) >= ENDED.size:
                number, status, size = ENDED.unpack(data[: ENDED.size])
                if len(data) < ENDED.size + size:
                    break
                label = bytes(data[ENDED.size : ENDED.size + size]).decode("utf-8", "replace")
                del data[: ENDED.size + size]
                if number == READY:
                    self.loaded.set()
                elif (ending := self._endings.get(number)) and not ending.done():
                    ending.set_result((status, label))

    def close(self) -> None:
        self.is_alive = False
        if self._following is not None:
            self._following.cancel()
        self._control.close()  # at which it ends its forks and itself, unless it still loads
        try:
            self._process.wait(MAX_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class PreparationPool:
    """Starts processes when they are needed first."""

    def __init__(self, settings: PreparationSettings, server: ForkServer | None = None) -> None:
        self._settings = encode(settings)
        self._server = server
        self._idle: list[Fork] = []
        self._small = asyncio.Semaphore(MAX_SMALL)
        self._large = asyncio.Semaphore(MAX_LARGE)
        self._ending: set[asyncio.Task[Any]] = set()
        self._said: set[str] = set()

    def start(self) -> ForkServer:
        """The process that forks; another one if it is gone."""
        if self._server is not None and not self._server.is_alive:
            logger.error("the process that prepares requests ended; it is started again")
            self.close()
        if self._server is None:
            self._server = ForkServer()
        if not self._server.is_told:
            self._server.tell(self._settings)
        return self._server

    def close(self) -> None:
        for fork in self._idle:
            fork.socket.close()
        self._idle = []
        if self._server is not None:
            self._server.close()
            self._server = None

    async def run(self, kind: PreparedKind, body: list[bytes]) -> Prepared | bytes:
        """What the route makes of a body, which is given in the pieces that it came in. Cancelling
        it ends the process that works on it."""
        size = sum(map(len, body))
        is_large = size >= LARGE_BYTES
        places = self._large if is_large else self._small
        server, fork = await self._take_fork(places, is_large)
        try:
            made, end = await fork.run(kind, body, size, is_large)
        except ForkEnded:
            raise _failure(*await asyncio.shield(self._end(server, fork, places))) from None
        except BaseException:
            self._end(server, fork, places)
            raise
        if is_large or end.is_spent or server is not self._server:
            self._end(server, fork, places)
        else:
            self._idle.append(fork)
            places.release()
        for one in end.logs:
            self._say(one.level, one.text)
        if isinstance(made, Exception):
            raise made
        return made

    async def _take_fork(
        self, places: asyncio.Semaphore, is_large: bool
    ) -> tuple[ForkServer, Fork]:
        await places.acquire()
        try:
            server = self.start()
            await server.loaded.wait()
            return server, self._idle.pop() if self._idle and not is_large else server.fork()
        except BaseException:
            places.release()
            raise

    def _end(
        self, server: ForkServer, fork: Fork, places: asyncio.Semaphore
    ) -> asyncio.Task[tuple[int, str]]:
        """Its place is free once it is gone: clients that leave at once, one after the other, must
        not make more forks than there may be, nor more orders than the socket holds."""
        task = asyncio.create_task(server.end(fork))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.add_done_callback(lambda _: places.release())
        return task

    def _say(self, level: int, text: str) -> None:
        if text not in self._said and len(self._said) < MAX_SAID:
            self._said.add(text)
            logger.log(level, "%s", text)


def _failure(status: int, what: str) -> Exception:
    """Why a fork ended before its answer."""
    if status in (-signal.SIGPROF, -signal.SIGALRM):
        return RequestError(
            f"{what} takes more than {MAX_TEMPLATE_S} s for these messages; use a simpler one."
        )
    if status == -signal.SIGABRT:  # the tokenizer found no memory
        return RequestError(TOO_MUCH_MEMORY)
    return OverloadedError(
        "the process that prepared this request was ended, as the system does when memory runs "
        "out; try again."
    )
