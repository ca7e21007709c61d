"""Builds a tokenizer from the files of a model folder, equal to what transformers makes of them.

`tokenizer.json` comes first, then `tokenizer.model`, then `vocab.json` with `merges.txt`. What is
none of these goes through transformers itself, if that is installed.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from quire.protocol.errors import ModelError
from quire.text.sentencepiece_model import (
    CONTROL,
    UNIGRAM,
    USER_DEFINED,
    NotSentencePieceError,
    build_bpe,
    build_unigram,
    read_sentencepiece,
    set_llama_pipeline,
)
from quire.text.tokenizer_check import check_tokenizer_json, is_panic, panics_named
from quire.text.tokenizer_settings import TokenizerSettings, added_token, read_settings

logger = logging.getLogger(__name__)

TRIAL_TEXT = "a b"
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass
class TokenizerParts:
    """What a model's files say about its tokenizer."""

    backend: Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    """By role: bos_token, eos_token, ..."""
    extra_special_tokens: list[str] = field(default_factory=list)
    chat_template: str | dict[str, str] | None = None
    clean_up_spaces: bool = False
    model_max_length: int | None = None


def read_folder(folder: Path) -> TokenizerParts:
    """The tokenizer of a model folder."""
    settings = read_settings(folder)
    if (folder / "tokenizer.json").is_file():
        backend = _from_tokenizer_json(folder / "tokenizer.json", settings)
    elif (folder / "tokenizer.model").is_file():
        try:
            backend = _from_sentencepiece(folder / "tokenizer.model", settings)
        except NotSentencePieceError as error:
            return _from_transformers(folder, f"tokenizer.model is not SentencePiece: {error}")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _from_vocab_and_merges(folder, settings)
    else:
        reason = "it has no tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
        return _from_transformers(folder, reason)
    kinds = ("tokenizer.json", "tokenizer.model", "vocab.json")
    source = next(folder / name for name in kinds if (folder / name).is_file())
    with panics_named(source):
        settings.add_tokens_to(backend)
        _set_bos_and_eos(backend, settings)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = settings.split_special_tokens
        _try(backend)
    is_bpe = isinstance(backend.model, BPE)
    return TokenizerParts(
        backend=backend,
        special_tokens={role: token.content for role, token in settings.special_tokens.items()},
        extra_special_tokens=[token.content for token in settings.extra_special_tokens],
        chat_template=settings.chat_template,
        clean_up_spaces=settings.clean_up_spaces(is_bpe),
        model_max_length=settings.model_max_length,
    )


def _try(backend: Tokenizer) -> None:
    """Some panic only when they are used. What they cannot encode is told to who sends it."""
    with contextlib.suppress(Exception):
        backend.decode(backend.encode(TRIAL_TEXT).ids)


def _from_tokenizer_json(path: Path, settings: TokenizerSettings) -> Tokenizer:
    with panics_named(path):
        text = path.read_text(encoding="utf-8")
        check_tokenizer_json(path, text)
        backend = Tokenizer.from_str(text)
    # transformers lets `legacy` and `add_prefix_space` of tokenizer_config.json decide here, where
    # older tokenizer.json files always put a space after special tokens.
    if (
        settings.tokenizer_class == "LlamaTokenizer"
        and isinstance(backend.model, BPE)
        and '"ByteLevel"' not in text
    ):
        set_llama_pipeline(backend, prefix_space=settings.prefix_space, legacy=settings.legacy)
    return backend


def _from_sentencepiece(path: Path, settings: TokenizerSettings) -> Tokenizer:
    model = read_sentencepiece(path.read_bytes())
    settings.use_sentencepiece_defaults()
    settings.extra_special_tokens += [
        added_token({"content": piece.text, "normalized": False, "special": piece.kind == CONTROL})
        for piece in model.pieces
        if piece.kind in (CONTROL, USER_DEFINED)
    ]
    if model.model_type == UNIGRAM:
        return build_unigram(model)
    return build_bpe(model, prefix_space=settings.prefix_space, legacy=settings.legacy)


def _from_vocab_and_merges(folder: Path, settings: TokenizerSettings) -> Tokenizer:
    try:
        vocab, merges = BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        model = BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="")
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(
            f"vocab.json and merges.txt in {folder} do not make a tokenizer ({error}); "
            "download the model again."
        ) from error
    backend = Tokenizer(model)
    if settings.tokenizer_class == "Qwen2Tokenizer":
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = split_then_bytes(QWEN2_SPLIT)
    else:
        add_prefix_space = bool(settings.config.get("add_prefix_space", False))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def split_then_bytes(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Cut text by one pattern after the other, then spell each part in the byte alphabet."""
    splits = (pre_tokenizers.Split(Regex(one), behavior="isolated") for one in patterns)
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, in_bytes])


def _set_bos_and_eos(backend: Tokenizer, settings: TokenizerSettings) -> None:
    """`add_bos_token` and `add_eos_token` count only where no tokenizer.json says it itself."""
    if settings.has_tokenizer_json:
        return
    roles = settings.special_tokens
    bos = roles.get("bos_token") if settings.add_bos else None
    eos = roles.get("eos_token") if settings.add_eos else None
    surround_with(backend, bos.content if bos else None, eos.content if eos else None)


def surround_with(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put `bos` before and `eos` after every text that is encoded with special tokens."""
    tokens = [token for token in (bos, eos) if token is not None]
    if not tokens:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(tokens)],
    )


def _from_transformers(folder: Path, reason: str) -> TokenizerParts:
    """The last resort: transformers knows more kinds of files than this module."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelError(
            f"the tokenizer in {folder} cannot be read: {reason}. Add a tokenizer.json to the "
            "folder, or install the package transformers, which reads more kinds of files."
        ) from None
    logger.warning("Reading the tokenizer in %s with transformers: %s.", folder, reason)
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"the tokenizer in {folder} cannot be read: {reason}, and transformers fails too "
            f"({error}). Add a tokenizer.json to the folder."
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelError(
            f"the tokenizer in {folder} is a {type(loaded).__name__}, which runs only inside "
            "transformers; add a tokenizer.json to the folder."
        )
    roles = {key: str(t) for key, t in loaded.special_tokens_map.items() if not isinstance(t, list)}
    return TokenizerParts(
        backend=backend,
        special_tokens=roles,
        extra_special_tokens=[t for t in loaded.all_special_tokens if t not in roles.values()],
        chat_template=loaded.chat_template,
        clean_up_spaces=bool(loaded.clean_up_tokenization_spaces)
        and not isinstance(backend.model, BPE),
        model_max_length=loaded.model_max_length,
    )
