"""Files of models from strangers: read whole, or refused as `ModelError`."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from quire.config.locate import ModelSource
from quire.config.model import load_model_config
from quire.files.gguf import LOADABLE_TYPES, TENSOR_TYPES, GGUFFile
from quire.loading.weights import iter_weights
from quire.protocol.errors import ModelError
from quire.text.sentencepiece_model import (
    UNIGRAM,
    NotSentencePieceError,
    build_bpe,
    build_unigram,
    read_sentencepiece,
)
from quire.text.tokenizer import load_tokenizer
from tests.fuzz.mutations import Mutator
from tests.fuzz.target import Target

SAMPLE = "Hello, wörld! 123 <s>"
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}


class FileTarget(Target):
    """Writes each input to a file of its own, in memory where the system has a place for that."""

    file_name: ClassVar[str]

    def __init__(self) -> None:
        shm = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None)

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    def check(self, data: bytes) -> None:
        path = self.folder / self.file_name
        path.unlink(missing_ok=True)  # one that is mapped must not become shorter
        path.write_bytes(data)
        self.check_file(path)

    def check_file(self, path: Path) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._folder.cleanup()


class GGUF(FileTarget):
    """The header, the configuration, the tokenizer and the weights of a GGUF file."""

    name = "gguf"
    file_name = "model.gguf"
    tokens = (
        *(b"GGUF", b"general.architecture", b"general.alignment", b"llama", b"gpt2", b"qwen3"),
        *(b"llama.block_count", b"llama.context_length", b"llama.embedding_length"),
        *(b"llama.attention.head_count", b"llama.attention.head_count_kv", b"split.count"),
        *(b"llama.rope.freq_base", b"llama.rope.scaling.type", b"llama.expert_count", b"yarn"),
        *(b"llama.attention.key_length", b"llama.attention.sliding_window", b"linear"),
        *(b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges", b"tokenizer.ggml.scores"),
        *(b"tokenizer.ggml.token_type", b"tokenizer.ggml.pre", b"tokenizer.ggml.model"),
        *(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.unknown_token_id"),
        *(b"tokenizer.chat_template", b"token_embd.weight", b"rope_freqs.weight"),
        *(b"blk.0.attn_q.weight", b"blk.0.ffn_up.weight", b"output.weight"),
        *(struct.pack("<I", kind) for kind in range(13)),
        *(struct.pack("<I", NUMBERS[name]) for name in LOADABLE_TYPES),
        *(struct.pack("<f", value) for value in (0.0, -1.0, 1e30, float("inf"), float("nan"))),
    )

    def check_file(self, path: Path) -> None:
        with contextlib.suppress(ModelError):
            file = GGUFFile(path)
            for key in file.metadata:
                with contextlib.suppress(ModelError):
                    file.metadata[key]
            for name in file.tensors:
                file.data(name)
        source = ModelSource("model", "gguf", path)
        with contextlib.suppress(ModelError):
            load_model_config(str(path))
        with contextlib.suppress(ModelError):
            load_tokenizer(source).encode(SAMPLE)
        for keeps_blocks in (False, True):
            with contextlib.suppress(ModelError):
                for _, weight in iter_weights(
                    source, keeps_blocks=lambda name, keeps=keeps_blocks: keeps
                ):
                    if not isinstance(weight, Tensor):
                        weight[:, :]


class Safetensors(FileTarget):
    """The header of a safetensors file: its length, JSON with the place of each tensor, bytes."""

    name = "safetensors"
    file_name = "model.safetensors"
    tokens = (
        *(b"dtype", b"shape", b"data_offsets", b"__metadata__", b"model.norm.weight"),
        *(kind.encode() for kind in BITS),
    )

    def check_file(self, path: Path) -> None:
        with contextlib.suppress(ModelError):
            for _ in iter_weights(ModelSource("model", "folder", path.parent)):
                pass

    def mutate(self, corpus: Sequence[bytes], mutator: Mutator) -> bytes:
        """Mostly a header of the right length: little else gets past the first check."""
        chance = mutator.chance
        if chance.random() < 0.2:
            return mutator.mutate(corpus)
        header, size = self._header(chance)
        if chance.random() < 0.7:
            header = mutator.mutate_json(header, corpus)
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header + bytes(size)

    @staticmethod
    def _header(chance: random.Random) -> tuple[bytes, int]:
        """Tensors of any types and shapes, without gaps, and how many bytes they take."""
        tensors, end = {}, 0
        for i in range(chance.randrange(1, 4)):
            kind = chance.choice(list(BITS))
            shape = [chance.choice((0, 1, 2, 3, 4, 8)) for _ in range(chance.randrange(4))]
            start, end = end, end + math.prod(shape) * BITS[kind] // 8
            tensors[f"t{i}"] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        return json.dumps(tensors).encode(), end


class SentencePiece(Target):
    """A tokenizer.model: a protobuf message, read or refused as `NotSentencePieceError`."""

    name = "sentencepiece"
    tokens = (
        *(b"\x0a\x05\x0a\x01a\x18\x01", b"\x12\x02\x18\x01", b"\x12\x02\x18\x02", b"\x1a\x02"),
        *(b"\x12\x03\x98\x02\x01", b"\x12\x03\xc0\x02\x00", "\u2581".encode(), b"<0x41>", b"<s>"),
    )

    def check(self, data: bytes) -> None:
        with contextlib.suppress(NotSentencePieceError):
            model = read_sentencepiece(data)
            if model.model_type == UNIGRAM:
                build_unigram(model).encode(SAMPLE)
            else:
                build_bpe(model, prefix_space=True, legacy=False).encode(SAMPLE)
