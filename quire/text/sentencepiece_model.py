"""Reads SentencePiece's `tokenizer.model` and builds the pipeline that tokenises as it does.

The file is a protobuf message; only its wire format and the few fields that matter are known here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

SPACE = "\u2581"
"""The character that stands for a space inside pieces."""

UNIGRAM, CHAR_PAIRS = 1, 2
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
"""Kinds of pieces; GGUF files use the same numbers."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class NotSentencePieceError(ValueError):
    """The file is not a SentencePiece model, or is damaged."""


@dataclass(frozen=True)
class Piece:
    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass
class SentencePieceModel:
    """The parts of a `tokenizer.model` that decide how text is cut."""

    pieces: list[Piece] = field(default_factory=list)
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    charsmap: bytes = b""
    """Compiled character replacements (normalisation); empty for none."""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def read_sentencepiece(data: bytes) -> SentencePieceModel:
    """Parse the bytes of a `tokenizer.model`."""
    model = SentencePieceModel()
    try:
        for number, value in _fields(memoryview(data)):
            if number == 1:
                model.pieces.append(_piece(_message(value)))
            elif number == 2:
                for key, item in _fields(_message(value)):
                    if key == 3:
                        model.model_type = _integer(item)
                    elif key == 35:
                        model.byte_fallback = bool(item)
                    elif key == 40:
                        model.unk_id = _integer(item)
            elif number == 3:
                for key, item in _fields(_message(value)):
                    if key == 2:
                        model.charsmap = bytes(_message(item))
                    elif key == 3:
                        model.add_dummy_prefix = bool(item)
                    elif key == 4:
                        model.remove_extra_whitespaces = bool(item)
    except (IndexError, UnicodeDecodeError, struct.error) as error:
        raise NotSentencePieceError(f"its protobuf message breaks off ({error})") from error
    if not model.pieces:
        raise NotSentencePieceError("it holds no pieces")
    if model.model_type not in (UNIGRAM, CHAR_PAIRS):
        raise NotSentencePieceError(
            f"its model type is {model.model_type}, neither unigram nor BPE"
        )
    if not 0 <= model.unk_id < len(model.pieces):
        raise NotSentencePieceError(f"unk_id is {model.unk_id} of {len(model.pieces)} pieces")
    _check_charsmap(model.charsmap)
    return model


def _check_charsmap(charsmap: bytes) -> None:
    """The length of a trie, the trie and the replacements it points to. `tokenizers` follows them
    unchecked: it ends the process over a length, and panics at a text over a place outside."""
    if not charsmap:
        return
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 4 or size % 4 or not 0 < size <= len(charsmap) - 4:
        raise NotSentencePieceError(
            f"its character replacements announce {size} bytes but have {len(charsmap)}"
        )
    units = np.frombuffer(charsmap, "<u4", size // 4, 4).astype(np.int64)
    texts = np.frombuffer(charsmap, np.uint8, offset=4 + size)
    is_leaf = units >> 31 == 1
    children = np.arange(len(units)) ^ (units >> 10 << ((units & 0x200) >> 6))
    leads_outside = ~is_leaf & (children | 0xFF >= len(units))
    places = units[is_leaf] & 0x7FFFFFFF
    if leads_outside.any() or (places >= len(texts)).any():
        raise NotSentencePieceError("its character replacements lead outside of the file")
    begins_inside = texts[places] & 0xC0 == 0x80
    if begins_inside.any() or (len(places) and texts[-1] != 0):
        raise NotSentencePieceError("its character replacements are no texts")


def _piece(message: memoryview) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(message):
        if number == 1:
            text = bytes(_message(value)).decode("utf-8")
        elif number == 2:
            score = struct.unpack("<f", _message(value))[0]
        elif number == 3:
            kind = _integer(value)
    return Piece(text, score, kind)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value) pairs of one message."""
    position, end = 0, len(data)
    while position < end:
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            size, position = _varint(data, position)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise NotSentencePieceError(f"wire type {kind} at byte {position} is not protobuf")
        if position + size > end:
            raise NotSentencePieceError(f"a field of {size} bytes at byte {position} is cut off")
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    result, shift = 0, 0
    while shift < 64:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
    raise NotSentencePieceError(f"the number at byte {position} is longer than 64 bits")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise NotSentencePieceError("a number stands where bytes should be")
    return value


def _integer(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise NotSentencePieceError("bytes stand where a number should be")
    return value


def merges_by_rank(pieces: Sequence[str], ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece out of two others; pieces given first are made first."""
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]


def build_bpe(model: SentencePieceModel, *, prefix_space: bool, legacy: bool) -> Tokenizer:
    """As transformers' LlamaTokenizer does, which leaves out the file's charsmap."""
    vocab = {piece.text: index for index, piece in enumerate(model.pieces)}
    bpe = BPE(
        vocab=vocab,
        merges=merges_by_rank(list(vocab), vocab),
        unk_token=model.pieces[model.unk_id].text,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    set_llama_pipeline(tokenizer, prefix_space=prefix_space, legacy=legacy)
    return tokenizer


def set_llama_pipeline(tokenizer: Tokenizer, *, prefix_space: bool, legacy: bool) -> None:
    """Spaces become `SPACE`, and one is put before the text unless it starts with one.

    The legacy way also puts one before what follows a special token.
    """
    scheme = ("always" if legacy else "first") if prefix_space else "never"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme, split=False
    )
    tokenizer.decoder = piece_decoder(strip_first_space=prefix_space)


def build_unigram(model: SentencePieceModel) -> Tokenizer:
    """The most likely cut, as SentencePiece finds it, with the file's own normalisation."""
    vocab = [(piece.text, piece.score) for piece in model.pieces]
    tokenizer = Tokenizer(Unigram(vocab, unk_id=model.unk_id, byte_fallback=model.byte_fallback))
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(_replacements(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps + space_steps(model.add_dummy_prefix))
    tokenizer.decoder = piece_decoder(strip_first_space=model.add_dummy_prefix)
    return tokenizer


def _replacements(charsmap: bytes) -> normalizers.Normalizer:
    try:
        return normalizers.Precompiled(charsmap)
    # `tokenizers` raises plain Exception for what it cannot read.
    except Exception as error:
        raise NotSentencePieceError(str(error)) from error


def space_steps(prefix_space: bool) -> list[normalizers.Normalizer]:
    """SentencePiece's own treatment of spaces: one is always put before, whatever the text."""
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix_space else []
    return [*steps, normalizers.Replace(" ", SPACE)]


def piece_decoder(*, strip_first_space: bool) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if strip_first_space:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)
