"""`JsonScanner`: follows one JSON value as its text comes, and says when it ends or breaks."""

from __future__ import annotations

import json
import re

MAX_DEPTH = 200
WHITESPACE = " \t\r\n"

_PLAIN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.\w]+")
_LITERALS = ("true", "false", "null")
# Part of a number -> the part that each kind of character leads to; 0 and 1 stand for digits.
_NUMBER_PARTS = {
    "": {"-": "minus", "0": "zero", "1": "whole"},
    "minus": {"0": "zero", "1": "whole"},
    "zero": {".": "point", "e": "exponent"},
    "whole": {"0": "whole", "1": "whole", ".": "point", "e": "exponent"},
    "point": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "exponent"},
    "exponent": {"-": "sign", "+": "sign", "0": "power", "1": "power"},
    "sign": {"0": "power", "1": "power"},
    "power": {"0": "power", "1": "power"},
}
_NUMBER_ENDS = ("zero", "whole", "fraction", "power")
_CHARACTER_KINDS = {"E": "e", **dict.fromkeys("23456789", "1")}


class JsonScanner:
    """One value. `pieces` are what was read of it, with control characters in strings escaped:
    models write line breaks there, which JSON does not allow."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.complete = False
        self.broken = False
        self._open: list[str] = []
        """Closing brackets of the objects and lists around this place."""
        self._expects = "value"
        self._in_string = False
        self._escape = ""
        self._scalar = ""
        """The literal that has begun, or the part of the number that is being read."""

    def feed(self, text: str, at: int) -> int:
        """Read on from `at`; returns where the value ended or broke, or the end of the text."""
        while at < len(text) and not self.complete and not self.broken:
            if self._in_string:
                at = self._read_string(text, at)
            elif self._scalar or self._begins_scalar(text[at]):
                at = self._read_scalar(text, at)
            else:
                at = self._read_mark(text, at)
        return at

    def _begins_scalar(self, char: str) -> bool:
        return self._expects in ("value", "value or ]") and _SCALAR.match(char) is not None

    def _read_mark(self, text: str, at: int) -> int:
        char = text[at]
        if char not in WHITESPACE and not self._accept(char):
            self.broken = True
            return at
        self.pieces.append(char)
        return at + 1

    def _accept(self, char: str) -> bool:
        """Take a bracket, quote, comma or colon; False if it cannot stand here."""
        expects = self._expects
        wants_value = expects in ("value", "value or ]")
        if char == '"' and (wants_value or expects in ("key", "key or }")):
            self._in_string = True
        elif char in "{[" and wants_value and len(self._open) < MAX_DEPTH:
            self._open.append("}" if char == "{" else "]")
            self._expects = "key or }" if char == "{" else "value or ]"
        elif char == ":" and expects == "colon":
            self._expects = "value"
        elif char == "," and expects == "comma":
            self._expects = "key" if self._open[-1] == "}" else "value"
        elif (
            self._open
            and char == self._open[-1]
            and expects in ("comma", f"key or {char}", f"value or {char}")
        ):
            self._open.pop()
            self._end_value()
        else:
            return False
        return True

    def _end_value(self) -> None:
        self._expects = "comma"
        self.complete = not self._open

    def _read_string(self, text: str, at: int) -> int:
        if self._escape:
            return self._read_escape(text, at)
        plain = _PLAIN_STRING.match(text, at)
        if plain is not None:
            self.pieces.append(plain[0])
            return plain.end()
        char = text[at]
        if char == "\\":
            self._escape = char
            self.pieces.append(char)
        elif char == '"':
            self.pieces.append(char)
            self._in_string = False
            if self._expects in ("key", "key or }"):
                self._expects = "colon"
            else:
                self._end_value()
        else:
            self.pieces.append(json.dumps(char)[1:-1])
        return at + 1

    def _read_escape(self, text: str, at: int) -> int:
        char = text[at]
        self._escape += char
        if not re.fullmatch(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{0,4})', self._escape):
            self.broken = True
            return at
        if self._escape[1] != "u" or len(self._escape) == 6:
            self._escape = ""
        self.pieces.append(char)
        return at + 1

    def _read_scalar(self, text: str, at: int) -> int:
        more = _SCALAR.match(text, at)
        if more is None:
            whole = self._scalar in _LITERALS or self._scalar in _NUMBER_ENDS
            self._scalar = ""
            self.broken = not whole
            self._end_value()
            self.complete = self.complete and whole
            return at
        for end in range(at, more.end()):
            longer = self._longer_scalar(text[end])
            if longer is None:
                self.broken = True
                return end
            self._scalar = longer
            self.pieces.append(text[end])
        return more.end()

    def _longer_scalar(self, char: str) -> str | None:
        """The scalar with one more character: a literal as far as it goes, or the part of a number;
        None if there is no such scalar."""
        if self._scalar in _NUMBER_PARTS:
            kind = _CHARACTER_KINDS.get(char, char)
            if part := _NUMBER_PARTS[self._scalar].get(kind):
                return part
        longer = self._scalar + char
        return longer if any(one.startswith(longer) for one in _LITERALS) else None
