"""Messages between the API processes and the engine."""

from __future__ import annotations

import contextlib
import warnings

import msgspec

from quire.protocol.codec import Decoder
from quire.protocol.messages import FromEngine, ToEngine
from tests.fuzz.target import Target


class Codec(Target):
    """What cannot be read is one kind of error, which both sides expect."""

    name = "codec"
    tokens = (
        b"AddRequest",
        b"AbortRequest",
        b"Command",
        b"Outputs",
        b"Reply",
        b"\xa4type",
        b"\xc0",
    )

    def __init__(self) -> None:
        self._decoders: list[Decoder[object]] = [Decoder(ToEngine), Decoder(FromEngine)]

    def check(self, data: bytes) -> None:
        for decoder in self._decoders:
            with contextlib.suppress(msgspec.MsgspecError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                decoder.decode(data)
