"""Adapters (LoRA) as the parts of an engine name them to each other.

A client gives a name and a folder; what the folder holds is known by the digest of its content.
Ranks of an adapter are given out in chunks, as the KV cache is in blocks: an adapter of rank 20
takes 3 chunks of 8 rows, anywhere in the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.protocol.errors import AdapterError

CHUNK_ROWS = 8
"""Rank rows of a chunk."""


class LoRARequest(msgspec.Struct, omit_defaults=True, frozen=True):
    """An adapter by name, with the folder it is in. Fields as in vLLM; requests with one name are
    equal."""

    lora_name: str
    lora_int_id: int
    """Positive; kept for scripts. An adapter is known by its name, and shared by its content."""
    lora_path: str = ""
    """A folder with adapter_config.json and its tensors, as peft's `save_pretrained` writes it."""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    """Not supported: must be None."""
    load_inplace: bool = False
    """Read the folder again although an adapter of this name is loaded."""
    is_3d_lora_weight: bool = False
    """Not needed: the tensors say how experts are stored."""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise AdapterError(f"lora_name must be a name, got {self.lora_name!r}.")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise AdapterError(
                f"lora_int_id must be a positive integer, got {str(self.lora_int_id)[:40]} "
                f"(adapter {self.lora_name!r}); number adapters from 1 on."
            )
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise AdapterError(
                f"lora_path must be the adapter's folder, got {self.lora_path!r} "
                f"(adapter {self.lora_name!r})."
            )
        if self.tensorizer_config_dict is not None:
            raise AdapterError(
                "tensorizer_config_dict is not supported; give the adapter's folder as lora_path."
            )

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    def read_once(self) -> LoRARequest:
        """The same where the folder was read just now."""
        return msgspec.structs.replace(self, load_inplace=False) if self.load_inplace else self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


@dataclass(frozen=True)
class AdapterLimits:
    """How many adapters there may be at once."""

    max_adapters: int
    """Of the largest rank, on the device."""
    max_rank: int
    max_host_adapters: int | None
    """In the memory of the host; None: as many as `max_host_bytes` have room for."""
    max_wait_s: float = 2.0
    """How long others may go ahead of a request that waits for an adapter's place."""
    max_host_bytes: int = 1 << 30
    """Of their files."""
    max_saved_bytes: int | None = None
    """Of whole weights in them (modules_to_save) that the devices have room for, beside the pool;
    None: they take none, as on a CPU."""

    @property
    def num_chunks(self) -> int:
        """As many slots are there, since each adapter has a chunk at least."""
        return self.max_adapters * chunks_for(self.max_rank)


@dataclass(frozen=True)
class AdapterContent:
    """What a folder holds, whatever its name."""

    digest: str
    num_chunks: int
    saved_bytes: int = 0
    """Of whole weights, which lie beside the chunks."""


@dataclass(slots=True)
class PlacedAdapter:
    """An adapter goes from the host's memory to a slot of the device."""

    digest: str
    slot: int
    chunks: NDArray[np.int32]


def chunks_for(rank: int) -> int:
    return max(-(-rank // CHUNK_ROWS), 1)
