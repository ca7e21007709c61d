"""Where the tensors of an adapter's file lie in it, from its header alone. No torch.

They are read by place, not mapped: a mapped file that is written over while it is read would end
the process.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from quire.protocol.errors import AdapterError

MAX_HEADER_BYTES = 32 << 20
MAX_DIMENSIONS = 8
MAX_TENSORS = 1 << 17
"""Each of 256 experts in 58 layers may have six."""
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Of the types that an adapter may be saved in, whether they can be used or not."""


@dataclass(frozen=True)
class TensorPlace:
    """A tensor, as its file's header describes it: contiguous and little-endian."""

    dtype: str
    """As safetensors names it: F16, BF16, F32."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """A regular file, to be read; pipes and devices are refused without waiting for them."""
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb", buffering=0) as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise AdapterError(f"{file} is not a regular file; copy the adapter again.")
            yield stream
    except OSError as error:
        raise AdapterError(f"{file} cannot be read ({error.strerror or error}).") from error


def read_exactly(stream: IO[bytes], file: Path, start: int, into: memoryview) -> None:
    """Fills `into` with what the file has from `start` on."""
    stream.seek(start)
    while len(into):
        count = stream.readinto(into)  # type: ignore[attr-defined]
        if not count:
            raise AdapterError(
                f"{file} became shorter while it was read; load the adapter when it is written "
                "completely."
            )
        into = into[count:]


def safetensors_places(file: Path) -> dict[str, TensorPlace]:
    """All tensors of a safetensors file, by name."""
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < 8:
            raise damaged(file, f"it has {size} bytes")
        head = bytearray(8)
        read_exactly(stream, file, 0, memoryview(head))
        length = int.from_bytes(head, "little")
        if length > size - 8:
            raise damaged(file, f"its header has {length} bytes, the file {size}")
        if length > MAX_HEADER_BYTES:
            raise damaged(file, f"its header has {length} bytes, more than {MAX_HEADER_BYTES}")
        text = bytearray(length)
        read_exactly(stream, file, 8, memoryview(text))
    check_count(file, max(1, text.count(b'"data_offsets"')))
    if sum(map(text.count, (b",", b"[", b"{"))) > 12 * MAX_TENSORS:
        raise damaged(file, "its header has more than tensors")  # and would take gigabytes
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"its header is no JSON: {str(error)[:80]}") from error
    if not isinstance(header, dict):
        raise damaged(file, "its header is no JSON object")
    header.pop("__metadata__", None)
    check_count(file, len(header))
    places = {name: _place(file, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if place.start != end:
            raise damaged(file, f"tensor {shown(name)} does not begin where the one before ends")
        end += place.nbytes
    if end != size:
        raise damaged(file, f"its header tells of {end} bytes, and it has {size}")
    return places


def _place(file: Path, name: str, entry: Any, first: int) -> TensorPlace:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape[:MAX_DIMENSIONS], start, end]
    except (TypeError, KeyError, ValueError) as error:
        raise damaged(file, f"tensor {shown(name)} has no type, shape and place") from error
    is_possible = len(shape) <= MAX_DIMENSIONS and all(
        type(number) is int and 0 <= number < 1 << 62 for number in numbers
    )
    if not is_possible:
        raise damaged(file, f"tensor {shown(name)} has impossible numbers")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise AdapterError(
            f"{file}: tensor {shown(name)} is of type {shown(dtype)}, and those of an adapter must "
            "be F32, F16 or BF16; save it again as one of them."
        )
    place = TensorPlace(dtype, tuple(shape), first + start, end - start)
    if place.nbytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise damaged(file, f"tensor {shown(name)} is {place} in {place.nbytes} bytes")
    return place


def check_count(file: Path, count: int) -> None:
    if not 0 < count <= MAX_TENSORS:
        raise AdapterError(
            f"{file} holds {count} tensors; an adapter has 1 to {MAX_TENSORS}. Save it again."
        )


def damaged(file: Path, reason: str) -> AdapterError:
    return AdapterError(
        f"{file} is damaged or incomplete ({reason}); copy or download the adapter again."
    )


def shown(value: object) -> str:
    """A name or value in an error, of which there may be megabytes."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
