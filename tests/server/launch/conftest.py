"""Servers of tests that break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.server.running import RunningServer


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """`RunningServer.start`, whose servers do not outlive the test."""
    started: list[RunningServer] = []

    def start(*flags: str) -> RunningServer:
        started.append(RunningServer.start(*flags))
        assert started[-1].url, "".join(started[-1].lines)
        return started[-1]

    yield start
    for server in started:
        server.stop()
