"""`SocketEngineClient`: an engine in another process, over a local ZeroMQ socket."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any, TypeVar

import msgspec
import zmq

from quire.frontend.engine_client import EngineListener
from quire.protocol.codec import Decoder, encode
from quire.protocol.errors import EngineDeadError
from quire.protocol.messages import (
    AbortRequest,
    AddRequest,
    Command,
    FromEngine,
    Outputs,
    Reply,
    client_identity,
)
from quire.protocol.output import StepOutput
from quire.protocol.request import NewRequest

T = TypeVar("T")


class SocketEngineClient:
    """One client of an engine process. Engines may come and go: `connect` to a new one after
    `disconnect` from the last. All methods belong to one event loop."""

    def __init__(self, client_index: int) -> None:
        self.client_index = client_index
        self._death: str | None = "the engine is starting"
        self._listener: EngineListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._decoder: Decoder[FromEngine] = Decoder(FromEngine)
        self._call_numbers = count()
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}

    @property
    def death(self) -> str | None:
        return self._death

    def listen(
        self, listener: EngineListener, loop: asyncio.AbstractEventLoop, index: int = 0
    ) -> None:
        assert index == 0, "a client of another process has one event loop"
        self._listener = listener

    def connect(self, address: str) -> None:
        """Must run on the event loop that all calls come from."""
        assert self._socket is None, "disconnect first"
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = 0
        socket.setsockopt(zmq.ROUTING_ID, client_identity(self.client_index))
        socket.connect(address)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.FD, self._read)
        self._socket, self._death = socket, None

    def disconnect(self, reason: str) -> None:
        """The engine is gone: every call and every request fails with the reason."""
        self._close(reason)
        if self._listener is not None:
            self._listener.engine_died(reason)

    async def add(self, request: NewRequest) -> None:
        call = self._open_call()
        await self._reply(call, AddRequest(call, request))

    def abort(self, request_id: str, reason: str = "abort", key: int | None = None) -> None:
        if self._socket is not None:
            self._send(AbortRequest(request_id, reason, key))

    async def command(self, name: str, reply: type[T], /, **arguments: Any) -> T:
        call = self._open_call()
        raw = await self._reply(call, Command(call, name, arguments))
        return Decoder[T](reply).decode(bytes(raw))

    def shutdown(self) -> None:
        """Leave the engine; it goes on for its other clients."""
        self._close("this client was shut down")
        self._context.destroy(linger=0)

    # --- inside -----------------------------------------------------------------------------------

    def _open_call(self) -> int:
        if self._socket is None:
            raise EngineDeadError(f"the engine has stopped: {self._death}")
        call = next(self._call_numbers)
        self._calls[call] = asyncio.get_running_loop().create_future()
        return call

    async def _reply(self, call: int, message: msgspec.Struct) -> msgspec.Raw:
        self._send(message)
        try:
            return await self._calls[call]
        finally:
            del self._calls[call]

    def _send(self, message: msgspec.Struct) -> None:
        assert self._socket is not None and self._loop is not None
        self._socket.send(encode(message), zmq.NOBLOCK)
        # The socket's descriptor tells of a change once only, and sending may have used that up.
        if self._socket.poll(0, zmq.POLLIN):
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Take in all that has come before anyone is told: readers that fall behind then get
        several tokens at once."""
        while self._socket is not None:
            try:
                message = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, Outputs):
                self._death = message.death or self._death
                self._tell(message.output)
            else:
                self._settle(message)

    def _tell(self, output: StepOutput) -> None:
        if self._listener is not None:
            self._listener.receive(output)

    def _settle(self, reply: Reply) -> None:
        future = self._calls.get(reply.call)
        if future is None or future.done():
            return  # the caller has gone
        if reply.error is not None:
            future.set_exception(reply.error.to_error())
        else:
            future.set_result(reply.value)

    def _close(self, reason: str) -> None:
        self._death = reason
        if self._socket is None:
            return
        assert self._loop is not None
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()
        self._socket = None
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(f"the engine has stopped: {reason}"))
