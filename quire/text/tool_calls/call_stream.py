"""`CallStream`: finds tool calls in text as it comes."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection

from quire.config.reply_formats import ToolFormat
from quire.text.deltas import CallDelta, Delta, TextDelta, overlap
from quire.text.tool_calls.call_scanner import CallScanner
from quire.text.tool_calls.json_scanner import WHITESPACE

_LINE_START = re.compile(r"\n[ \t]*([{\[])")
_NAMED_CALL = re.compile(r"([\w.:-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?(?={)")
MAX_NAMED = 300
"""Characters before the arguments of a call that is its name and then its arguments."""
_MAYBE_NAMED_CALL = re.compile(rf"[\w.:\-\[\]\s]{{0,{MAX_NAMED}}}")
PIECE = 4096
"""Longer text is read in pieces of so many characters: a search goes through all that is left."""


class CallStream:
    """Takes one text apart into content and calls, whatever the pieces it comes in.

    Text is held back while it may still become a call. Once a call is certain its arguments are
    passed on as they come; a call that breaks before that is content after all. White space around
    calls belongs to neither: text before and behind them is joined by a line break.
    """

    def __init__(
        self, format: ToolFormat, names: Collection[str], max_calls: int | None = None
    ) -> None:
        self._format = format
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._text = ""
        """What came and was not passed on yet."""
        self._at = 0
        """Up to here it was looked at."""
        self._attempt = 1
        """How much of it is content for sure if this is no call."""
        self._mode: Callable[[bool], bool] = self._read_content
        self._scanner: CallScanner | None = None
        self._is_begun = False
        """Whether the call that is being read was passed on."""
        self._in_list = False
        self._at_start = True
        """Whether the text begins here, or a call has just ended."""
        self._has_content = False
        self._deltas: list[Delta] = []
        self.num_calls = 0
        """How many have ended."""

    @property
    def has_calls(self) -> bool:
        """Whether any call was passed on, be it unfinished."""
        return self.num_calls > 0 or self._is_begun

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        for start in range(0, len(text), PIECE):
            self._text += text[start : start + PIECE]
            deltas += self._run(final=False)
        return deltas

    def finish(self) -> list[Delta]:
        """No more text will come: all that was held back is decided on."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[Delta]:
        while self._mode(final):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    # --- modes: each reads on, and returns whether there may be more to read ---------------------

    def _read_content(self, final: bool) -> bool:
        start, end = self._find_start()
        if start >= 0:
            shown = len(self._text[:start].rstrip())
            self._emit_content(shown)
            self._at, self._attempt = end - shown, max(end, start + 1) - shown
            self._in_list = False
            self._mode = self._read_section
            return True
        if final:
            if self.num_calls == 0 or self._text.strip():
                self._emit_content(len(self._text))
            self._text = ""
            return False
        held = overlap(self._text, *self._format.openers)
        self._emit_content(len(self._text[: len(self._text) - held].rstrip()))
        return False

    def _read_section(self, final: bool) -> bool:
        """A call should begin here."""
        self._skip_whitespace()
        if self._at == len(self._text):
            return self._give_up() if final else False
        char = self._text[self._at]
        if char == "[" and not self._in_list:
            self._in_list = True
            self._at += 1
        elif char == "{":
            self._begin_call(CallScanner(self._accepts, is_marked=not self._format.is_bare))
        elif self._format.names_first and not self._in_list:
            self._mode = self._read_name
        else:
            return self._give_up()
        return True

    def _read_name(self, final: bool) -> bool:
        if "{" not in self._text[self._at :]:
            possible = _MAYBE_NAMED_CALL.fullmatch(self._text, self._at)
            return False if possible and not final else self._give_up()
        match = _NAMED_CALL.match(self._text, self._at)
        if match is None or match.end() - self._at > MAX_NAMED:
            return self._give_up()
        self._at = match.end()
        self._begin_call(CallScanner.of_arguments(match[1]))
        return True

    def _read_call(self, final: bool) -> bool:
        scanner = self._scanner
        assert scanner is not None
        self._at = scanner.feed(self._text, self._at)
        if not scanner.certain:
            return self._give_up() if scanner.broken or final else False
        if not self._is_begun:
            self._is_begun = True
            self._emit_call(new_call_id(self._format), scanner.name)
        self._drop(self._at)
        if arguments := scanner.take_arguments():
            self._emit_arguments(arguments)
        if scanner.complete or (scanner.broken and scanner.arguments_complete):
            self._end_call()
            return True
        if scanner.broken:
            self._mode = self._read_broken_arguments
            return True
        return False

    def _read_broken_arguments(self, final: bool) -> bool:
        """The arguments have begun and are no JSON: they are passed on as they are."""
        found = [at for one in self._format.closers if (at := self._text.find(one)) >= 0]
        if found:
            end = min(found)
        else:
            held = overlap(self._text, *self._format.closers)
            end = len(self._text) - (0 if final else held)
        if end:
            self._emit_arguments(self._text[:end])
            self._drop(end)
        if found:
            self._end_call()
        return bool(found)

    def _read_between(self, final: bool) -> bool:
        """A call has ended: its marker may follow, or another call."""
        self._skip_whitespace()
        rest = self._text[self._at :]
        closer = next((one for one in self._format.closers if rest.startswith(one)), None)
        if closer is not None:
            self._drop(self._at + len(closer))
            self._in_list = False
            self._mode = self._read_content
        elif any(one.startswith(rest) for one in (*self._format.closers, "")):
            if final:
                self._drop(len(self._text))
            return False
        elif rest[0] == "}" or (rest[0] == "]" and self._in_list):
            self._in_list = self._in_list and rest[0] != "]"
            self._drop(self._at + 1)
        elif rest[0] == "{" and (self._in_list or self._format.is_bare or self._format.closers):
            self._attempt = self._at + 1
            self._begin_call(CallScanner(self._accepts, is_marked=not self._format.is_bare))
        elif rest[0] in ("," if self._in_list else self._format.separators) and self._at == 0:
            self._at = 1
        else:
            self._at = 0
            self._mode = self._read_content
        return True

    # --- inside ---------------------------------------------------------------------------------

    def _accepts(self, name: str) -> bool:
        return not self._format.is_bare or name in self._names

    def _find_start(self) -> tuple[int, int]:
        """Where a call may begin, and where its marker ends if it has one; -1 if nowhere."""
        found = [
            (at, at + len(one)) for one in self._format.openers if (at := self._text.find(one)) >= 0
        ]
        if self._format.is_bare and (at := self._find_bare_start()) >= 0:
            found.append((at, at))
        return min(found, default=(-1, -1))

    def _find_bare_start(self) -> int:
        """The first bracket that begins a line. White space that was held back is not searched
        again: models that get stuck write much of it."""
        text = self._text
        blank = len(text) - len(text.lstrip())
        line = text.rfind("\n", 0, blank)
        begins_line = (line >= 0 or self._at_start) and text.startswith(("{", "["), blank)
        if begins_line and not text[line + 1 : blank].strip(" \t"):
            return blank
        match = _LINE_START.search(text, blank)
        return match.start(1) if match else -1

    def _skip_whitespace(self) -> None:
        """Between calls it belongs to none, and is dropped where nothing is held back."""
        while self._at < len(self._text) and self._text[self._at] in WHITESPACE:
            self._at += 1
        if self._mode == self._read_between and not self._text[: self._at].strip():
            self._drop(self._at)

    def _begin_call(self, scanner: CallScanner) -> None:
        self._scanner = scanner
        self._is_begun = False
        self._mode = self._read_call

    def _end_call(self) -> None:
        self.num_calls += 1
        self._at_start = True
        self._mode = self._read_between

    def _give_up(self) -> bool:
        """This is no call: what began it is content, the rest is looked at again."""
        self._emit_content(self._attempt)
        self._mode = self._read_content
        return True

    def _emit_content(self, end: int) -> None:
        text = self._text[:end]
        self._drop(end)
        if self.num_calls and self._at_start:
            text = text.lstrip()
            if text and self._has_content:
                text = "\n" + text
        if text:
            self._at_start, self._has_content = False, True
            self._deltas.append(TextDelta(text))

    def _emit_call(self, call_id: str, name: str) -> None:
        if self._is_wanted:
            self._deltas.append(CallDelta(self.num_calls, "", call_id, name))

    def _emit_arguments(self, text: str) -> None:
        if self._is_wanted:
            self._deltas.append(CallDelta(self.num_calls, text))

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls < self._max_calls

    def _drop(self, end: int) -> None:
        self._text, self._at = self._text[end:], 0


def new_call_id(format: ToolFormat) -> str:
    if format.has_short_ids:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
