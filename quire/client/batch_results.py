"""The output file of `quire run-batch`: results are appended for good, and a rerun goes on from it.

A result is kept if its request was answered and is still the same, which its `id` tells: that is
made of the request. Failed results are left out when the file is opened, and so tried again.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from quire.protocol.errors import OptionError

ID_START = "batch_req_"
LINE_START = f'{{"id": "{ID_START}'.encode()
"""How each line begins."""


def result_id(custom_id: str, url: str, body: dict[str, Any]) -> str:
    """The id of a request's result: the same for the same request, and for no other."""
    text = json.dumps([custom_id, url, body], sort_keys=True)
    return ID_START + hashlib.sha256(text.encode()).hexdigest()[:32]


class ResultFile:
    """Use it as a context. `finished` has the ids of results by the custom ids they are for."""

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        self.path = path
        self.finished: dict[str, str] = {}
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._syncing: asyncio.Task[None] | None = None
        self._is_dirty = False
        try:
            self._lock()
            if overwrite:
                self._file.truncate(0)
            else:
                self._resume()
        except BaseException:
            self._file.close()
            raise

    def append(self, result: dict[str, Any]) -> None:
        """Write a line. It survives this process at once, and the machine a moment later."""
        # Half a character, which JSON may hold and UTF-8 may not, stays the escape that it was.
        text = json.dumps(result, ensure_ascii=False) + "\n"
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            data = data[self._file.write(data) :]
        self._is_dirty = True
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.get_running_loop().create_task(self._sync())

    async def __aenter__(self) -> ResultFile:
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            if self._syncing is not None:
                await self._syncing
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    async def _sync(self) -> None:
        """One wait for the disk at a time, each for all lines written before it begins."""
        while self._is_dirty:
            self._is_dirty = False
            await asyncio.to_thread(os.fsync, self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(
                f"--output-file {str(self.path)!r} is being written by another `quire run-batch`; "
                "wait for it, or name another file."
            ) from None

    def _resume(self) -> None:
        """Read what is there. Lines to leave out make a new file, which replaces this one whole."""
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            if self._copy_finished(part):
                part.replace(self.path)
                self._file.close()
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
                self._lock()
                folder = os.open(self.path.parent, os.O_RDONLY)
                os.fsync(folder)
                os.close(folder)
        finally:
            part.unlink(missing_ok=True)

    def _copy_finished(self, part: Path) -> int:
        """Copy the results that stand to `part`; returns how many lines are left out."""
        num_left_out = 0
        with open(self.path, "rb") as lines, open(part, "wb") as kept:
            for number, line in enumerate(lines, 1):
                result = self._read(number, line)
                if result is None:
                    num_left_out += 1
                    continue
                self.finished[result["custom_id"]] = str(result.get("id"))
                kept.write(line)
            kept.flush()
            os.fsync(kept.fileno())
        return num_left_out

    def _read(self, number: int, line: bytes) -> dict[str, Any] | None:
        """A result that stands; None for one of a failure, and for a last line cut off."""
        if not line.endswith(b"\n"):
            # After a power cut a file may end in zeros.
            start = line.rstrip(b"\0")[: len(LINE_START)]
            if LINE_START.startswith(start):
                return None
        try:
            result: Any = json.loads(line)
            response = result["response"]
            is_answered = response is not None and response["status_code"] == 200
            return result if is_answered and isinstance(result["custom_id"], str) else None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise OptionError(
                f"--output-file {str(self.path)!r} exists, and its line {number} is no result of "
                "a batch; name another file, or start over with --overwrite."
            ) from None
