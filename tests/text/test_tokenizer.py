"""Tokenizers read from model folders are transformers' own, token for token.

The vocabularies are trained here; the folders have exactly the files of the models they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaTokenizer

from quire.protocol.errors import RequestError
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import QWEN2_SPLIT
from tests.text.tokenizer_samples import (
    LLAMA2_CONFIG,
    MISTRAL_CONFIG,
    TEXTS,
    flagged,
    llama_tokenizer_json,
    load,
    make_folder,
    opt_folder,
    sentencepiece_folder,
    train_byte_level,
    train_sentencepiece,
    write_json,
)

LAYOUTS = [
    "gpt2",
    "opt-125m",
    "llama-2-70b",
    "llama-2-70b without tokenizer.json",
    "llama-2 legacy without tokenizer.json",
    "mistral-7b",
    "llama-3",
    "qwen2",
    "qwen2 without tokenizer.json",
]
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    made = {"opt-125m": opt_folder(root / "opt-125m")}
    model = train_sentencepiece(root / "llama.model", "bpe")
    bare = sentencepiece_folder(root / "llama-2-bare", "llama", LLAMA2_CONFIG, model)
    published = llama_tokenizer_json(bare)
    made["llama-2-70b without tokenizer.json"] = bare
    made["llama-2-70b"] = sentencepiece_folder(
        root / "llama-2", "llama", LLAMA2_CONFIG, model, published
    )
    made["llama-2 legacy without tokenizer.json"] = sentencepiece_folder(
        root / "legacy", "llama", {**LLAMA2_CONFIG, "legacy": True}, model
    )
    made["mistral-7b"] = sentencepiece_folder(
        root / "mistral", "mistral", MISTRAL_CONFIG, model, published
    )
    made["mistral bare"] = sentencepiece_folder(
        root / "mistral-bare", "mistral", MISTRAL_CONFIG, model
    )
    made["gpt2"] = make_folder(root / "gpt2", "gpt2", {"model_max_length": 1024})
    train_byte_level(["<|endoftext|>"]).save(str(made["gpt2"] / "tokenizer.json"))
    made["llama-3"] = _llama3_folder(root / "llama-3")
    made |= _qwen2_folders(root)
    return made


def _llama3_folder(path: Path) -> Path:
    """Byte-level with its own split, and `<|begin_of_text|>` from the post-processor."""
    backend = train_byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    split = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bos = "<|begin_of_text|>"
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)]),
        ]
    )
    config = {
        "bos_token": bos,
        "eos_token": "<|end_of_text|>",
        "clean_up_tokenization_spaces": True,
        "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(i): flagged(token, special=True)
            for i, token in enumerate((bos, "<|end_of_text|>", "<|eot_id|>"))
        },
    }
    make_folder(path, "llama", config)
    backend.save(str(path / "tokenizer.json"))
    return path


def _qwen2_folders(root: Path) -> dict[str, Path]:
    backend = train_byte_level([])
    size = backend.get_vocab_size()
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(size + i): flagged(token, special=True) for i, token in enumerate(special)
        },
        "additional_special_tokens": special[1:],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    bare = make_folder(root / "qwen2-bare", "qwen2", config)
    backend.model.save(str(bare))
    full = make_folder(root / "qwen2", "qwen2", config)
    backend.model.save(str(full))
    backend.add_special_tokens(special)
    backend.save(str(full / "tokenizer.json"))
    return {"qwen2": full, "qwen2 without tokenizer.json": bare}


@pytest.fixture(scope="module")
def pairs(folders: dict[str, Path]) -> Callable[[str], tuple[Tokenizer, Any]]:
    """Ours and transformers' tokenizer of a layout."""
    loaded: dict[str, tuple[Tokenizer, Any]] = {}

    def get(layout: str) -> tuple[Tokenizer, Any]:
        if layout not in loaded:
            folder = folders[layout]
            loaded[layout] = (load(folder), AutoTokenizer.from_pretrained(folder))
        return loaded[layout]

    return get


def assert_equal(ours: Tokenizer, theirs: Any, text: str) -> None:
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_encodes_and_decodes_as_transformers(layout: str, pairs: Any) -> None:
    """Spaces, digits, control characters, unseen scripts and special tokens inside the text."""
    ours, theirs = pairs(layout)
    for text in TEXTS:
        assert_equal(ours, theirs, text)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=60)
@given(
    text=st.lists(
        st.one_of(
            st.text(max_size=8),
            st.sampled_from([" ", "  ", "\n", "</s>", "<s>", "<|im_end|>", "é", "12", "\u2581"]),
        ),
        max_size=6,
    ).map("".join)
)
def test_any_text_is_encoded_as_transformers_does(layout: str, pairs: Any, text: str) -> None:
    ours, theirs = pairs(layout)
    assert_equal(ours, theirs, text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vocabulary_and_special_tokens_are_those_of_transformers(layout: str, pairs: Any) -> None:
    ours, theirs = pairs(layout)
    for role in ROLES:
        assert getattr(ours, role) == getattr(theirs, role)
        assert getattr(ours, f"{role}_id") == getattr(theirs, f"{role}_id")
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert (ours.vocab_size, len(ours)) == (theirs.vocab_size, len(theirs))
    ids = ours.encode("two words 42</s>")
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    tokens = [*ours.convert_ids_to_tokens(ids), "\u2581never-in-there"]
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)


def test_opt_puts_its_end_token_before_every_text(pairs: Any) -> None:
    ours, _ = pairs("opt-125m")
    assert ours.encode("hello")[0] == ours.bos_token_id == ours.eos_token_id == 2
    assert ours.encode("") == [2]
    assert 2 not in ours.encode("hello", add_special_tokens=False)


def test_mistral_without_tokenizer_json_is_read_as_llama(folders: dict[str, Path]) -> None:
    """AutoTokenizer drops the space before the text here, which the model was trained with."""
    ours = load(folders["mistral bare"])
    theirs = LlamaTokenizer.from_pretrained(folders["mistral bare"])
    for text in TEXTS:
        assert_equal(ours, theirs, text)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"byte_fallback": False},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"add_dummy_prefix": False, "user_defined_symbols": ["<mark>"]},
    ],
    ids=["llama-like", "no bytes", "normalised", "no prefix"],
)
def test_unigram_models_are_cut_as_sentencepiece_does(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """transformers reads a unigram tokenizer.model as BPE, so SentencePiece is the oracle."""
    folder = make_folder(tmp_path / "unigram", "llama", {"tokenizer_class": "LlamaTokenizer"})
    model = train_sentencepiece(folder / "tokenizer.model", "unigram", **options)
    ours = load(folder)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    special = ("<s>", "</s>", "<unk>", "<0x41>")
    for text in [*TEXTS, "a <mark>b<mark> c"]:
        if any(token in text for token in special):
            continue
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text)
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)
    assert ours.encode("x")[0] == theirs.bos_id()


def test_batches_and_calls_agree_with_single_texts(pairs: Any) -> None:
    ours, theirs = pairs("llama-2-70b")
    batch = ours.encode_batch(TEXTS)
    assert batch == [ours.encode(text) for text in TEXTS]
    called = ours(TEXTS)
    assert called["input_ids"] == called.input_ids == batch == theirs(TEXTS)["input_ids"]
    assert called.attention_mask == theirs(TEXTS)["attention_mask"]
    assert ours("one").input_ids == ours.encode("one")
    assert ours.batch_decode(batch) == [ours.decode(ids) for ids in batch]
    assert ours.decode(np.array(batch[3], np.int32)) == ours.decode(batch[3])
    assert ours.tokenize("two words") == theirs.tokenize("two words")


def test_padding_and_truncation_of_tokenizer_json_are_switched_off(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    """Some published files carry the settings of a training run."""
    folder = make_folder(tmp_path / "padded", "gpt2", {})
    state = json.loads((folders["gpt2"] / "tokenizer.json").read_text())
    state["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    state["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    write_json(folder / "tokenizer.json", state)
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("one", "one two three four five six seven"):
        assert load(folder).encode(text) == theirs.encode(text)


def test_split_kept_in_tokenizer_json_survives_the_class_name(tmp_path: Path) -> None:
    """SmolLM2 declares GPT2Tokenizer but sets digits apart in tokenizer.json: the file rules."""
    folder = make_folder(tmp_path / "smol", "llama", {"tokenizer_class": "GPT2Tokenizer"})
    backend = train_byte_level(["<|endoftext|>"])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    ours = load(folder)
    assert ours.convert_ids_to_tokens(ours.encode("2024")) == ["2", "0", "2", "4"]
    assert ours.eos_token == "<|endoftext|>"


def test_spaces_are_cleaned_up_where_transformers_does(tmp_path: Path) -> None:
    """WordPiece and unigram, not BPE: there the spaces are text."""
    config = {"clean_up_tokenization_spaces": True, "tokenizer_class": "PreTrainedTokenizerFast"}
    for model, cleans in (("unigram", True), ("bpe", False)):
        folder = make_folder(tmp_path / model, "llama", config)
        bare = make_folder(tmp_path / f"{model}-model", "llama", {})
        train_sentencepiece(bare / "tokenizer.model", model)
        load(bare).backend.save(str(folder / "tokenizer.json"))
        ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
        ids = ours.encode("is n't it , she 's here .")
        assert ours.decode(ids) == theirs.decode(ids)
        assert ("isn't" in ours.decode(ids)) is cleans


def test_bad_words_are_found_at_the_start_and_inside_of_a_text(pairs: Any) -> None:
    """Both spellings where a leading space makes another token, one where it adds a token."""
    ours, _ = pairs("gpt2")
    words = ["the", " self", "strange words", "\n", "字"]
    expected = []
    for word in words:
        first = ours.encode(word.lstrip() or word, add_special_tokens=False)
        inside = ours.encode(" " + (word.lstrip() or word), add_special_tokens=False)
        expected.append(first)
        if len(first) == len(inside) and first[0] != inside[0]:
            expected.append(inside)
    assert ours.bad_words_ids(words) == expected
    assert len(ours.bad_words_ids(["self"])) == 2
    assert len(ours.bad_words_ids(["字"])) == 1


def test_text_that_is_no_unicode_is_refused_by_position(pairs: Any) -> None:
    ours, _ = pairs("gpt2")
    with pytest.raises(RequestError, match=r"text 1 .*surrogate.*character 2"):
        ours.encode_batch(["fine", "ab\ud800"])
    with pytest.raises(RequestError, match="text 0 must be a string, got NoneType"):
        ours.encode(None)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="vocabulary"):
        ours.decode([3, -1])
