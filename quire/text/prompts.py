"""Texts of a file as windows of tokens, for what looks at many tokens of a model and at no
answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.protocol.errors import OptionError
from quire.text.tokenizer import Tokenizer

Windows = list[list[int]]
ENTRIES = '{"prompt": "..."}, {"text": "..."} or {"messages": [...]}'


def read_windows(path: Path, flag: str, tokenizer: Tokenizer, size: int, limit: int) -> Windows:
    """At most `limit` tokens of a file: lines of JSON with a prompt each if it is named .jsonl,
    else one text. `flag` names the file in messages.

    A prompt is cut after `size` tokens; of a text, windows of that size are spread over all of it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{flag} {str(path)!r} cannot be read ({reason}).") from None
    if path.suffix == ".jsonl":
        windows = _prompts(text, f"{flag} {str(path)!r}", tokenizer, size, limit)
    else:
        windows = cut_text(text, tokenizer, size, limit)
    if not windows:
        raise OptionError(
            f"{flag} {str(path)!r} has no text of at least two tokens; write a few paragraphs into "
            "it."
        )
    return windows


def cut_text(text: str, tokenizer: Tokenizer, size: int, limit: int) -> Windows:
    """Windows spread evenly over a text; each begins as the tokenizer begins a text."""
    start = tokenizer.bos_token_id
    first = [] if start is None or start not in tokenizer.encode("") else [start]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    inner = size - len(first)
    if len(tokens) <= inner:
        pieces = [tokens]
    else:
        available, wanted = len(tokens) // inner, max(1, limit // size)
        wanted = min(available, wanted)
        places = [inner * (available * index // wanted) for index in range(wanted)]
        pieces = [tokens[place : place + inner] for place in places]
    return [first + piece for piece in pieces if len(first + piece) > 1]


def _prompts(text: str, where: str, tokenizer: Tokenizer, size: int, limit: int) -> Windows:
    windows: Windows = []
    for tokens in _encoded(text, where, tokenizer):
        window = tokens[: min(size, limit)]
        limit -= len(window)
        if len(window) > 1:
            windows.append(window)
        if limit < 2:
            break
    return windows


def _encoded(text: str, where: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except ValueError as error:
            raise OptionError(f"{where}: line {number} is not JSON ({error}).") from None
        values = {"text": entry} if isinstance(entry, str) else entry
        found = values if isinstance(values, dict) else {}
        if isinstance(found.get("messages"), list):
            chat = tokenizer.render_chat(found["messages"], add_generation_prompt=False)
            yield tokenizer.encode(chat, add_special_tokens=False)
            continue
        prompt = found.get("prompt", found.get("text"))
        if not isinstance(prompt, str):
            raise OptionError(
                f"{where}: line {number} must be a text or {ENTRIES}, got {line.strip()[:80]!r}."
            )
        yield tokenizer.encode(prompt)
