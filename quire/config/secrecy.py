"""Keys given on the command line, kept from the list of processes that every user can read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from quire.config.kernel_files import ROOT, read

# Fields of /proc/self/stat after the name of the program, which is the second one of all.
ARG_START, ARG_END = 48 - 3, 49 - 3


def hide_from_process_list(secrets: Iterable[str]) -> None:
    """Overwrite arguments of this process that are secrets, where the system shows arguments."""
    fields = read(ROOT / "proc/self/stat").rpartition(")")[2].split()
    if len(fields) <= ARG_END:  # not Linux
        return
    start, end = int(fields[ARG_START]), int(fields[ARG_END])
    if not start < end:
        return
    ctypes.memmove(start, hidden(ctypes.string_at(start, end - start), secrets), end - start)


def hidden(arguments: bytes, secrets: Iterable[str]) -> bytes:
    """Arguments, each with a null byte after it, in which secrets are as many asterisks."""
    words = arguments.split(b"\0")
    for data in {secret.encode("utf-8", "surrogateescape") for secret in secrets}:
        for i, word in enumerate(words):
            if word == data or (word.startswith(b"-") and word.endswith(b"=" + data)):
                words[i] = word[: len(word) - len(data)] + b"*" * len(data)
    return b"\0".join(words)
