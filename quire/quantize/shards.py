"""Safetensors files that are written tensor by tensor, none of which is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quire.loading.dtypes import TORCH_FLOATS

DTYPES = {
    **{dtype: name for name, dtype in TORCH_FLOATS.items()},
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float64: "F64",
    torch.float8_e5m2: "F8_E5M2",
}
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
SHARD_BYTES = 5 * 10**9
ENTRY_BYTES = 300
"""More than the header has for a tensor, its name aside."""
MAX_NAME = 200


class ShardWriter:
    """Fills one file after the other. The header of a file, whose length comes first, is written
    last: room for `max_tensors` is left for it, and what is not used filled with spaces."""

    def __init__(self, folder: Path, max_tensors: int) -> None:
        self._folder = folder
        self._header_bytes = -(-(max_tensors * (ENTRY_BYTES + MAX_NAME) + 100) // 8) * 8
        self._headers: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._offset = 0
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        assert len(name) <= MAX_NAME, f"no tensor has a name as long as {name}"
        tensor = tensor.detach().cpu().contiguous()
        if self._file is None or self._offset + tensor.nbytes > SHARD_BYTES:
            self._end_file()
            self._headers.append({"__metadata__": {"format": "pt"}})
            self._file = self._path(len(self._headers)).open("wb")
            self._file.seek(8 + self._header_bytes)
            self._offset = 0
        if tensor.numel():
            self._file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        end = self._offset + tensor.nbytes
        self._headers[-1][name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._offset, end],
        }
        self._offset = end
        self.num_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is missing, give the files their names, and write their index."""
        self._end_file()
        count = len(self._headers)
        if count == 1:
            self._path(1).rename(self._folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for number, header in enumerate(self._headers, 1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._path(number).rename(self._folder / name)
            places |= {tensor: name for tensor in header if tensor != "__metadata__"}
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": places}
        text = json.dumps(index, indent=2) + "\n"
        (self._folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def discard(self) -> None:
        """Remove files that will not be finished."""
        if self._file is not None:
            self._file.close()
        for number in range(1, len(self._headers) + 1):
            self._path(number).unlink(missing_ok=True)

    def _end_file(self) -> None:
        if self._file is None:
            return
        header = json.dumps(self._headers[-1], separators=(",", ":")).encode()
        assert len(header) <= self._header_bytes
        self._file.seek(0)
        self._file.write(self._header_bytes.to_bytes(8, "little"))
        self._file.write(header.ljust(self._header_bytes))
        self._file.close()
        self._file = None

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number:05d}.partial"
