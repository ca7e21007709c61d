"""Small tokenizers, trained here, in folders laid out like those of well-known models."""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from quire.config.locate import ModelSource
from quire.text.tokenizer import Tokenizer, load_tokenizer

OTHER_LANGUAGES = [
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "日本語のテキストです。東京はとても大きい。",
    "我能吞下玻璃而不伤身体。",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "안녕하세요 세계",
]
CORPUS = [
    line
    for module in (textwrap, argparse)
    for line in inspect.getsource(module).splitlines()
    if line.strip()
] + OTHER_LANGUAGES * 4

TEXTS = [
    "",
    " ",
    "   ",
    "Hello world",
    " Hello",
    "  Hello   world  ",
    "line one\nline two\n\n\nline five\n",
    "\ttabs\t\tand \r\n carriage returns",
    "12345 6,789.01 1e-5 ٣٤ ½ Ⅷ",
    "don't I'll WE'VE she's",
    "emoji 🙂 👨‍👩‍👧‍👦 🇫🇷 and unseen 字 ꙮ ߷",
    "control \x00 \x01 \x1b[0m \x7f \u200b \ufeff end",
    "composed é, decomposed e\u0301, ligature ﬁ, circled ①, wide \uff21\uff22",
    "no-break\u00a0space, ideographic\u3000space",
    "\u2581 the \u2581\u2581 piece mark",
    "<s>inside</s> text <unk> <pad><s> <|endoftext|> <0x41> </s>",
    "def f(x):\n    return x ** 2  # squares\n",
    *OTHER_LANGUAGES,
    *CORPUS[:40],
]

SPECIAL_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False}


def flagged(content: str, *, normalized: bool = False, **more: Any) -> dict[str, Any]:
    return {"content": content, "normalized": normalized, **SPECIAL_FLAGS, **more}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelSource(str(folder), "folder", folder))


def train_byte_level(special_tokens: list[str], vocab_size: int = 800) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def train_sentencepiece(path: Path, kind: str, **options: Any) -> Path:
    """A `tokenizer.model`, by default with the settings that Llama's was trained with."""
    settings = {
        "vocab_size": 700,
        "byte_fallback": True,
        "character_coverage": 0.99,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "num_threads": 1,
        "minloglevel": 2,
        **options,
    }
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=file, model_type=kind, **settings
        )
    return path


def make_folder(path: Path, model_type: str, tokenizer_config: dict[str, Any]) -> Path:
    path.mkdir(parents=True)
    write_json(path / "config.json", {"model_type": model_type})
    write_json(path / "tokenizer_config.json", tokenizer_config)
    return path


def opt_folder(path: Path) -> Path:
    """facebook/opt-125m: vocab.json and merges.txt, `</s>` before every text."""
    role = flagged("</s>", normalized=True)
    config = {
        "errors": "replace",
        "unk_token": {"__type": "AddedToken", **role},
        "bos_token": {"__type": "AddedToken", **role},
        "eos_token": {"__type": "AddedToken", **role},
        "pad_token": "<pad>",
        "add_prefix_space": False,
        "add_bos_token": True,
        "special_tokens_map_file": None,
        "name_or_path": "patrickvonplaten/opt-30b",
        "tokenizer_class": "GPT2Tokenizer",
    }
    make_folder(path, "opt", config)
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token"), role)
    write_json(
        path / "special_tokens_map.json", {**roles, "pad_token": flagged("<pad>", normalized=True)}
    )
    train_byte_level(["<s>", "<pad>", "</s>", "<unk>"]).model.save(str(path))
    return path


LLAMA2_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": {"__type": "AddedToken", **flagged("<s>")},
    "clean_up_tokenization_spaces": False,
    "eos_token": {"__type": "AddedToken", **flagged("</s>")},
    "legacy": False,
    "model_max_length": 1000000000000000019884624838656,
    "pad_token": None,
    "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
    "unk_token": {"__type": "AddedToken", **flagged("<unk>")},
}
MISTRAL_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "added_tokens_decoder": {
        str(index): flagged(token, special=True)
        for index, token in enumerate(("<unk>", "<s>", "</s>"))
    },
    "additional_special_tokens": [],
    "bos_token": "<s>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "</s>",
    "legacy": True,
    "model_max_length": 1000000000000000019884624838656,
    "pad_token": None,
    "sp_model_kwargs": {},
    "spaces_between_special_tokens": False,
    "tokenizer_class": "LlamaTokenizer",
    "unk_token": "<unk>",
    "use_default_system_prompt": False,
}


def sentencepiece_folder(
    path: Path, model_type: str, config: dict[str, Any], model: Path, tokenizer_json: Any = None
) -> Path:
    """meta-llama/Llama-2-70b-hf or mistralai/Mistral-7B-v0.1."""
    make_folder(path, model_type, config)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(
        path / "special_tokens_map.json", {role: flagged(token) for role, token in roles.items()}
    )
    (path / "tokenizer.model").write_bytes(model.read_bytes())
    if tokenizer_json is not None:
        write_json(path / "tokenizer.json", tokenizer_json)
    return path


def llama_tokenizer_json(folder: Path) -> dict[str, Any]:
    """The tokenizer.json that Llama 2 and Mistral publish: spaces are put by a normalizer.

    Vocabulary and merges are those that transformers reads from the `tokenizer.model` in `folder`.
    """
    from transformers import LlamaTokenizer

    state = json.loads(LlamaTokenizer.from_pretrained(folder).backend_tokenizer.to_str())
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    state["normalizer"] = {"type": "Sequence", "normalizers": [prepend, replace]}
    state["pre_tokenizer"] = None
    state["model"]["unk_token"] = "<unk>"
    return state
