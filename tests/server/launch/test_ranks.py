"""A server whose model is divided among processes: it serves, and outlives the death of one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.running import TINY, RunningServer, eventually

pytestmark = pytest.mark.slow

NOTICED_S = 5.0
"""Clients hear within this time that a rank is gone; the step itself would wait for it for
`distributed_timeout_seconds`, ten minutes."""
LONG: Any = {"prompt": "Once upon a time", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}


def rank_pids(server: RunningServer) -> list[int]:
    command = ["pgrep", "-f", "-P", str(server.engine_pid()), "quire.engine.executors.rank"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_that_fails_in_mid_stream(
    number: signal.Signals, tiny_model: Path, start_server: Callable[..., RunningServer]
) -> None:
    """Streams end with an error that names it, `/health` says so, and the engine comes back."""
    flags = ("--model", str(tiny_model), *TINY, "--dtype", "float32")
    server = start_server(*flags, "--tensor-parallel-size", "2")
    assert any("ranks: 2 on this host" in line for line in server.lines)
    client = server.client()
    model = client.models.list().data[0].id
    short: Any = {"model": model, "prompt": "Hi", "max_tokens": 8, "temperature": 0}
    before = client.completions.create(**short).choices[0].text
    pids = rank_pids(server)
    assert len(pids) == 2
    stream = client.completions.create(model=model, stream=True, **LONG)
    next(iter(stream))
    struck = time.monotonic()
    os.kill(pids[1], number)
    with pytest.raises(openai.APIError, match=rf"rank 1 \(host \S+, process {pids[1]}\)"):
        list(stream)
    for path in ("/health", "/v1/models"):
        reply = server.request("GET", path)
        assert reply.status == 503 and "rank 1" in reply.error["message"]
    assert time.monotonic() - struck < NOTICED_S
    eventually(lambda: server.request("GET", "/health").status == 200, "the restart", 120)
    assert client.completions.create(**short).choices[0].text == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    server.assert_at_rest()
    again = rank_pids(server)
    assert server.stop() == 0
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in again), "the ranks' end")
