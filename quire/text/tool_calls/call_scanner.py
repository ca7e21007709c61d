"""`CallScanner`: reads one tool call, an object with a name and arguments, as its text comes."""

from __future__ import annotations

import json
from collections.abc import Callable

from quire.text.tool_calls.json_scanner import WHITESPACE, JsonScanner

ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("id", "type")
"""Keys that say nothing about a call, but do not speak against it either."""


class CallScanner:
    """One call. It is `certain` once it has a name and its arguments have begun: until then the
    text may still turn out to be something else, after that it stays a call."""

    def __init__(self, accepts: Callable[[str], bool], *, is_marked: bool) -> None:
        self._accepts = accepts
        self._is_marked = is_marked
        """Whether a marker has said already that this is a call."""
        self._reading = "start"
        self._value = JsonScanner()
        self._key = ""
        self._is_arguments_only = False
        self._arguments: list[str] = []
        """Pieces of the arguments that were not taken yet."""
        self._arguments_are_object = False
        self._has_arguments = False
        self.name = ""
        self.arguments_complete = False
        self.complete = False
        self.broken = False

    @classmethod
    def of_arguments(cls, name: str) -> CallScanner:
        """Reads the arguments of a call whose name is known."""
        scanner = cls(lambda name: True, is_marked=True)
        scanner.name, scanner._key = name, "arguments"
        scanner._reading, scanner._is_arguments_only = "before value", True
        return scanner

    @property
    def certain(self) -> bool:
        return bool(self.name) and self._has_arguments

    def take_arguments(self) -> str:
        """Arguments that were not taken yet."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str, at: int) -> int:
        """Read on from `at`; returns where the call ended or broke, or the end of the text."""
        while at < len(text) and not self.complete and not self.broken:
            at = self._read(text, at)
        return at

    def _read(self, text: str, at: int) -> int:
        reading, char = self._reading, text[at]
        if reading in ("key", "value"):
            return self._read_value(text, at)
        if char in WHITESPACE:
            return at + 1
        if reading == "before value" or (char == '"' and reading.startswith("before key")):
            self._value = JsonScanner()
            self._reading = reading.split()[1]
            if self._key in ARGUMENT_KEYS and self._reading == "value":
                self._begin_arguments(char)
            return at
        following = {
            ("start", "{"): "before key or end",
            ("before colon", ":"): "before value",
            ("after value", ","): "before key",
        }.get((reading, char))
        if following is not None:
            self._reading = following
        elif char == "}" and reading in ("after value", "before key or end"):
            self._end()
        else:
            self.broken = True
            return at
        return at + 1

    def _read_value(self, text: str, at: int) -> int:
        value = self._value
        at = value.feed(text, at)
        if self._reading == "value" and self._streams_arguments:
            self._arguments += value.pieces
            value.pieces.clear()
            self._has_arguments = True
        if value.broken:
            self.broken = True
        elif value.complete and self._reading == "key":
            self._end_key(json.loads("".join(value.pieces)))
        elif value.complete:
            self._end_value("".join(value.pieces))
        return at

    def _end_key(self, key: str) -> None:
        self._key = key
        self._reading = "before colon"
        known = ("name", *ARGUMENT_KEYS, *OTHER_KEYS)
        self.broken = not (self._is_marked or self.certain or key in known)

    @property
    def _streams_arguments(self) -> bool:
        is_first = self._key in ARGUMENT_KEYS and not self.arguments_complete
        return is_first and self._arguments_are_object

    def _begin_arguments(self, char: str) -> None:
        self._arguments_are_object = char == "{"
        if self._is_arguments_only and not self._arguments_are_object:
            self.broken = True

    def _end_value(self, text: str) -> None:
        self._reading = "after value"
        if self._key == "name" and not self.name:
            name = _string(text) if text.startswith('"') else ""
            if name and self._accepts(name):
                self.name = name
            else:
                self.broken = True
        elif self._key in ARGUMENT_KEYS and not self.arguments_complete:
            if not self._arguments_are_object:
                self._set_arguments(text)
            self.arguments_complete = not self.broken
        if self._is_arguments_only:
            self.complete = True

    def _set_arguments(self, text: str) -> None:
        """Some models write the arguments as JSON in a string, or null for none."""
        arguments = _string(text) if text.startswith('"') else "{}"
        try:
            is_object = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            is_object = False
        if is_object and (text.startswith('"') or text == "null"):
            self._arguments, self._has_arguments = [arguments], True
        else:
            self.broken = True

    def _end(self) -> None:
        if not self._has_arguments and self._is_marked:
            self._arguments, self._has_arguments, self.arguments_complete = ["{}"], True, True
        self.complete = self.certain
        self.broken = not self.certain


def _string(text: str) -> str:
    """The string that JSON text means. It may escape half a character, which no reply can hold."""
    return str(json.loads(text)).encode("utf-8", "replace").decode()
