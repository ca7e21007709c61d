"""`SocketFolder`: where the processes of one server find each other. Folders of servers that were
killed go when the next one starts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quire.server.launch.listening import ServerStopped

PREFIX = "quire-"
LOCK = "server.lock"
"""A file that a living server holds locked; the system unlocks it however the server ends."""
LOAD = "load"
ADAPTERS = "adapters.json"
FILES = frozenset({LOAD, ADAPTERS, f"{ADAPTERS}.lock", f"{ADAPTERS}.new"})
COUNT_BYTES = 8
"""Of an API process's number of open requests in that file."""
SOCKET_NAME_BYTES = 8
"""Of randomness, twice as many characters."""
MAX_SOCKET_PATH = 107
"""The system takes no longer ones."""


class SocketFolder:
    """A folder that only this user can enter. It must not lie too deep."""

    def __init__(self, num_api_processes: int = 1) -> None:
        remove_left_over()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        if len(os.fsencode(self.path)) + 1 + 2 * SOCKET_NAME_BYTES > MAX_SOCKET_PATH:
            self.path.rmdir()
            raise ServerStopped(
                f"TMPDIR={tempfile.gettempdir()!r} is too long a path for the server's sockets, "
                f"whose paths have at most {MAX_SOCKET_PATH} bytes; set it to a shorter one, such "
                "as /tmp."
            )
        # It gets its name once it is locked: one that is not locked is a dead server's.
        unnamed = self.path / "new.lock"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: the folder is never taken
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(self.path / LOCK)
        (self.path / LOAD).write_bytes(bytes(COUNT_BYTES * num_api_processes))
        (self.path / ADAPTERS).write_text("{}")

    @property
    def load_file(self) -> str:
        return str(self.path / LOAD)

    @property
    def adapters_file(self) -> str:
        return str(self.path / ADAPTERS)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left_over() -> None:
    """Remove the folders of this user's servers that are dead."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            _remove_if_dead(folder.parent)


def _remove_if_dead(folder: Path) -> None:
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        return
    with _locked(folder / LOCK):
        for entry in list(folder.iterdir()):
            if entry.name in FILES or stat.S_ISSOCK(entry.lstat().st_mode):
                entry.unlink()
        (folder / LOCK).unlink()
        folder.rmdir()  # which fails if something else lies there


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that no one has; `OSError` if it is held, or there is none."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)
