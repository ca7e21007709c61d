"""Folders of servers: those of dead ones go, those of the living and of others stay."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.server.launch.socket_folder import LOCK, SocketFolder
from tests.server.running import API_PROCESS, TINY, RunningServer, eventually


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def test_only_folders_of_dead_servers_go(parent: Path) -> None:
    living, dead, strange = SocketFolder(), SocketFolder(), SocketFolder()
    for folder in (living, dead, strange):
        make_socket(folder.path / "0123456789abcdef")
        Path(folder.load_file).write_bytes(b"12345678")
    Path(dead.adapters_file).with_suffix(".json.lock").touch()
    (strange.path / "notes.txt").write_text("not a server's")
    for folder in (dead, strange):
        os.close(folder._lock)  # as the system does when a process is killed
    others = parent / "quire-notes"
    others.mkdir()
    (others / "load").write_text("mine")
    (parent / "quire-link").symlink_to(living.path)
    (parent / "quire-file").touch()
    new = SocketFolder()
    assert not dead.path.exists()
    left = {path.name for path in living.path.iterdir()}
    assert left == {LOCK, "load", "adapters.json", "0123456789abcdef"}
    assert (strange.path / "notes.txt").exists() and (others / "load").exists()
    assert (parent / "quire-link").is_symlink() and (parent / "quire-file").exists()
    living.remove()
    new.remove()
    assert not living.path.exists() and not new.path.exists()


@pytest.mark.slow
def test_a_killed_server_leaves_nothing_for_long(
    parent: Path, tiny_model: Path, start_server: Callable[..., RunningServer]
) -> None:
    """Its folder goes when the next one starts, which leaves that of a living one alone."""
    flags = ("--model", str(tiny_model), *TINY)
    killed, living = (start_server(*flags) for _ in range(2))
    children = [
        pid for module in ("quire.engine.process", API_PROCESS) for pid in killed.child_pids(module)
    ]
    assert len(list(parent.glob("quire-*"))) == 2
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    eventually(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in children),
        "the end of the killed server's processes",
    )
    assert len(list(parent.glob("quire-*"))) == 2
    new = start_server(*flags)
    assert len(list(parent.glob("quire-*"))) == 2, "the dead one's, less; its own, more"
    for server in (living, new):
        assert server.request("POST", "/v1/completions", {"prompt": "Hi"}).status == 200
        assert server.stop() == 0
    assert not list(parent.glob("quire-*"))
