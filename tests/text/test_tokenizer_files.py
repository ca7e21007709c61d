"""Damaged, incomplete and foreign tokenizer files: a clear error, or transformers at the last."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from quire.protocol.errors import ModelError
from quire.text.sentencepiece_model import NotSentencePieceError, read_sentencepiece
from tests.text.tokenizer_samples import (
    load,
    make_folder,
    train_byte_level,
    train_sentencepiece,
    write_json,
)


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sentencepiece") / "m.model"
    return train_sentencepiece(path, "bpe", control_symbols=["<ctl>"]).read_bytes()


def test_every_field_of_a_sentencepiece_file_is_read(model_bytes: bytes) -> None:
    """Against SentencePiece's own protobuf schema."""
    from sentencepiece import sentencepiece_model_pb2

    theirs = sentencepiece_model_pb2.ModelProto.FromString(model_bytes)
    ours = read_sentencepiece(model_bytes)
    assert [(p.text, p.score, p.kind) for p in ours.pieces] == [
        (p.piece, p.score, p.type) for p in theirs.pieces
    ]
    assert ours.model_type == theirs.trainer_spec.model_type
    assert ours.byte_fallback == theirs.trainer_spec.byte_fallback
    assert ours.unk_id == theirs.trainer_spec.unk_id
    assert ours.charsmap == theirs.normalizer_spec.precompiled_charsmap
    assert ours.add_dummy_prefix == theirs.normalizer_spec.add_dummy_prefix
    assert ours.remove_extra_whitespaces == theirs.normalizer_spec.remove_extra_whitespaces


@settings(max_examples=100)
@given(data=st.data())
def test_a_damaged_sentencepiece_file_never_crashes(
    model_bytes: bytes, data: st.DataObject
) -> None:
    """Cut off or overwritten anywhere, it is refused or read, nothing else."""
    cut = data.draw(st.integers(0, len(model_bytes)))
    at = data.draw(st.integers(0, max(cut - 1, 0)))
    damaged = bytearray(model_bytes[:cut])
    damaged[at : at + 4] = data.draw(st.binary(max_size=4))
    with contextlib.suppress(NotSentencePieceError):
        read_sentencepiece(bytes(damaged))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read as a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "Nonsense"}}', "tokenizer.json"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json must hold a JSON object"),
        ("tokenizer_config.json", '{"bos_token": 5}', "special tokens in .* cannot be read"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template in .* must be a string"),
        ("special_tokens_map.json", "not json", "special_tokens_map.json is not valid JSON"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = make_folder(tmp_path / "model", "gpt2", {})
    train_byte_level(["<|endoftext|>"], 300).save(str(folder / "tokenizer.json"))
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_merges_that_do_not_fit_the_vocabulary_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "gpt2", {})
    write_json(folder / "vocab.json", {"a": 0, "b": 1})
    (folder / "merges.txt").write_text("#version: 0.2\nx y\n")
    with pytest.raises(ModelError, match=r"vocab\.json and merges\.txt"):
        load(folder)


def test_other_files_are_read_with_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A WordPiece vocab.txt, which only transformers knows how to read; the log says so."""
    folder = make_folder(tmp_path / "bert", "bert", {"tokenizer_class": "BertTokenizer"})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "wor", "##ld", "."]
    (folder / "vocab.txt").write_text("\n".join(words))
    with caplog.at_level(logging.WARNING):
        ours = load(folder)
    assert "with transformers" in caplog.text
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = theirs.encode("Hello world .")
    assert ours.encode("Hello world .") == ids
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
        ids, skip_special_tokens=True
    )
    assert ours.all_special_ids == theirs.all_special_ids


def test_without_transformers_the_missing_files_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "none", "llama", {})
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from quire.text.tokenizer_files import read_folder\n"
        "from quire.protocol.errors import ModelError\n"
        f"try: read_folder(Path({str(folder)!r}))\n"
        "except ModelError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    for word in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "transformers"):
        assert word in done.stdout


def test_folder_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "none", "llama", {})
    with pytest.raises(ModelError, match=r"no tokenizer\.json, tokenizer\.model, or vocab\.json"):
        load(folder)


def test_added_tokens_of_old_folders_keep_their_ids(tmp_path: Path) -> None:
    """added_tokens.json, as written before tokenizer.json held everything."""
    folder = make_folder(tmp_path / "old", "gpt2", {"eos_token": "<end>"})
    backend = train_byte_level(["<|endoftext|>"], 300)
    backend.model.save(str(folder))
    size = backend.get_vocab_size()
    write_json(folder / "added_tokens.json", {"<end>": size + 1, "<tool>": size})
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    text = "use <tool> then<end>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.convert_tokens_to_ids(["<tool>", "<end>"]) == [size, size + 1]
    ids = ours.encode(text)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
        ids, skip_special_tokens=True
    )


def test_chat_template_files_go_before_the_configuration(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "chat", "gpt2", {"chat_template": "from the configuration"})
    train_byte_level(["<|endoftext|>"], 300).save(str(folder / "tokenizer.json"))
    assert load(folder).chat_template == "from the configuration"
    (folder / "chat_template.jinja").write_text("from a file")
    assert load(folder).chat_template == "from a file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("for documents")
    expected = {"default": "from a file", "rag": "for documents"}
    assert load(folder).chat_template == expected
    assert AutoTokenizer.from_pretrained(folder).chat_template == expected


def test_several_templates_in_the_configuration_are_named(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = make_folder(tmp_path / "chat", "gpt2", {"chat_template": templates})
    train_byte_level(["<|endoftext|>"], 300).save(str(folder / "tokenizer.json"))
    assert load(folder).chat_template == {"default": "a", "tool_use": "b"}
