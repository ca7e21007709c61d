"""`IncrementalDetokenizer`: the text of one output as its tokens come, cut at stop strings.

The pieces of text add up to what decoding all tokens at once gives. How text can be cut depends on
the tokenizer's decoder. Byte-level tokens are bytes: a character is settled once its last byte is
there. SentencePiece tokens are words, and runs of byte tokens for rare characters: one bad byte
spoils its whole run, so a run is settled when it ends, is spoilt, or grows long. For any other
decoder a window of recent tokens is decoded again and compared.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
from tokenizers import Tokenizer as Backend

from quire.protocol.plan import Int32Array
from quire.protocol.sampling import SamplingParams
from quire.text.sentencepiece_model import SPACE

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
MAX_HELD_TOKENS = 8
"""Four tokens can hold the bytes of one character; some slack for decoders that need more."""

MAX_RUN_BYTES = 24
"""Scripts without spaces can be one run of bytes for whole sentences; readers should not wait."""

T = TypeVar("T")

Piece = bytes | str
"""What one token stands for: raw bytes, or text."""


class IncrementalDetokenizer:
    """Text of one output. The work per token does not depend on how many came before.

    A stop string ends the text as soon as its last character is there; of two that end at the same
    character the longer one counts. So the result is the same however the tokens are portioned.
    """

    def __init__(
        self,
        streams: TextStreams,
        prompt_token_ids: Sequence[int] | Int32Array,
        params: SamplingParams,
    ) -> None:
        self._stream = streams.open(
            prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        self._stop_strings = params.stop_strings
        self._longest = max(map(len, self._stop_strings), default=0)
        self._includes_stop = params.include_stop_str_in_output
        # What may become a stop string is not shown, unless stop strings are shown anyway.
        self._hold_back = 0 if self._includes_stop else max(self._longest - 1, 0)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._settled: list[str] = []
        self._unread: list[str] = []
        """The part of the settled text that `delta` has not returned yet."""
        self._length = 0
        self._recent = ""
        """The end of the settled text: as much as a stop string can reach back."""
        self._floor = 0
        """A stop string must end after this character; set by `min_tokens`."""
        self._finished = False
        self.stop: str | None = None
        """The stop string that ended the text."""

    def append(self, token_ids: Sequence[int] | Int32Array) -> str | None:
        """Take further tokens. Returns the stop string found, if any; the text is then final."""
        if self._finished:
            return self.stop
        ids: list[int] = (
            token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
        )
        missing = self._min_tokens - self._num_tokens
        self._num_tokens += len(ids)
        if missing > 0:
            self._keep(self._stream.push(ids[:missing]))
            self._floor = self._length + len(self._stream.tail())
            ids = ids[missing:]
        if ids:
            text = self._stream.push(ids)
            self._accept(text, self._stream.tail() if self._stop_strings else "")
        return self.stop

    def finish(self) -> None:
        """No more tokens will come: all text may be shown, complete characters or not."""
        if not self._finished:
            text = self._stream.flush()
            if self._num_tokens > self._min_tokens:
                self._accept(text, "")
            else:
                self._keep(text)
            self._finished = True

    @property
    def text(self) -> str:
        """All text that may be shown."""
        self._settled = ["".join(self._settled)]
        text = self._settled[0]
        return text if self._finished else text[: max(self._length - self._hold_back, 0)]

    def delta(self, finished: bool) -> str:
        """Text that may be shown and was not in an earlier delta."""
        if finished:
            self.finish()
        text = "".join(self._unread)
        end = len(text) if self._finished else max(len(text) - self._hold_back, 0)
        self._unread = [text[end:]]
        return text[:end]

    def _accept(self, text: str, tail: str) -> None:
        """Keep new settled text, up to a stop string. `tail` may hold the rest of one."""
        found = self._find_stop(self._recent + text + tail) if text or tail else None
        self._keep(text)
        if found is None:
            return
        start, self.stop = found
        self._keep(tail)
        end = start + (len(self.stop) if self._includes_stop else 0)
        read = self._length - sum(map(len, self._unread))
        whole = "".join(self._settled)[:end]
        self._settled, self._unread = [whole], [whole[read:]]
        self._length = len(whole)
        self._finished = True

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string starts and which it is; `text` begins with `_recent`."""
        base = self._length - len(self._recent)
        matches = []
        for stop in self._stop_strings:
            start = text.find(stop, max(self._floor - base - len(stop) + 1, 0))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        _, start, stop = min(matches)
        return base + start, stop

    def _keep(self, text: str) -> None:
        if text:
            self._settled.append(text)
            self._unread.append(text)
            self._length += len(text)
        if self._longest > 1:
            self._recent = (self._recent + text)[-(self._longest - 1) :]


class TextStream(Protocol):
    """The text of one growing sequence of tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens settle for good."""

    def tail(self) -> str:
        """Further text if the sequence ended here and is whole; "" where bytes are missing."""

    def flush(self) -> str:
        """All further text: the sequence has ended."""


class TextStreams:
    """Opens streams for one tokenizer and holds the tables that they share."""

    def __init__(
        self, backend: Backend, decode: Callable[[list[int]], str], cleans_up_spaces: bool
    ) -> None:
        """`decode` gives the whole text of tokens, cleaned up if the tokenizer does that."""
        self._backend = backend
        self._decode = decode
        self._scheme = None if cleans_up_spaces else _scheme(backend)
        self._tables: dict[bool, TokenTable[Any]] = {}
        """By whether special tokens are skipped."""

    def open(
        self,
        prompt_token_ids: Sequence[int] | Int32Array,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> TextStream:
        """A stream whose text continues the prompt's. Only decoders that need a window put spaces
        between tokens."""
        if self._scheme is None:
            hidden = self._hidden if skip_special_tokens else frozenset()
            spaces = skip_special_tokens or spaces_between_special_tokens
            decode = self._decode if spaces else self._decode_without_spaces
            return WindowStream(decode, prompt_token_ids, hidden)
        if self._scheme == "bytes":
            return ByteStream(self._table(skip_special_tokens, _spelled_bytes, b""))
        pieces = self._table(skip_special_tokens, _piece, None)
        starts_text = self._scheme == "pieces-stripped" and not any(
            pieces[int(token)] is not None for token in reversed(prompt_token_ids)
        )
        return PieceStream(pieces, strip_space=starts_text)

    def _decode_without_spaces(self, token_ids: list[int]) -> str:
        """Text in which an added token directly follows the added token before it."""
        added = self._added
        cuts = [
            i
            for i, (before, token) in enumerate(pairwise(token_ids), 1)
            if before in added and token in added
        ]
        bounds = pairwise([0, *cuts, len(token_ids)])
        return "".join(self._decode(token_ids[first:end]) for first, end in bounds)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _hidden(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def _table(self, skip_special_tokens: bool, read: Callable[[str], T], nothing: T) -> Any:
        if skip_special_tokens not in self._tables:
            hidden = self._hidden if skip_special_tokens else frozenset[int]()
            self._tables[skip_special_tokens] = TokenTable(self._backend, hidden, read, nothing)
        return self._tables[skip_special_tokens]


class TokenTable(dict[int, T]):
    """Token id -> what it stands for, filled as ids come up; `nothing` for tokens that are hidden
    or unknown."""

    def __init__(
        self, backend: Backend, hidden: frozenset[int], read: Callable[[str], T], nothing: T
    ) -> None:
        self._backend = backend
        self._hidden = hidden
        self._read = read
        self._nothing = nothing

    def __missing__(self, token: int) -> T:
        text = None if token in self._hidden else self._backend.id_to_token(token)
        self[token] = self._nothing if text is None else self._read(text)
        return self[token]


class ByteStream:
    """Byte-level tokens."""

    def __init__(self, table: TokenTable[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._table.__getitem__, token_ids)))

    def tail(self) -> str:
        return ""

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class PieceStream:
    """SentencePiece tokens with byte fallback."""

    def __init__(self, pieces: TokenTable[Piece | None], strip_space: bool) -> None:
        self._pieces = pieces
        self._run = b""
        self._is_spoilt = False
        self._strip_space = strip_space

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        text: list[str] = []
        for token in token_ids:
            piece = pieces[token]
            if isinstance(piece, bytes):
                text.append(self._take_byte(piece))
            elif piece is not None:
                if self._run or self._is_spoilt:
                    text.append(self._end_run())
                text.append(piece)
        return self._stripped("".join(text))

    def tail(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            return ""
        return text.removeprefix(" ") if self._strip_space else text

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _take_byte(self, byte: bytes) -> str:
        """What one more byte of a run settles."""
        if self._is_spoilt:
            return REPLACEMENT
        self._run += byte
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            text = self._end_run()
            self._is_spoilt = True
            return text
        if len(self._run) < MAX_RUN_BYTES:
            return ""
        self._run = b""
        return text

    def _end_run(self) -> str:
        run, self._run, self._is_spoilt = self._run, b"", False
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """Text at the very start of a sequence carries one space that the encoder put there."""
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


class WindowStream:
    """Any decoder: decodes a window of recent tokens and takes what is new."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: Iterable[int],
        hidden: frozenset[int],
    ) -> None:
        self._decode = decode
        self._hidden = hidden
        self._context = self._visible(prompt_token_ids)[-CONTEXT_TOKENS:]
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._held += self._visible(token_ids)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._held) <= MAX_HELD_TOKENS:
            return ""
        return self._settle(text)

    def tail(self) -> str:
        text = self._new_text()
        return "" if text.endswith(REPLACEMENT) else text

    def flush(self) -> str:
        return self._settle(self._new_text())

    def _visible(self, token_ids: Iterable[int]) -> list[int]:
        return [int(token) for token in token_ids if token not in self._hidden]

    def _new_text(self) -> str:
        if not self._held:
            return ""
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        return after[_common_prefix(before, after) :]

    def _settle(self, text: str) -> str:
        self._context = (self._context + self._held)[-CONTEXT_TOKENS:]
        self._held = []
        return text


def _scheme(backend: Backend) -> str | None:
    """Which stream fits: "bytes", "pieces", "pieces-stripped", or None for the window."""
    decoder = backend.decoder
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return "bytes"
    if names[:3] != ["Replace", "ByteFallback", "Fuse"] or len(names) > 4:
        return None
    if steps[0]["pattern"] != {"String": SPACE} or steps[0]["content"] != " ":
        return None
    if len(names) == 3:
        return "pieces"
    strips_one = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return "pieces-stripped" if steps[3] == strips_one else None


def _piece(text: str) -> Piece | None:
    text = text.replace(SPACE, " ")
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes.fromhex(text[3:5])
        except ValueError:
            return text
    return text


def _common_prefix(first: str, second: str) -> int:
    if second.startswith(first):
        return len(first)
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling: printable bytes are themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTE_ALPHABET = _byte_alphabet()


def _spelled_bytes(text: str) -> bytes:
    """The bytes that a byte-level token spells; added tokens may be plain text instead."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in text])
    except KeyError:
        return text.encode("utf-8")
