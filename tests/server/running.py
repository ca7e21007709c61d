"""A real server in processes of its own, and its clients."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

ROOT = Path(__file__).resolve().parents[2]
API_PROCESS = "quire.server.launch.api_process"


def _transport_errors() -> Iterator[type[Exception]]:
    for name in ("httpx", "httpx2"):
        if find_spec(name) is not None:
            yield import_module(name).TransportError


BROKEN_OFF = (openai.APIError, *_transport_errors())
"""What the openai client raises, or lets through of its HTTP library, when a stream breaks off."""

# The exact weights, so that equal requests give equal tokens however they are batched.
ENGINE = (
    *("--dtype", "float32", "--num-threads", "1", "--max-model-len", "1024"),
    *("--kv-cache-memory-bytes", "128MiB", "--generation-config", "vllm"),
)

TINY = ("--num-threads", "1", "--kv-cache-memory-bytes", "32MiB", "--admin-key", "admin")
ADMIN = {"Authorization": "Bearer admin"}


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)


@dataclass
class HttpReply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error that the body holds; fails if it is of another format."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] in (self.status, "context_length_exceeded")
        return error


@dataclass
class RunningServer:
    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    certificate: Path | None = None
    """Which one its HTTPS clients trust, in addition to the system's."""

    @classmethod
    def start(
        cls,
        *flags: str,
        module: str = "quire",
        command: str = "serve",
        environment: Mapping[str, str] | None = None,
    ) -> RunningServer:
        """Start `quire serve` on a free port; returns when it answers, or with its last words."""
        words = [sys.executable, "-m", module, *command.split(), "--port", "0", *flags]
        variables = {**os.environ, **(environment or {})}
        process = subprocess.Popen(
            words, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True
        )
        server = cls(process)
        assert process.stderr is not None
        for line in process.stderr:
            server.lines.append(line)
            if match := re.search(r"serving on (https?://\S+)", line):
                server.url = match[1]
                threading.Thread(target=server._keep_lines, daemon=True).start()
                break
        else:
            process.wait()
        return server

    def _keep_lines(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def client(self, **settings: object) -> openai.OpenAI:
        settings = {"api_key": "none", "max_retries": 0, "timeout": 120, **settings}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)  # type: ignore[arg-type]

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> HttpReply:
        """One request without any client library; `body` is sent as JSON unless it is bytes."""
        address = urlsplit(self.url)
        host, port = address.hostname or "", address.port
        connection = http.client.HTTPConnection(host, port, timeout=120)
        if address.scheme == "https":
            trust = ssl.create_default_context(cafile=self.certificate)
            connection = http.client.HTTPSConnection(host, port, timeout=120, context=trust)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(
            method, path, data, {"Content-Type": "application/json", **(headers or {})}
        )
        with connection.getresponse() as reply:
            named = {name.lower(): value for name, value in reply.getheaders()}
            return HttpReply(reply.status, named, reply.read())

    def connect(self) -> socket.socket:
        """A connection on which nothing has been said yet."""
        address = urlsplit(self.url)
        return socket.create_connection((address.hostname or "", address.port or 0), timeout=60)

    def send(
        self, body: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> socket.socket:
        """A connection on which a request was sent; the reply is not read."""
        connection = self.connect()
        connection.sendall(http_request(path, body, headers))
        return connection

    def assert_at_rest(self, headers: dict[str, str] | None = None) -> None:
        """No request is left, no block is in use, and the engine passes its integrity check."""

        def no_requests() -> bool:
            names = ("num_requests_running", "num_requests_waiting")
            return sum(gauge(self, name, headers) for name in names) == 0

        eventually(no_requests, "the end of all requests")
        eventually(
            lambda: self.request("GET", "/load", headers=headers).json == {"server_load": 0},
            "the end of all replies",
        )
        for name in ("check_integrity", "check_books"):  # the second is the older name
            checked = self.request("POST", f"/admin/{name}", None, ADMIN)
            assert checked.json == {"used_blocks": 0, "open_requests": 0}

    def memory_bytes(self) -> dict[str, int]:
        """What the engine and the API process have in memory."""
        sizes = {}
        for module in ("quire.engine.process", API_PROCESS):
            status = Path(f"/proc/{self.child_pid(module)}/status").read_text()
            sizes[module] = 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]
        return sizes

    def engine_pid(self) -> int:
        return self.child_pid("quire.engine.process")

    def child_pid(self, module: str) -> int:
        """The process that runs a module for this server; the first if there are several."""
        return self.child_pids(module)[0]

    def child_pids(self, module: str) -> list[int]:
        """The processes that run a module for this server, as the system lists them."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if module.encode() in command and parent == self.process.pid:
                found.append(int(entry.name))
        assert found, f"there is no process of {module}"
        return sorted(found)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@dataclass(frozen=True)
class OnLoop:
    """Starts servers whose API processes run on a certain event loop."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, *flags: str) -> RunningServer:
        server = RunningServer.start(*flags, environment=self.environment)
        assert server.url, "".join(server.lines)
        for pid in server.child_pids(API_PROCESS):
            libraries = Path(f"/proc/{pid}/maps").read_text()
            assert ("/uvloop/" in libraries) == (self.name == "uvloop")
        return server


def gauge(server: RunningServer, name: str, headers: dict[str, str] | None = None) -> float:
    text = server.request("GET", "/metrics", headers=headers).body.decode()
    (line,) = [x for x in text.splitlines() if x.startswith(f"quire:{name}{{")]
    return float(line.rpartition(" ")[2])


def http_request(path: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "localhost", "Content-Type": "application/json", **(headers or {})}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data
