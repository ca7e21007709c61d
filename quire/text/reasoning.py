"""`ReasoningStream`: separates a reply's reasoning from its answer."""

from __future__ import annotations

from quire.config.reply_formats import ReasoningTags
from quire.text.deltas import Delta, ReasoningDelta, TextDelta, overlap


class ReasoningStream:
    """Takes the reasoning off the beginning of a text, whatever the pieces it comes in."""

    def __init__(self, tags: ReasoningTags, starts_inside: bool) -> None:
        self._tags = tags
        self._text = ""
        self._place = "inside" if starts_inside else "before"
        self._is_blank = True
        """Whether this part has nothing but white space so far, which belongs to neither."""

    def feed(self, text: str) -> list[Delta]:
        return self._read(text, final=False)

    def finish(self) -> list[Delta]:
        """No more text will come: what was held back is decided on."""
        return self._read("", final=True)

    def _read(self, text: str, final: bool) -> list[Delta]:
        self._text += text
        deltas: list[Delta] = []
        if self._place == "before":
            self._look_for_start(final)
        if self._place == "inside":
            deltas += self._read_reasoning(final)
        if self._place == "behind" and self._is_blank:
            self._text = self._text.lstrip()
            self._is_blank = not self._text
        if self._place in ("behind", "without") and self._text:
            deltas.append(TextDelta(self._text))
            self._text = ""
        return deltas

    def _look_for_start(self, final: bool) -> None:
        text, start = self._text.lstrip(), self._tags.start
        if text.startswith(start):
            self._text = text[len(start) :]
            self._place = "inside"
        elif final or not start.startswith(text):
            self._place = "without"

    def _read_reasoning(self, final: bool) -> list[Delta]:
        if self._is_blank:
            self._text = self._text.lstrip()
        end = self._text.find(self._tags.end)
        if end >= 0 or final:
            shown, rest = (end, end + len(self._tags.end)) if end >= 0 else (len(self._text),) * 2
        else:
            shown = rest = len(self._text) - overlap(self._text, self._tags.end)
        reasoning = self._text[:shown].rstrip()
        self._is_blank = self._is_blank and not reasoning
        if end >= 0:
            self._place, self._is_blank = "behind", True
            self._text = self._text[rest:]
        else:
            self._text = self._text[len(reasoning) :]
        return [ReasoningDelta(reasoning)] if reasoning else []
