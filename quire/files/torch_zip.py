"""Where the tensors of a file that `torch.save` wrote lie in it, without torch and without running
what the file says.

Such a file is a zip archive with a pickle that describes tensors and one uncompressed member for
the numbers of each. The pickle may call only what describes a tensor, and that is stood in for.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any, NamedTuple

from quire.files.tensor_places import (
    ITEM_BYTES,
    MAX_DIMENSIONS,
    TensorPlace,
    check_count,
    damaged,
    opened,
    read_exactly,
    shown,
)
from quire.protocol.errors import AdapterError

MAX_PICKLE_BYTES = 64 << 20
MAX_SHARING = 4
"""Times the size of a file that its tensors may have together: tied ones are stored once."""
STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
SAVE_AGAIN = "save the adapter again as safetensors"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a member: its signature, and the lengths of its name and of what follows that."""


class _Kind(NamedTuple):
    """Stands for a class of torch's storages. Like the others it is a tuple, of which a pickle can
    change nothing."""

    dtype: str


class _Storage(NamedTuple):
    dtype: str
    member: str
    length: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Refused(Exception):
    """What the pickle would call."""


def torch_zip_places(file: Path) -> dict[str, TensorPlace]:
    """All tensors of a file of `torch.save`, by name."""
    with opened(file) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                members = {info.filename: info for info in archive.infolist()}
                text, folder = _pickle_of(file, archive, members)
        except (
            zipfile.BadZipFile,
            EOFError,
            ValueError,
            RuntimeError,
            NotImplementedError,
        ) as error:
            if isinstance(error, AdapterError):
                raise
            raise AdapterError(
                f"{file} is no file of torch.save that could be read ({str(error)[:100]}); "
                f"{SAVE_AGAIN}."
            ) from error
        tensors = _described(file, text)
        check_count(file, len(tensors))
        places = {
            name: _place(
                file, stream, name, tensor, members.get(f"{folder}data/{tensor.storage.member}")
            )
            for name, tensor in tensors.items()
        }
        total, size = sum(place.nbytes for place in places.values()), file.stat().st_size
        if total > MAX_SHARING * size:
            raise damaged(file, f"its tensors have {total} bytes, the file {size}")
        return places


def _pickle_of(
    file: Path, archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo]
) -> tuple[bytes, str]:
    """The pickle, and the folder in the archive that it is in."""
    found = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(found) != 1:
        raise damaged(file, "it has no data.pkl")
    folder = found[0].removesuffix("data.pkl")
    if members[found[0]].file_size > MAX_PICKLE_BYTES:
        raise damaged(file, f"its data.pkl has {members[found[0]].file_size} bytes")
    order = members.get(f"{folder}byteorder")
    if order is not None and order.file_size != len("little"):
        raise AdapterError(f"{file} has its bytes in another order; {SAVE_AGAIN}.")
    with archive.open(found[0]) as member:
        return member.read(MAX_PICKLE_BYTES), folder


def _described(file: Path, text: bytes) -> dict[str, _Tensor]:
    try:
        for opcode, argument, _ in pickletools.genops(text):
            # The C unpickler makes room for as many entries as the largest number says.
            if "PUT" in opcode.name and isinstance(argument, int) and argument > len(text):
                raise damaged(file, "its pickle numbers more objects than it has")
        loaded = _Unpickler(io.BytesIO(text)).load()
    except _Refused as error:
        raise AdapterError(
            f"{file} was refused: it would run code on loading ({error}), and only tensors are "
            f"accepted; {SAVE_AGAIN}."
        ) from error
    except AdapterError:
        raise
    except Exception as error:  # any, from a pickle that is made up
        raise damaged(file, f"its pickle cannot be read: {str(error)[:100]}") from error
    if not isinstance(loaded, dict):
        raise AdapterError(
            f"{file} must hold a dictionary of tensors, got {type(loaded).__name__}; {SAVE_AGAIN}."
        )
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor):
            raise AdapterError(
                f"{file}: entry {shown(name)} must be a tensor, got {type(tensor).__name__}; "
                f"{SAVE_AGAIN}."
            )
    return dict(loaded)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _parameter
        if module == "torch" and name in STORAGES:
            return _Kind(STORAGES[name])
        raise _Refused(f"{module}.{name}"[:200])

    def persistent_load(self, found: Any) -> _Storage:
        word, kind, member, _, count = found
        if word != "storage" or not isinstance(kind, _Kind) or not isinstance(member, str):
            raise ValueError("a storage is not described as torch does")
        return _Storage(kind.dtype, member, count)


def _rebuilt(
    storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor has no storage")
    numbers = (storage.length, offset, *shape, *stride)
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("a tensor has impossible numbers")
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
        raise ValueError("a tensor has impossible dimensions")
    return _Tensor(storage, offset, tuple(shape), tuple(stride))


def _parameter(tensor: _Tensor, *_: object) -> _Tensor:
    return tensor


def _place(
    file: Path, stream: IO[bytes], name: str, tensor: _Tensor, member: zipfile.ZipInfo | None
) -> TensorPlace:
    if member is None:
        raise damaged(file, f"the numbers of tensor {shown(name)} are missing")
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise AdapterError(f"{file}: tensor {shown(name)} is compressed; {SAVE_AGAIN}.")
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size != 1 and stride != expected:
            raise AdapterError(
                f"{file}: tensor {shown(name)} is a view of another one; make it contiguous, or "
                f"{SAVE_AGAIN}."
            )
        expected *= size
    item = ITEM_BYTES[tensor.storage.dtype]
    start, nbytes = tensor.offset * item, math.prod(tensor.shape) * item
    if start + nbytes > member.file_size:
        raise damaged(file, f"tensor {shown(name)} reaches beyond its numbers")
    head = bytearray(_LOCAL_HEADER.size)
    read_exactly(stream, file, member.header_offset, memoryview(head))
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(head)
    if signature != b"PK\x03\x04":
        raise damaged(file, f"the numbers of tensor {shown(name)} are not where it says")
    first = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    return TensorPlace(tensor.storage.dtype, tensor.shape, first + start, nbytes)
