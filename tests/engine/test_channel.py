"""`Channel`: messages between the engine and its ranks over TCP."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from quire.engine.executors.channel import Channel, notice_cut


def connected() -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        first = socket.create_connection(listening.getsockname())
        second, _ = listening.accept()
    return Channel(first), Channel(second)


def test_busy_reader_is_not_cut_off() -> None:
    """A rank in a long step reads no orders; a large one waits for it."""
    engine, rank = connected()
    notice_cut(engine.line, 1.0)
    message = bytes(1 << 25)  # more than the system takes in between
    sending = threading.Thread(target=engine.send, args=(message,))
    sending.start()
    time.sleep(2.5)
    assert rank.read() == message
    sending.join()
    engine.close()
    rank.close()


def test_close_ends_a_send_of_another_thread() -> None:
    engine, rank = connected()
    threading.Timer(0.2, engine.close).start()
    with pytest.raises(OSError):
        engine.send(bytes(1 << 25))
    rank.close()
