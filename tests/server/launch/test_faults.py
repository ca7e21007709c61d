"""What clients see when things break: the engine dies, the client leaves, the server stops."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.server.running import (
    API_PROCESS,
    BROKEN_OFF,
    ENGINE,
    TINY,
    RunningServer,
    eventually,
    gauge,
)

LONG: Any = {"prompt": "Once upon a time", "max_tokens": 900, "extra_body": {"ignore_eos": True}}


StartServer = Callable[..., RunningServer]


@pytest.fixture
def own_server(start_server: StartServer) -> RunningServer:
    return start_server("--max-engine-restarts", "1", "--enable-log-requests", *ENGINE)


def test_killed_engine(own_server: RunningServer) -> None:
    """Open requests fail at once, streaming or not; a new engine answers the next ones."""
    client = own_server.client()
    model = client.models.list().data[0].id
    stream = client.completions.create(model=model, stream=True, **LONG)
    next(iter(stream))
    chat: Any = {"model": model, "extra_body": {"ignore_eos": True}, "stream": True}
    events = client.responses.create(input="Hi", max_output_tokens=900, **chat)
    claude = anthropic.Anthropic(base_url=own_server.url, api_key="none", max_retries=0)
    hello: Any = [{"role": "user", "content": "Hi"}]
    message = claude.messages.create(messages=hello, max_tokens=900, **chat)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: client.completions.create(model=model, **LONG))
        eventually(lambda: gauge(own_server, "num_requests_running") == 4, "the last request")
        os.kill(own_server.engine_pid(), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)
        with pytest.raises(anthropic.APIStatusError, match=r"overloaded_error.*SIGKILL"):
            list(message)
        failed: Any = list(events)[-1]
        assert failed.type == "response.failed" and "SIGKILL" in failed.response.error.message
        assert failed.response.output[0].status == "incomplete"
        with pytest.raises(openai.InternalServerError, match="SIGKILL") as caught:
            waiting.result()
    assert caught.value.status_code == 503 and "retry-after" in caught.value.response.headers
    failed_line = '"finish_reasons":["error"]'
    eventually(lambda: "".join(own_server.lines).count(failed_line) == 4, "a line for each")
    health = own_server.request("GET", "/health")
    models = own_server.request("GET", "/v1/models")
    if models.status == 503:  # unless the new engine is up already
        assert "SIGKILL" in models.error["message"] and "retry-after" in models.headers
        assert health.status == 503
        assert "SIGKILL" in health.error["message"] and "retry-after" in health.headers
    eventually(lambda: own_server.request("GET", "/health").status == 200, "the restart")
    again = client.completions.create(model=model, prompt="Hi", max_tokens=3)
    assert again.usage is not None and again.usage.completion_tokens == 3
    os.kill(own_server.engine_pid(), signal.SIGKILL)
    assert own_server.process.wait(60) == 2
    eventually(lambda: "died 2 times" in own_server.lines[-1], "the last words")


@pytest.mark.slow
def test_engine_that_hangs(tiny_model: Path, start_server: StartServer) -> None:
    """It lives and answers nothing: its requests fail all the same, and another takes its place."""
    flags = ("--model", str(tiny_model), *TINY, "--engine-timeout-s", "3")
    server = start_server(*flags)
    client = server.client()
    model = client.models.list().data[0].id
    hung = server.engine_pid()
    long: Any = {"model": model, **LONG, "max_tokens": 1900}
    stream = client.completions.create(stream=True, **long)
    next(iter(stream))
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(openai.InternalServerError, match="engine_timeout_s=3") as caught:
        client.completions.create(**long)
    assert caught.value.status_code == 503 and "retry-after" in caught.value.response.headers
    with pytest.raises(openai.APIError, match="engine_timeout_s=3"):
        list(stream)
    eventually(lambda: server.request("GET", "/health").status == 200, "the restart")
    assert server.engine_pid() != hung and not Path(f"/proc/{hung}").exists()
    assert server.request("POST", "/v1/completions", {"prompt": "Hi"}).status == 200
    server.assert_at_rest()
    assert server.stop() == 0


@pytest.mark.slow
def test_api_process_that_hangs(tiny_model: Path, start_server: StartServer) -> None:
    """It is replaced, its requests are aborted, and what another one answers goes on."""
    flags = ("--model", str(tiny_model), *TINY, "--api-timeout-s", "5", "--api-server-count", "2")
    server = start_server(*flags)
    other, hung = server.child_pids(API_PROCESS)
    long = {"prompt": "Hi", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    os.kill(other, signal.SIGSTOP)  # so that it does not take this connection
    broken = server.send(long)
    assert broken.recv(1 << 16)
    os.kill(other, signal.SIGCONT)
    os.kill(hung, signal.SIGSTOP)
    with server.send(long) as whole, broken:
        eventually(lambda: "api_timeout_s=5" in "".join(server.lines), "the end of the silence")
        data = b""
        while not data.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            part = whole.recv(1 << 16)
            assert part, data[-1000:]
            data += part
    eventually(lambda: not Path(f"/proc/{hung}").exists(), "its end")
    eventually(lambda: len(server.child_pids(API_PROCESS)) == 2, "another one")
    assert other in server.child_pids(API_PROCESS)
    server.assert_at_rest()
    assert server.stop() == 0


def test_client_that_leaves_frees_its_blocks(server: RunningServer, model: str) -> None:
    client = server.client()
    stream = client.completions.create(model=model, stream=True, **LONG)
    next(iter(stream))
    assert gauge(server, "num_requests_running") == 1
    stream.close()
    eventually(lambda: gauge(server, "num_requests_running") == 0, "the end of the stream")
    with server.send({"prompt": "Hi", "max_tokens": 900, "ignore_eos": True}):
        eventually(lambda: gauge(server, "num_requests_running") == 1, "the request")
    eventually(lambda: gauge(server, "num_requests_running") == 0, "the end of the request")
    assert gauge(server, "kv_cache_usage_perc") == 0
    assert server.request("GET", "/load").json == {"server_load": 0}


def test_sigterm_finishes_open_requests_first(own_server: RunningServer) -> None:
    """Also if all processes get the signal, as from systemd."""
    client = own_server.client()
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model,
        prompt="Once upon a time",
        max_tokens=100,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    first = next(iter(stream))
    engine = own_server.engine_pid()
    for pid in (engine, own_server.child_pid(API_PROCESS), own_server.process.pid):
        os.kill(pid, signal.SIGTERM)
    tokens = len(first.choices[0].token_ids)  # type: ignore[attr-defined]
    tokens += sum(len(chunk.choices[0].token_ids) for chunk in stream)  # type: ignore[attr-defined]
    assert tokens == 100
    assert own_server.process.wait(60) == 0
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
def test_killed_api_process(own_server: RunningServer) -> None:
    """Its clients lose their connections, its requests end, and another one takes its place."""
    client = own_server.client()
    model = client.models.list().data[0].id
    stream = client.completions.create(model=model, stream=True, **LONG)
    next(iter(stream))
    os.kill(own_server.child_pid(API_PROCESS), signal.SIGKILL)
    with pytest.raises(BROKEN_OFF):
        list(stream)

    def answers() -> bool:
        try:
            return own_server.request("GET", "/health").status == 200
        except OSError:
            return False

    eventually(answers, "the restart")
    eventually(lambda: gauge(own_server, "num_requests_running") == 0, "the end of the request")
    again = client.completions.create(model=model, prompt="Hi", max_tokens=3)
    assert again.usage is not None and again.usage.completion_tokens == 3


@pytest.mark.slow
def test_second_signal_stops_now(own_server: RunningServer) -> None:
    client = own_server.client()
    stream = client.completions.create(model=client.models.list().data[0].id, stream=True, **LONG)
    next(iter(stream))
    own_server.process.send_signal(signal.SIGTERM)
    eventually(lambda: "stopping" in own_server.lines[-1], "the first signal")
    own_server.process.send_signal(signal.SIGTERM)
    with pytest.raises(BROKEN_OFF):
        list(stream)
    assert own_server.process.wait(60) == 0
    assert "started again" not in "".join(own_server.lines)


@pytest.mark.slow
def test_children_die_with_the_parent(own_server: RunningServer) -> None:
    engine = own_server.engine_pid()
    own_server.process.kill()
    eventually(lambda: not Path(f"/proc/{engine}").exists(), "the end of the engine")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--model", "/nowhere"), "/nowhere"),
        (("--kv-cache-memory-bytes", "1MiB", "--num-threads", "1"), "kv_cache_memory_bytes"),
        (("--api-key-file", "/nowhere/keys", *ENGINE), "api_key_file"),
    ],
)
def test_start_up_failures_end_with_cause_and_remedy(flags: tuple[str, ...], named: str) -> None:
    server = RunningServer.start(*flags)
    assert not server.url and server.process.wait(60) == 2
    assert server.lines[-1].startswith("quire: error: ") and named in server.lines[-1]
    assert "Traceback" not in "".join(server.lines)


@pytest.mark.slow
def test_temporary_files_too_deep_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known before the model is loaded, and nothing is left behind."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    server = RunningServer.start(*ENGINE)
    assert not server.url and server.process.wait(60) == 2
    assert server.lines[-1].startswith("quire: error: TMPDIR=") and len(server.lines) == 1
    assert not list(deep.iterdir())


def test_port_in_use(server: RunningServer) -> None:
    port = server.url.rpartition(":")[2]
    other = RunningServer.start("--port", port)
    assert not other.url and f"port={port}" in other.lines[-1]
    assert isinstance(other.process, subprocess.Popen) and other.process.wait(60) == 2
