"""`FormFields`: where a client wrote what the engine calls `structured_outputs`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_LINE = re.compile(r"structured_outputs\.grammar is refused: line (\d+): ")
_WHOLE = re.compile(r"structured_outputs(\.[a-z_]+)?")


@dataclass(frozen=True)
class FormFields:
    """The names that errors are to have."""

    whole: str | None = None
    """Of the form; None: that of the engine."""
    lines: Mapping[int, str] = field(default_factory=dict)
    """Of the schemas in a grammar that was made here, by its lines."""

    def named(self, message: str) -> str:
        """An error of the engine with the client's name for what it is about."""
        line = _LINE.match(message)
        if line is not None and int(line[1]) in self.lines:
            return f"{self.lines[int(line[1])]} is refused: {message[line.end() :]}"
        whole = _WHOLE.match(message)
        if whole is None or self.whole is None:
            return message
        return self.whole + message[whole.end() :]
