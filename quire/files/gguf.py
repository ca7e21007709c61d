"""Reads the header of a GGUF file: metadata and where each tensor lies. Memory-mapped, no torch.

Arrays of strings (a tokenizer's vocabulary and merges) are only stepped over while the header is
parsed; they are decoded when asked for.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from quire.protocol.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
# Smallest entries: key length, type, a byte; and name length, rank, one size, type, offset.
MIN_ENTRY_BYTES = 13
MIN_TENSOR_BYTES = 32

# ggml type number -> (name, elements per block, bytes per block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

LOADABLE_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K",
    "MXFP4",
)  # fmt: skip
"""Tensor types that `quire.loading.gguf` can turn into numbers."""

STRING, ARRAY, BOOL = 8, 9, 7
SCALAR_FORMATS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    BOOL: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
SCALARS = {number: np.dtype(code) for number, code in SCALAR_FORMATS.items()}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies in its file."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as torch counts (GGUF itself counts the other way round)."""
    type: str
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class GGUFMetadata(Mapping[str, Any]):
    """Metadata by key: numbers, strings, numpy arrays of numbers, lists of strings."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if callable(value):
            value = self._values[key] = value()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


class GGUFFile:
    """A GGUF file, mapped into memory. Opening it checks the header against the file's size."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._buffer = _map_file(self.path)
        cursor = _Cursor(self.path, self._buffer)
        num_tensors, num_entries = self._read_counts(cursor)
        values: dict[str, Any] = {}
        for _ in range(num_entries):
            key = cursor.string()
            values[key] = cursor.value(key)
        self.metadata = GGUFMetadata(values)
        self.tensors = self._read_tensors(cursor, num_tensors)

    def data(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor: a read-only view of the mapped file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._buffer, np.uint8, tensor.nbytes, tensor.offset)

    def _read_counts(self, cursor: _Cursor) -> tuple[int, int]:
        magic = cursor.take(4)
        if magic != MAGIC:
            raise ModelError(
                f"{self.path} is not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}; "
                "check the path, or download the file again."
            )
        version = cursor.u32()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "is big-endian" if swapped in VERSIONS else f"has GGUF version {version}"
            raise ModelError(
                f"{self.path} {what}; Quire reads little-endian GGUF versions "
                f"{' and '.join(map(str, VERSIONS))}. Convert the model again with a current "
                "llama.cpp."
            )
        num_tensors, num_entries = cursor.u64(), cursor.u64()
        cursor.expect_room(num_tensors * MIN_TENSOR_BYTES, f"{num_tensors} tensors")
        cursor.expect_room(num_entries * MIN_ENTRY_BYTES, f"{num_entries} metadata entries")
        return num_tensors, num_entries

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, GGUFTensor]:
        infos = [self._read_tensor_info(cursor) for _ in range(count)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_name, offset, nbytes in infos:
            if name in tensors:
                cursor.fail(f"tensor {name} is listed twice")
            end = start + offset + nbytes
            if offset % alignment or end > len(self._buffer):
                cursor.fail(
                    f"tensor {name} should end at byte {end} (offset {offset}, {nbytes} bytes) but "
                    f"the file has {len(self._buffer)}"
                )
            tensors[name] = GGUFTensor(name, shape, type_name, start + offset, nbytes)
        return tensors

    def _read_tensor_info(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
        name = cursor.string()
        rank = cursor.u32()
        if not 1 <= rank <= MAX_DIMENSIONS:
            cursor.fail(f"tensor {name} has {rank} dimensions")
        sizes = [cursor.u64() for _ in range(rank)]
        number, offset = cursor.u32(), cursor.u64()
        if number not in TENSOR_TYPES:
            raise ModelError(
                f"{self.path}: tensor {name} has type number {number}, which Quire does not know; "
                f"use a file with {', '.join(LOADABLE_TYPES)}."
            )
        type_name, block_elements, block_bytes = TENSOR_TYPES[number]
        if 0 in sizes or sizes[0] % block_elements:
            cursor.fail(f"tensor {name} of type {type_name} has sizes {sizes}")
        elements = 1
        for size in sizes:
            elements *= size
        nbytes = elements // block_elements * block_bytes
        return name, tuple(reversed(sizes)), type_name, offset, nbytes


class _Cursor:
    """Reads little-endian values one after the other and refuses to leave the file."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.position = 0

    def fail(self, problem: str) -> NoReturn:
        raise ModelError(
            f"{self.path} is damaged or incomplete: {problem}; download or convert the file again."
        )

    def expect_room(self, nbytes: int, what: str) -> None:
        if self.position + nbytes > len(self.buffer):
            self.fail(
                f"its header announces {what} at byte {self.position} but the file ends at byte "
                f"{len(self.buffer)}"
            )

    def take(self, nbytes: int) -> bytes:
        self.expect_room(nbytes, f"{nbytes} bytes")
        start, self.position = self.position, self.position + nbytes
        return self.buffer[start : self.position]

    def u32(self) -> int:
        return int(U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(U64.unpack(self.take(8))[0])

    def string(self) -> str:
        return self._decode(self.take(self.u64()))

    def value(self, key: str) -> Any:
        """The value at the cursor; for arrays a function that decodes them."""
        number = self.u32()
        if number == STRING:
            return self.string()
        if number == ARRAY:
            return self._array(key)
        if number not in SCALARS:
            self.fail(f"metadata {key} has the unknown value type {number}")
        dtype = SCALARS[number]
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def _array(self, key: str) -> Callable[[], Any]:
        number, count = self.u32(), self.u64()
        if number == STRING:
            self.expect_room(8 * count, f"{count} strings of {key}")
            start = self.position
            self._skip_strings(key, count)
            return lambda: self._strings(start, count)
        if number not in SCALARS:
            self.fail(f"metadata {key} is an array of values of type {number}, which is not known")
        dtype = SCALARS[number]
        self.expect_room(dtype.itemsize * count, f"{count} values of {key}")
        start, self.position = self.position, self.position + dtype.itemsize * count
        return lambda: np.frombuffer(self.buffer, dtype, count, start)

    def _skip_strings(self, key: str, count: int) -> None:
        length_at, buffer, position = U64.unpack_from, self.buffer, self.position
        try:
            for _ in range(count):
                position += 8 + length_at(buffer, position)[0]
        except (struct.error, OverflowError):
            position = len(buffer) + 1
        if position > len(buffer):
            self.fail(f"the strings of metadata {key} run past its end")
        self.position = position

    def _strings(self, position: int, count: int) -> list[str]:
        length_at, buffer = U64.unpack_from, self.buffer
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(buffer, position)[0]
            strings.append(buffer[start:position])
        return [self._decode(raw) for raw in strings]

    def _decode(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{raw[:40]!r} is not UTF-8 text")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelError(f"{path} is empty; download the file again.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror or error}); check the path and permissions."
        ) from error
