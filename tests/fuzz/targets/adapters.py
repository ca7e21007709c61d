"""Adapters from strangers: read whole, or refused as `AdapterError`."""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from quire.files import patterns
from quire.files.adapter import read_adapter
from quire.files.tensor_places import ITEM_BYTES
from quire.loading.adapters import load_adapter
from quire.protocol.errors import AdapterError
from tests.fuzz.mutations import Mutator
from tests.fuzz.target import Target

MODULES = ("self_attn.q_proj", "mlp.experts", "mlp.experts.1.w1", "mlp.experts.base_layer")
OWN = (
    *("lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector", "weight"),
    *("lora_embedding_A", "lora_embedding_B", "bias", "base_layer.weight", "base_layer.bias"),
)
KEYS = (
    *(b"peft_type", b"LORA", b"r", b"lora_alpha", b"rank_pattern", b"alpha_pattern"),
    *(b"use_rslora", b"use_dora", b"lora_bias", b"target_parameters", b"init_lora_weights"),
    *(b"experts.gate_up_proj", b"experts.down_proj", b".*", b"q_proj", b"modules_to_save"),
)


class AdapterFolder(Target):
    """adapter_config.json in one line, then the header of adapter_model.safetensors."""

    name = "adapter"
    tokens = (
        *KEYS,
        *(b"dtype", b"shape", b"data_offsets", b"__metadata__", b"base_model.model."),
        *(own.encode() for own in (*OWN, *MODULES)),
        *(kind.encode() for kind in ITEM_BYTES),
    )

    def __init__(self) -> None:
        patterns.TIMEOUT_S = 0.5
        shm = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None)

    def check(self, data: bytes) -> None:
        config, _, header = data.partition(b"\n")
        self._write("adapter_config.json", config)
        ends = [0]
        with contextlib.suppress(
            ValueError, TypeError, LookupError, AttributeError, RecursionError
        ):
            entries = json.loads(header).values()
            ends += [end for entry in entries if type(end := entry["data_offsets"][1]) is int]
        size = max(0, min(max(ends), 1 << 16))
        content = len(header).to_bytes(8, "little") + header + bytes(size)
        self._write("adapter_model.safetensors", content)
        self._load()

    def _write(self, name: str, content: bytes) -> None:
        (Path(self._folder.name) / name).write_bytes(content)

    def _load(self) -> None:
        with contextlib.suppress(AdapterError):
            file = read_adapter(self._folder.name, "one")
            for alternates in (False, True):
                load_adapter(file, alternates=alternates)

    def mutate(self, corpus: Sequence[bytes], mutator: Mutator) -> bytes:
        """Mostly JSON on both lines: little else gets past the first check."""
        chance = mutator.chance
        if chance.random() < 0.2:
            return mutator.mutate(corpus)
        config, _, header = chance.choice(corpus).partition(b"\n")
        if chance.random() < 0.5:
            header = self._header(mutator)
        if chance.random() < 0.5:
            config = mutator.mutate_json(config, corpus)
        if chance.random() < 0.3:
            header = mutator.mutate_json(header, corpus)
        return config.replace(b"\n", b" ") + b"\n" + header

    @staticmethod
    def _header(mutator: Mutator) -> bytes:
        """Tensors of modules in any shapes, without gaps."""
        chance, tensors, end = mutator.chance, {}, 0
        for _ in range(chance.randrange(1, 7)):
            module, own = chance.choice(MODULES), chance.choice(OWN)
            kind = chance.choice(("F32", "F16", "BF16", "I8"))
            shape = [chance.choice((1, 2, 4, 8)) for _ in range(chance.randrange(1, 3))]
            start, end = end, end + math.prod(shape) * ITEM_BYTES[kind]
            name = f"base_model.model.model.layers.0.{module}.{own}"
            if name in tensors:
                end = start
                continue
            tensors[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        return json.dumps(tensors).encode()

    def close(self) -> None:
        self._folder.cleanup()


class AdapterPickle(AdapterFolder):
    """The pickle in an adapter_model.bin."""

    name = "adapter_pickle"
    tokens = (
        *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"X\x07\0\0\0storage"),
        *(b"ccollections\nOrderedDict\n", b"cos\nsystem\n", b"R", b"Q", b"t", b"(", b"u", b"."),
        *(b"\x8a\x04\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f", b"b", b"\x81", b"}", b"]", b"\x85"),
    )

    def check(self, data: bytes) -> None:
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
        self._write("adapter_config.json", json.dumps(config).encode())
        room = io.BytesIO()
        with zipfile.ZipFile(room, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            for number in range(4):
                archive.writestr(f"archive/data/{number}", bytes(96))
        self._write("adapter_model.bin", room.getvalue())
        self._load()

    def mutate(self, corpus: Sequence[bytes], mutator: Mutator) -> bytes:
        return mutator.mutate(corpus)
