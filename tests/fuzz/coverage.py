"""Which lines of Quire an input reaches: those that reach new ones are worth building on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import quire

PACKAGE = str(Path(quire.__file__).parent)


class LineCoverage:
    """Lines run inside `with`, on this thread. Functions whose lines were all seen cost nothing."""

    def __init__(self) -> None:
        self._unseen: dict[CodeType, set[int]] = {}
        self.num_lines = 0

    def __enter__(self) -> LineCoverage:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, value: Any) -> Any:
        code = frame.f_code
        unseen = self._unseen.get(code)
        if unseen is None:
            is_ours = code.co_filename.startswith(PACKAGE)
            unseen = {line for _, _, line in code.co_lines() if line} if is_ours else set()
            unseen.discard(code.co_firstlineno)
            self._unseen[code] = unseen
        return self._on_line if unseen else None

    def _on_line(self, frame: FrameType, event: str, value: Any) -> Any:
        unseen = self._unseen[frame.f_code]
        if frame.f_lineno in unseen:
            unseen.discard(frame.f_lineno)
            self.num_lines += 1
        return self._on_line
