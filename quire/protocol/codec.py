"""msgpack for what crosses a socket: dataclasses by their types, numpy arrays as raw bytes. For
pipes, lines of JSON."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from quire.protocol.errors import RequestError

T = TypeVar("T")

DTYPES = tuple(
    np.dtype(name) for name in ("bool", "int32", "int64", "float32", "float64", "uint8", "int8")
)
"""An array's type crosses as its place in this list, so that no peer can name another."""


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return DTYPES.index(value.dtype), value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _array(kind: type, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is not np.ndarray:
        raise TypeError(f"{kind} cannot be received from another process")
    code, shape, data = value
    if code not in range(len(DTYPES)):
        raise ValueError(f"an array has the unknown type {code!r:.20}")
    if not data:
        return np.empty(0, DTYPES[code]).reshape(shape)  # a shape of anything is refused
    # A copy: what is received may be kept and changed, the message may not.
    return np.frombuffer(data, DTYPES[code]).reshape(shape).copy()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(message: object) -> bytes:
    try:
        return _ENCODER.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        # Python's integers and strings can hold what no other process can be told.
        raise RequestError(
            f"a value of the request cannot be sent to the engine: {error}."
        ) from None
    except RecursionError:
        raise RequestError("a value of the request is nested too deeply.") from None


class Decoder(Generic[T]):
    """Reads messages of one type, or of a union of tagged ones; anything else is an error."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_array)

    def decode(self, data: bytes | memoryview) -> T:
        try:
            message: T = self._decoder.decode(data)
        except UnicodeDecodeError as error:
            raise msgspec.DecodeError(f"a text is not UTF-8: {error}") from None
        except RecursionError:
            raise msgspec.DecodeError("a value is nested too deeply") from None
        return message


def convert(value: Any, kind: type[T]) -> T:
    """A value that was decoded as one of any type."""
    return msgspec.convert(value, kind, dec_hook=_array)


def line(message: Any) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def read_line(data: bytes, kind: Any) -> Any:
    return msgspec.json.decode(data, type=kind)
