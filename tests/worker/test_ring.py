"""Orders through shared memory, to readers in processes of their own: whole, in order, and with an
end for those whose writer is gone."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from quire.kernels import cpu
from quire.protocol.errors import OptionError
from quire.worker import ring
from quire.worker.ring import OrderReader, OrderWriter, ReadersLate, new_ring


@dataclass
class Reader:
    """A process that reads until the end, and says what it has read."""

    pid: int
    wake: socket.socket
    answers: int

    @classmethod
    def start(cls, fd: int, index: int, pause_s: float = 0.0) -> Reader:
        ours, theirs = socket.socketpair()
        answers, says = os.pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            reader = OrderReader(fd, index, theirs, awake_s=0.001 * index)
            digest, count = hashlib.sha256(), 0
            while (message := reader.read()) is not None:
                digest.update(message)
                count += 1
                if count == 1:
                    time.sleep(pause_s)
            os.write(says, f"{count} {digest.hexdigest()}".encode())
            os._exit(0)
        theirs.close()
        os.close(says)
        return cls(pid, ours, answers)

    def read_answer(self) -> str:
        """Once its writer has gone away."""
        said = os.read(self.answers, 1000).decode()
        os.close(self.answers)
        os.waitpid(self.pid, 0)
        return said


def messages() -> list[bytes]:
    """More bytes than the ring holds, one message alone too."""
    sizes = [0, 1, 7, 4096, 100_000, ring.CAPACITY + 12_345, 3, ring.CAPACITY // 2, 17]
    return [os.urandom(min(size, 1000)) + bytes(max(size - 1000, 0)) for size in sizes] + [
        b"x"
    ] * 300


@pytest.mark.parametrize("has_library", [True, False])
def test_messages_of_any_size(has_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two readers, one of which is late; with the native library and without."""
    if not has_library:
        monkeypatch.setattr(cpu, "available", lambda: (False, "not built"))
        monkeypatch.setattr(ring, "ORDERED_MACHINES", (platform.machine(),))
    fd, sent = new_ring(), messages()
    readers = [Reader.start(fd, 0), Reader.start(fd, 1, pause_s=0.2)]
    writer = OrderWriter(fd, [reader.wake for reader in readers])
    deadline = time.monotonic() + 60
    for message in sent:
        writer.write(message, deadline)
    while any(count.get() < writer._position for count in writer._readers):
        assert time.monotonic() < deadline, "the readers do not come to the end"
        time.sleep(0.01)
    expected = f"{len(sent)} {hashlib.sha256(b''.join(sent)).hexdigest()}"
    for reader in readers:
        reader.wake.close()
    assert [reader.read_answer() for reader in readers] == [expected] * 2
    os.close(fd)


def test_readers_that_stand_still() -> None:
    """Those are named that have read least."""
    fd = new_ring()
    ours, theirs = socket.socketpair()
    writer = OrderWriter(fd, [ours] * 3)
    reader = OrderReader(fd, 1, theirs)
    with ours, theirs:
        writer.write(b"one", time.monotonic())
        assert reader.read() == b"one"
        with pytest.raises(ReadersLate) as late:
            writer.write(bytes(ring.CAPACITY + 1), time.monotonic() + 0.01)
        assert late.value.readers == [0, 2]
    os.close(fd)


def test_writer_that_is_closed_while_it_waits() -> None:
    fd = new_ring()
    ours, theirs = socket.socketpair()
    writer = OrderWriter(fd, [ours])
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(writer.write, bytes(ring.CAPACITY + 1), time.monotonic() + 60)
        while writer._position < ring.CAPACITY:
            assert not writing.done()
            time.sleep(0.001)
        writer.close()
        error = writing.exception(30)
    assert isinstance(error, OSError) and not isinstance(error, TimeoutError)
    os.close(fd)


def test_machines_that_need_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: (False, "it was not built"))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(OptionError, match="native library on aarch64: it was not built"):
        new_ring()
