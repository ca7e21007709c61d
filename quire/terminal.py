"""Text to and from a person at a terminal, or a pipe in its place; and the chat's loop."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TextIO

from quire.protocol.errors import OverloadedError, QuireError, RequestError, ServerError

CHAT_HELP = "/clear forgets the conversation, /system TEXT sets the system message, /exit ends."

Message = dict[str, str]
Stream = Callable[[list[Message]], Iterator[str]]
"""Streams the reply to a conversation."""


def run_chat(stream: Stream, system: str | None, interactive: bool) -> int:
    """Read messages line by line and stream the replies, until the input ends."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` line editing and history)
        note(f"Ctrl-C stops a reply, Ctrl-D ends the chat.\n{CHAT_HELP}")
    messages = _opening(system)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return 0
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
            continue
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return 0
        if command in ("/clear", "/system"):
            system = rest.strip() or None if command == "/system" else system
            messages = _opening(system)
            if interactive:
                note("A new conversation." if system is None else f"System message: {system}")
        elif re.fullmatch(r"/[a-z]+", command):
            note(CHAT_HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            _reply(stream, messages)


def _opening(system: str | None) -> list[Message]:
    return [] if system is None else [{"role": "system", "content": system}]


def _reply(stream: Stream, messages: list[Message]) -> None:
    """Stream one reply and add it to the messages, as far as it came."""
    text = ""
    try:
        with _interrupt_flag() as interrupted:
            # Leaving the loop early drops the stream, and so gives the request up.
            for piece in stream(messages):
                write(piece)
                text += piece
                if interrupted():
                    break
        print()
    except (RequestError, OverloadedError, ServerError) as error:
        if text:
            print()
        report(error)
        note("The message was dropped; /clear starts a new conversation.")
        messages.pop()
        return
    messages.append({"role": "assistant", "content": text})


@contextlib.contextmanager
def _interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a flag, so that no step is cut short; the second one raises."""
    seen = False

    def note_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    previous = signal.signal(signal.SIGINT, note_interrupt)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, previous)


def standard_input() -> TextIO:
    if sys.stdin is None:
        raise RequestError("standard input is closed; open it, or give a prompt.")
    return sys.stdin


def prompt_from_input(command: str) -> str:
    if standard_input().isatty():
        raise RequestError(f"prompt is missing; write it after `quire {command}`, in quotes.")
    return sys.stdin.read().removesuffix("\n")


def write(text: str) -> None:
    print(text, end="", flush=True)


@contextlib.contextmanager
def progress_line(is_wanted: bool) -> Iterator[Callable[[str], None]]:
    """Shows what is being done in one line of standard error that is written over; nothing where
    that is no terminal."""
    shows = is_wanted and sys.stderr is not None and sys.stderr.isatty()

    def show(line: str) -> None:
        if shows:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    try:
        yield show
    finally:
        show("")


def note(text: str) -> None:
    """Say something that is not the model's, and so stays out of pipes."""
    print(text, file=sys.stderr, flush=True)


def report(error: QuireError | OSError) -> None:
    note(f"quire: error: {' '.join(str(error).split())}")
