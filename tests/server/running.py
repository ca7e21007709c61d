"""A real server in processes of its own, and its clients."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

ROOT = Path(__file__).resolve().parents[2]


def _transport_errors() -> Iterator[type[Exception]]:
    for name in ("httpx", "httpx2"):
        if find_spec(name) is not None:
            yield import_module(name).TransportError


BROKEN_OFF = (openai.APIError, *_transport_errors())
"""What the openai client raises, or lets through of its HTTP library, when a stream breaks off."""

# The exact weights, so that equal requests give equal tokens however they are batched.
ENGINE = (
    *("--dtype", "float32", "--num-threads", "1", "--max-model-len", "1024"),
    *("--kv-cache-memory-bytes", "128MiB"),
)


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
        """The error that the body holds; fails if it is of another form."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == self.status
        return error


@dataclass
class RunningServer:
    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, *flags: str, module: str = "quire", command: str = "serve") -> RunningServer:
        """Start `quire serve` on a free port; returns when it answers, or with its last words."""
        words = [sys.executable, "-m", module, *command.split(), "--port", "0", *flags]
        process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
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
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(
            method, path, data, {"Content-Type": "application/json", **(headers or {})}
        )
        with connection.getresponse() as reply:
            named = {name.lower(): value for name, value in reply.getheaders()}
            return HttpReply(reply.status, named, reply.read())

    def engine_pid(self) -> int:
        return self.child_pid("quire.engine.process")

    def child_pid(self, module: str) -> int:
        """The process that runs a module for this server, as the system lists it."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if module.encode() in command and parent == self.process.pid:
                return int(entry.name)
        raise AssertionError(f"there is no process of {module}")

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
