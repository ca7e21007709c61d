"""Builds a tokenizer from the metadata of a GGUF file; llama.cpp's reading of it is the measure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from quire.protocol.errors import ModelError
from quire.text.sentencepiece_model import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    merges_by_rank,
    piece_decoder,
    space_steps,
)
from quire.text.tokenizer_files import (
    QWEN2_SPLIT,
    TokenizerParts,
    split_then_bytes,
    surround_with,
)

logger = logging.getLogger(__name__)

LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + CONTRACTIONS
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
IDEOGRAPHS = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEVERAL_SPLITS = {
    "deepseek-v3": (r"\p{N}{1,3}", IDEOGRAPHS, DEEPSEEK3_WORDS),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    ),
}
"""Values of `tokenizer.ggml.pre` that cut text by one pattern after the other."""
SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2_SPLIT),
    "tekken": TEKKEN_SPLIT,
    "gpt-4o": O200K_SPLIT,
}
"""Values of `tokenizer.ggml.pre` that cut text by one pattern."""
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")
"""Those that set every digit apart and then cut as GPT-2 does."""
AS_GPT2 = ("gpt-2", "default", "phi-2", "mpt", "olmo", "jais")
"""Those that cut as GPT-2 does. Old files, which do not say, were mostly made from such models."""

WHOLE_WORDS_FIRST = (*(name for name, split in SPLITS.items() if split == LLAMA3_SPLIT), "tekken")
"""Those whose words are taken whole where the vocabulary has them, whatever the merges say."""

ROLE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


def read_gguf(metadata: Mapping[str, Any], name: str) -> TokenizerParts:
    """The tokenizer that a GGUF file's metadata describes; `name` is for messages."""
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata or kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{name}: tokenizer.ggml.model is {kind!r}; Quire reads GGUF tokenizers of the kinds "
            "'gpt2' and 'llama'. Name a folder with a tokenizer.json in the tokenizer option."
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = list(metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens)))
    if len(kinds) != len(tokens):
        raise ModelError(
            f"{name}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens; "
            "convert the model again."
        )
    try:
        build = _byte_level if kind == "gpt2" else _sentencepiece
        backend = build(metadata, tokens, name)
    except ModelError:
        raise
    # `tokenizers` raises plain Exception for whatever it cannot build.
    except Exception as error:
        raise ModelError(
            f"{name}: its tokens and merges do not make a tokenizer ({error}); "
            "convert the model again."
        ) from error
    roles = _roles(metadata, tokens, name)
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    named = dict.fromkeys([*control, *roles.values()])
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in named])
    backend.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == USER_DEFINED and token not in named
        ]
    )
    _set_bos_and_eos(backend, metadata, roles, is_sentencepiece=kind == "llama")
    return TokenizerParts(
        backend=backend,
        special_tokens=roles,
        extra_special_tokens=control,
        chat_template=_chat_template(metadata),
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], name: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab, merges, ignore_merges=pre in WHOLE_WORDS_FIRST))
    backend.decoder = decoders.ByteLevel()
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in SPLITS:
        backend.pre_tokenizer = split_then_bytes(SPLITS[pre])
        if SPLITS[pre] == QWEN2_SPLIT:
            backend.normalizer = normalizers.NFC()
    elif pre in SEVERAL_SPLITS:
        backend.pre_tokenizer = split_then_bytes(*SEVERAL_SPLITS[pre])
    elif pre in DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    else:
        backend.pre_tokenizer = gpt2
        if pre not in AS_GPT2:
            logger.warning(
                "%s: tokenizer.ggml.pre is %r, which Quire does not know; text is cut as for "
                "'gpt-2', so that its tokens may differ from the model's own. Known: %s.",
                name,
                pre,
                ", ".join([*SPLITS, *SEVERAL_SPLITS, *DIGITS_APART, *AS_GPT2]),
            )
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], name: str) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ModelError(f"{name}: tokenizer.ggml.scores is missing; convert the model again.")
    best_first = sorted(vocab, key=lambda token: -scores[vocab[token]])
    unknown = int(metadata.get("tokenizer.ggml.unknown_token_id", 0))
    bpe = BPE(
        vocab,
        merges_by_rank(best_first, vocab),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(bpe)
    prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.normalizer = normalizers.Sequence(space_steps(prefix_space))
    backend.decoder = piece_decoder(strip_first_space=prefix_space)
    return backend


def _roles(metadata: Mapping[str, Any], tokens: list[str], name: str) -> dict[str, str]:
    roles = {}
    for role, key in ROLE_KEYS.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise ModelError(
                f"{name}: tokenizer.ggml.{key} is {index}, outside its vocabulary of "
                f"{len(tokens)}; convert the model again."
            )
        roles[role] = tokens[index]
    return roles


def _set_bos_and_eos(
    backend: Tokenizer, metadata: Mapping[str, Any], roles: dict[str, str], is_sentencepiece: bool
) -> None:
    bos_by_default = is_sentencepiece or metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS_FIRST
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", bos_by_default)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    surround_with(
        backend,
        roles.get("bos_token") if add_bos else None,
        roles.get("eos_token") if add_eos else None,
    )


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The default template, and those kept under `tokenizer.chat_template.<name>`."""
    default = metadata.get("tokenizer.chat_template")
    names = list(metadata.get("tokenizer.chat_templates", ()))
    named = {
        str(name): metadata[f"tokenizer.chat_template.{name}"]
        for name in names
        if f"tokenizer.chat_template.{name}" in metadata
    }
    if not named:
        return default
    return {**({"default": default} if default is not None else {}), **named}
