"""`HarmonyStream`: takes a reply in channels apart, as gpt-oss writes them.

A reply is messages: `<|start|>assistant`, a header that names channel and recipient, `<|message|>`,
the text, and a marker that ends it. Its first message begins in the prompt. Markers count only
where a message can end or begin with them: everything else is text of the message around it, as
the model wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from quire.config.reply_formats import HARMONY
from quire.text.deltas import CallDelta, Delta, ReasoningDelta, TextDelta, overlap
from quire.text.tool_calls.call_scanner import CallScanner

START, CHANNEL, CONSTRAIN, MESSAGE = HARMONY.openers
ENDS = HARMONY.closers
OPENING = f"{START}assistant"
*REPLY_ENDS, END = ENDS
"""Markers that end a whole reply, for a call or an answer, and the one that ends its messages."""
ANALYSIS, FINAL = "analysis", "final"
FUNCTIONS = "functions."
MAX_HEADER = 512
"""Characters from the role to the text of a message."""
MAX_ENDS = 2
"""Markers in a row that end one message."""
PIECE = 4096
"""Longer text is read in pieces of so many characters: what is held back is searched again."""

_WORD = r"((?:(?!<\|)\S)+)"
_HEADER = re.compile(
    rf" *(?:to={_WORD} *)?(?:<\|channel\|>(\w+) *)?(?:to={_WORD} *)?(?:<\|channel\|>(\w+) *)?"
    r"((?:<\|constrain\|> *)?[\w/.+-]*) *"
)
_MARK = re.compile("|".join(map(re.escape, (START, CHANNEL, *ENDS))))
_END = re.compile("|".join(map(re.escape, ENDS)))

Kind = Literal["content", "reasoning", "call"]
Found = Literal["yes", "no", "wait"]
"""Whether a message begins at some place; "wait": more text may make one of it."""


@dataclass(frozen=True)
class Header:
    """Of one message, from the role to the text."""

    channel: str = FINAL
    recipient: str = ""

    @classmethod
    def read(cls, text: str) -> Header | None:
        match = _HEADER.fullmatch(text)
        if match is None:
            return None
        before, channel, behind, again, content_type = match.groups()
        if content_type and not (before or channel or behind):
            return None  # a word of plain text
        return cls(channel or again or FINAL, before or behind or "")


def may_become_header(text: str) -> bool:
    """Whether more text may make a header of this one, or its end has come in part."""
    cut = overlap(text, MESSAGE)
    if cut and Header.read(text[: len(text) - cut]) is not None:
        return True
    return any(Header.read(text + rest) is not None for rest in _completions(text))


def _completions(text: str) -> Iterator[str]:
    """The shortest ways to end the part of a header that `text` stops in."""
    yield from ("", "x")
    for word, content in ((CHANNEL, "x"), (CONSTRAIN, ""), ("to=", "x")):
        for size in range(1, len(word)):
            if text.endswith(word[:size]):
                yield word[size:] + content


def opened_header(prompt: str) -> str | None:
    """What a prompt has of the reply's first message behind the role, up to its text; None if that
    message does not begin in the prompt."""
    at = prompt.rfind(START)
    if at < 0 or not prompt.startswith(OPENING, at):
        return None
    header, mark, _ = prompt[at + len(OPENING) :].partition(MESSAGE)
    if _END.search(prompt, at) or len(header) > MAX_HEADER:
        return None
    return header + mark


class HarmonyStream:
    """One reply, whatever the pieces it comes in.

    Reasoning is what stands in the channel `analysis`, calls are messages to functions; all other
    messages are content, and so is what no header precedes. Messages of one kind are joined by line
    breaks. A header that the end of the reply cuts off is dropped.
    """

    def __init__(
        self,
        opened: str | None,
        names: Collection[str],
        new_id: Callable[[], str],
        *,
        reads_calls: bool,
        reads_reasoning: bool,
        max_calls: int | None = None,
    ) -> None:
        self._names = frozenset(names)
        self._new_id = new_id
        self._reads_calls, self._reads_reasoning = reads_calls, reads_reasoning
        self._max_calls = max_calls
        self._text = ""
        """What came and was not passed on yet."""
        self._num_given = 0
        """Characters of it that are the prompt's."""
        self._in_header = False
        self._kind: Kind = "content"
        """Of the message that is being read."""
        self._begins = True
        """Whether it has said nothing so far."""
        self._follows_call = False
        """Whether nothing but white space has followed the arguments of a call."""
        self._spoken: set[Kind] = set()
        self._scanner: CallScanner | None = None
        self._unsure = ""
        """What may be the arguments of a call, or no call."""
        self._is_begun = False
        """Whether the call that is being read was passed on."""
        self._is_broken = False
        self._deltas: list[Delta] = []
        self.num_calls = 0
        """How many have ended."""
        if opened is not None:
            header, mark, _ = opened.partition(MESSAGE)
            if mark:
                self._begin(Header.read(header) or Header())
            else:
                self._text, self._num_given, self._in_header = header, len(header), True

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
        while self._read_header(final) if self._in_header else self._read_message(final):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    # --- each reads on, and returns whether there may be more to read ----------------------------

    def _read_header(self, final: bool) -> bool:
        """Of the first message, which begins in the prompt."""
        found, header, end = self._find_header(0)
        if found == "yes":
            self._begin(header)
            self._drop(end)
        elif found == "wait" and not final:
            return False
        elif found == "wait" and any(one in self._text for one in (CHANNEL, f"to={FUNCTIONS}")):
            self._drop(len(self._text))
        else:
            self._drop(self._num_given)
        self._in_header = False
        return True

    def _read_message(self, final: bool) -> bool:
        mark = _MARK.search(self._text)
        held = 0 if final else overlap(self._text, START, CHANNEL, *ENDS)
        shown = len(self._text) - held if mark is None else mark.start()
        if shown:
            self._say(self._text[:shown])
            self._drop(shown)
        if mark is None:
            return False
        found, header, end = self._find_message()
        if found == "wait" and not final:
            return False
        if found == "no":
            self._say(mark[0])
            self._drop(len(mark[0]))
            return True
        self._end()
        if found == "yes":
            self._begin(header)
            self._drop(end)
            return True
        self._drop(len(self._text))
        return False

    def _find_message(self) -> tuple[Found, Header, int]:
        """Whether the marker at the beginning ends one message and begins another; the header of
        that, and where its text begins."""
        text, at = self._text, 0
        for _ in range(MAX_ENDS):
            if (end := _END.match(text, at)) is None:
                break
            at = end.end()
        if text.startswith(OPENING, at):
            return self._find_header(at + len(OPENING))
        if text.startswith(CHANNEL, at):
            return self._find_header(at)
        rest = text[at : at + len(OPENING)]
        following = (OPENING, CHANNEL, *ENDS)
        return ("wait" if any(one.startswith(rest) for one in following) else "no"), Header(), 0

    def _find_header(self, at: int) -> tuple[Found, Header, int]:
        """The header that begins here, and where the text of its message does."""
        end = self._text.find(MESSAGE, at, at + MAX_HEADER + len(MESSAGE))
        if end >= 0:
            header = Header.read(self._text[at:end])
            return ("no" if header is None else "yes"), header or Header(), end + len(MESSAGE)
        size = len(self._text) - overlap(self._text[at:], MESSAGE) - at
        waits = size <= MAX_HEADER and may_become_header(self._text[at:])
        return ("wait" if waits else "no"), Header(), 0

    # --- inside ---------------------------------------------------------------------------------

    def _begin(self, header: Header) -> None:
        """Of a message."""
        name = self._function(header.recipient) if self._reads_calls else ""
        self._begins, self._follows_call = True, False
        if name:
            self._kind, self._unsure = "call", ""
            self._is_begun = self._is_broken = False
            self._scanner = CallScanner.of_arguments(name)
        else:
            is_reasoning = header.channel == ANALYSIS and self._reads_reasoning
            self._kind = "reasoning" if is_reasoning else "content"

    def _function(self, recipient: str) -> str:
        """The function that is called, if one is: models also leave out the namespace."""
        if recipient in self._names:
            return recipient
        return recipient.removeprefix(FUNCTIONS) if recipient.startswith(FUNCTIONS) else ""

    def _end(self) -> None:
        """The message has ended, complete or not."""
        if self._kind == "call":
            if not self._is_begun:
                self._begin_call()
                self._add_arguments("{}")
            self._end_call()

    def _say(self, text: str) -> None:
        """More text of the message."""
        if self._kind == "call":
            self._read_arguments(text)
            return
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        if not text:
            return
        if self._begins and self._kind in self._spoken:
            text = "\n" + text
        self._begins = False
        self._spoken.add(self._kind)
        is_reasoning = self._kind == "reasoning"
        self._deltas.append(ReasoningDelta(text) if is_reasoning else TextDelta(text))

    def _read_arguments(self, text: str) -> None:
        if self._is_broken:
            self._add_arguments(text)
            return
        scanner = self._scanner
        assert scanner is not None
        at = scanner.feed(text, 0)
        if not scanner.certain:
            self._unsure += text[:at]
            if scanner.broken:
                self._kind = "content"
                self._say(self._unsure + text[at:])
            return
        if not self._is_begun:
            self._begin_call()
        self._add_arguments(scanner.take_arguments())
        if scanner.broken:
            # They were passed on in part: the rest follows as the model wrote it.
            self._is_broken = True
            self._add_arguments(text[at:])
        elif scanner.complete:
            self._end_call()
            self._say(text[at:])

    def _begin_call(self) -> None:
        assert self._scanner is not None
        self._is_begun = True
        if self._is_wanted:
            self._deltas.append(CallDelta(self.num_calls, "", self._new_id(), self._scanner.name))

    def _add_arguments(self, text: str) -> None:
        if text and self._is_wanted:
            self._deltas.append(CallDelta(self.num_calls, text))

    def _end_call(self) -> None:
        """What follows it in its message is content."""
        self.num_calls += 1
        self._is_begun = False
        self._kind, self._begins, self._follows_call = "content", True, True

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls < self._max_calls

    def _drop(self, end: int) -> None:
        self._text = self._text[end:]
