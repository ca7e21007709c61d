"""Tokenizers in GGUF files: llama.cpp is the oracle, asked through its own server's /tokenize."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import random
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.config.embedded import embedded_model_path
from quire.config.locate import ModelSource
from quire.protocol.errors import ModelError
from quire.text.sentencepiece_model import CONTROL, NORMAL, USER_DEFINED, read_sentencepiece
from quire.text.tokenizer import Tokenizer, load_tokenizer
from quire.text.tokenizer_gguf import read_gguf
from tests.text.tokenizer_samples import TEXTS, train_byte_level, train_sentencepiece

xllamacpp = pytest.importorskip("xllamacpp")

ALPHABET = "aé 1234567890 ٣५ ½Ⅷ \n\t'sll <|im_end|>日本🙂—.,!?\u00a0\u3000 xABCd"
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<|im_end|>"]


def random_lines(count: int) -> list[str]:
    rng = random.Random(7)
    return ["".join(rng.choice(ALPHABET) for _ in range(25)) for _ in range(count)]


class LlamaCpp:
    """llama.cpp with one model loaded."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup = 64, 1, False
        self._server = xllamacpp.Server(params)

    def encode(self, text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        request = urllib.request.Request(
            self._server.listening_address + "/tokenize",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]


@pytest.fixture
def llama_cpp() -> Iterator[Callable[[Path], LlamaCpp]]:
    yield LlamaCpp
    gc.collect()


def load(path: Path) -> Tokenizer:
    return load_tokenizer(ModelSource(path.stem, "gguf", path))


def write_model(path: Path, tokens: list[str], kinds: list[int], **metadata: Any) -> Path:
    """A one-layer model of zeros around a vocabulary, so that llama.cpp loads it."""
    writer = gguf.GGUFWriter(path, "llama")
    width, size = 32, len(tokens)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in metadata.items():
        add.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
    shapes = {"token_embd": (size, width), "output_norm": (width,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (width, width)
    shapes |= {"blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_model(path: Path, pre: str | None, **metadata: Any) -> Path:
    backend = train_byte_level(SPECIAL)
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    kinds = [CONTROL if token in SPECIAL else NORMAL for token in tokens]
    kinds[SPECIAL.index("<unk>")] = USER_DEFINED
    merges = [" ".join(merge) for merge in state["merges"]]
    named = {"pre": pre} if pre else {}
    roles = {"bos_token_id": 0, "eos_token_id": 2}
    return write_model(
        path, tokens, kinds, model="gpt2", merges=merges, **named, **roles, **metadata
    )


def test_embedded_model_is_tokenised_as_llama_cpp_does(
    llama_cpp: Callable[[Path], LlamaCpp],
) -> None:
    """The real vocabulary of 49,152 tokens, with every digit set apart."""
    path = embedded_model_path()
    ours, theirs = load(path), llama_cpp(path)
    lines = [*TEXTS, *inspect.getsource(inspect).splitlines()[:300], *random_lines(300)]
    differing = [text for text in lines if ours.encode(text) != theirs.encode(text)]
    assert not differing
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (
        "<|im_start|>", "<|im_end|>", "<|im_end|>"
    )  # fmt: skip
    assert ours.convert_ids_to_tokens(ours.encode("In 2024")) == ["In", "Ġ", "2", "0", "2", "4"]
    for text in lines:
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    "pre",
    [
        *("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o"),
        *("deepseek-v3", "deepseek-llm"),
    ],
)
def test_each_known_split_is_that_of_llama_cpp(
    pre: str, tmp_path: Path, llama_cpp: Callable[[Path], LlamaCpp]
) -> None:
    """The text is composed (NFC): Qwen2 composes it first, which llama.cpp leaves out."""
    path = byte_level_model(tmp_path / "model.gguf", pre)
    ours, theirs = load(path), llama_cpp(path)
    lines = [text for text in [*TEXTS, *random_lines(100)] if "e\u0301" not in text]
    for text in lines:
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize("switches", [{}, {"add_space_prefix": False, "add_bos_token": False}])
def test_sentencepiece_is_tokenised_as_llama_cpp_does(
    switches: dict[str, bool], tmp_path: Path, llama_cpp: Callable[[Path], LlamaCpp]
) -> None:
    model = read_sentencepiece(train_sentencepiece(tmp_path / "m", "bpe").read_bytes())
    path = write_model(
        tmp_path / "model.gguf",
        [piece.text for piece in model.pieces],
        [piece.kind for piece in model.pieces],
        model="llama",
        scores=[piece.score for piece in model.pieces],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **switches,
    )
    ours, theirs = load(path), llama_cpp(path)
    # llama.cpp takes <0x41> and <unk> in a text for the tokens themselves.
    for text in [*(t for t in TEXTS if "<unk>" not in t), *random_lines(100)]:
        assert ours.encode(text) == theirs.encode(text), text
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text.replace("\u2581", " ")


def test_unknown_split_is_warned_about_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = byte_level_model(tmp_path / "unknown.gguf", "brand-new")
    known = byte_level_model(tmp_path / "known.gguf", "gpt-2")
    with caplog.at_level(logging.WARNING):
        ours = load(unknown)
    assert "brand-new" in caplog.text
    caplog.clear()
    expected = load(known)
    assert not caplog.records
    assert [ours.encode(t) for t in TEXTS] == [expected.encode(t) for t in TEXTS]


def test_token_kinds_decide_what_is_special(tmp_path: Path) -> None:
    """Control tokens are hidden by skip_special_tokens, user-defined ones are text."""
    ours = load(byte_level_model(tmp_path / "m.gguf", "gpt-2", add_bos_token=True))
    ids = ours.encode("a<|im_end|>b<unk>c")
    assert ours.convert_ids_to_tokens(ids) == ["<s>", "a", "<|im_end|>", "b", "<unk>", "c"]
    assert ours.decode(ids, skip_special_tokens=True) == "ab<unk>c"
    assert set(ours.all_special_tokens) == {"<s>", "<pad>", "</s>", "<|im_end|>"}


def test_named_chat_templates_are_read(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
        "tokenizer.chat_template": "default one",
        "tokenizer.chat_templates": ["rag"],
        "tokenizer.chat_template.rag": "rag one",
    }
    assert read_gguf(metadata, "m").chat_template == {"default": "default one", "rag": "rag one"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model is 'bert'"),
        ({"tokenizer.ggml.model": None}, "is None"),
        ({"tokenizer.ggml.eos_token_id": 9}, "eos_token_id is 9, outside its vocabulary of 2"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries for 2 tokens"),
        ({"tokenizer.ggml.merges": ["x y"]}, "do not make a tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "scores is missing"),
    ],
)
def test_broken_metadata_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(ModelError, match=message):
        read_gguf({**metadata, **change}, "some.gguf")


def test_reading_needs_neither_torch_nor_transformers() -> None:
    """They cost seconds at start-up."""
    code = (
        "import sys\n"
        "from quire.config.locate import locate_model\n"
        "from quire.text.tokenizer import load_tokenizer\n"
        "from quire.text.detokenizer import IncrementalDetokenizer\n"
        "tokenizer = load_tokenizer(locate_model(None))\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "heavy = {'torch', 'transformers', 'sentencepiece', 'gguf', 'google.protobuf'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
