"""How long one request holds the others of its API process up.

Beside a stream that runs and a client that asks for `/health`, large and strange bodies are sent
one after the other. The table shows the longest gap between two chunks and the longest wait for
`/health` while each body was answered, less what the seconds before it showed. "engine": a request
that was accepted made the engine's steps longer, and the API process went on answering.

    python benchmarks/stalls.py                        # all bodies, three tries each
    python benchmarks/stalls.py --only prompt --size 32 --memory 100
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TARGET_S = 0.05
SETTLE_S = 0.3
MB = 1_000_000


@dataclass(frozen=True)
class Case:
    """A body of about so many bytes; made only when its turn comes."""

    name: str
    path: str
    make: Callable[[int], Any]
    size: int

    def body(self) -> bytes:
        made = self.make(self.size)
        return made if isinstance(made, bytes) else json.dumps(made).encode()


def lists(field: str) -> Callable[[int], Any]:
    return lambda size: {field: [[1]] * (size // 5), "max_tokens": 1}


def ids(field: str, **more: Any) -> Callable[[int], Any]:
    return lambda size: {field: [11] * (size // 4), **more}


def texts(field: str, **more: Any) -> Callable[[int], Any]:
    return lambda size: {field: ["a"] * (size // 5), **more}


def text(field: str, **more: Any) -> Callable[[int], Any]:
    return lambda size: {field: "many words of a long text. " * (size // 27), **more}


def messages(**more: Any) -> Callable[[int], Any]:
    one = {"role": "user", "content": "a"}
    return lambda size: {"messages": [one] * (size // 35), "max_tokens": 1, **more}


def long_message(**more: Any) -> Callable[[int], Any]:
    return lambda size: {
        "messages": [{"role": "user", "content": "many words. " * (size // 12)}],
        "max_tokens": 1,
        **more,
    }


def parts(kind: str, field: str, **more: Any) -> Callable[[int], Any]:
    one = {"type": kind, "text": "a"}
    return lambda size: {field: [{"role": "user", "content": [one] * (size // 32)}], **more}


def tools(**more: Any) -> Callable[[int], Any]:
    def make(size: int) -> Any:
        functions = [
            {"name": f"f{i}", "parameters": {"type": "object", "properties": {}}}
            for i in range(size // 80)
        ]
        wrapped = [{"type": "function", "function": one} for one in functions]
        return {"tools": wrapped, **more}

    return make


def many(field: str, one: Any, **more: Any) -> Callable[[int], Any]:
    return lambda size: {field: [one] * (size // (len(json.dumps(one)) + 2)), **more}


def inside(field: str, **more: Any) -> Callable[[int], Any]:
    return lambda size: {field: {"x": [1] * (size // 3)}, **more}


def metadata(size: int) -> Any:
    pairs = {str(i): "a" for i in range(size // 14)}
    return {"input": "Hi", "max_output_tokens": 1, "metadata": pairs}


def bias(**more: Any) -> Callable[[int], Any]:
    return lambda size: {"logit_bias": {str(i): 1.0 for i in range(size // 14)}, **more}


def nested(size: int) -> bytes:
    """As deep as a parser may go, many times over."""
    deep = b"[" * 200 + b"1" + b"]" * 200
    return b'{"prompt": "Hi", "max_tokens": 1, "x": [' + b",".join([deep] * (size // 402)) + b"]}"


def many_fields(size: int) -> Any:
    return {"prompt": "Hi", "max_tokens": 1, **{f"field{i}": i for i in range(size // 18)}}


HELLO: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
A_MESSAGE: Any = {"role": "user", "content": "a"}
CUT: Any = {"max_tokens": 1, "truncate_prompt_tokens": 9}
SHORT: Any = {"prompt": "Hi", "max_tokens": 1}
SHAPES: list[tuple[str, str, Callable[[int], Any]]] = [
    ("prompt [[1], [1], ...]", "/v1/completions", lists("prompt")),
    ("prompt [11, 11, ...]", "/v1/completions", ids("prompt", max_tokens=1)),
    ("prompt ['a', 'a', ...]", "/v1/completions", texts("prompt", max_tokens=1)),
    ("prompt of text", "/v1/completions", text("prompt", max_tokens=1)),
    ("prompt of text, cut", "/v1/completions", text("prompt", **CUT)),
    ("prompt of wrong types", "/v1/completions", lambda size: {"prompt": [None] * (size // 6)}),
    ("stop_token_ids", "/v1/completions", ids("stop_token_ids", **SHORT)),
    ("allowed_token_ids", "/v1/completions", ids("allowed_token_ids", **SHORT)),
    ("logprob_token_ids", "/v1/completions", ids("logprob_token_ids", **SHORT)),
    ("stop", "/v1/completions", texts("stop", **SHORT)),
    ("bad_words", "/v1/completions", texts("bad_words", **SHORT)),
    ("logit_bias", "/v1/completions", bias(**SHORT)),
    ("guided_choice", "/v1/completions", texts("guided_choice", **SHORT)),
    ("vllm_xargs", "/v1/completions", inside("vllm_xargs", **SHORT)),
    ("nested lists", "/v1/completions", nested),
    ("unknown fields", "/v1/completions", many_fields),
    ("input [[1], [1], ...]", "/v1/embeddings", lists("input")),
    ("input [11, 11, ...]", "/v1/embeddings", ids("input")),
    ("input ['a', 'a', ...]", "/v1/embeddings", texts("input")),
    ("tokens", "/detokenize", ids("tokens")),
    ("prompt, strings", "/tokenize", text("prompt", return_token_strs=True)),
    ("messages", "/tokenize", messages()),
    ("many messages", "/v1/chat/completions", messages()),
    ("a long message", "/v1/chat/completions", long_message()),
    ("many parts", "/v1/chat/completions", parts("text", "messages", max_tokens=1)),
    ("many tools", "/v1/chat/completions", tools(**HELLO)),
    ("tools that are forced", "/v1/chat/completions", tools(tool_choice="required", **HELLO)),
    ("documents", "/v1/chat/completions", many("documents", {"a": "b"}, **HELLO)),
    ("chat_template_kwargs", "/v1/chat/completions",
     inside("chat_template_kwargs", **HELLO)),
    ("many items", "/v1/responses", many("input", A_MESSAGE)),
    ("many parts", "/v1/responses", parts("input_text", "input", max_output_tokens=1)),
    ("metadata", "/v1/responses", metadata),
    ("many messages", "/v1/messages", messages()),
    ("many parts", "/v1/messages", parts("text", "messages", max_tokens=1)),
    ("many messages", "/v1/messages/count_tokens", messages()),
    ("prompt_logprobs", "/v1/completions",
     lambda size: {"prompt": [11] * min(size // 4, 1000), "max_tokens": 1, "prompt_logprobs": 20}),
]  # fmt: skip


def cases(sizes: list[float], only: str) -> Iterator[Case]:
    for name, path, make in SHAPES:
        for size in sizes:
            if only in f"{path} {name}":
                yield Case(name, path, make, int(size * MB))


class Server:
    """`quire serve` on a free port."""

    def __init__(self, flags: list[str]) -> None:
        words = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if match := re.search(r"serving on http://(\S+)", line):
                address = urlsplit(f"//{match[1]}")
                self.host, self.port = address.hostname or "", address.port or 0
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            print(f"    server: {line.rstrip():.200}", file=sys.stderr)

    def connect(self, timeout_s: float = 120) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def post(self, path: str, data: bytes, timeout_s: float) -> str:
        """The status of the reply, whose body is not looked at."""
        connection = self.connect(timeout_s)
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            with connection.getresponse() as reply:
                while reply.read(1 << 20):
                    pass
                return str(reply.status)
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()

    def processes(self) -> dict[str, float]:
        """Megabytes in memory of the processes of this server, by what they run."""
        found: dict[str, float] = {}
        parents = {self.process.pid}
        for entry in sorted(Path("/proc").iterdir(), key=lambda one: (len(one.name), one.name)):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                status = (entry / "status").read_text()
            except (OSError, ValueError, IndexError):
                continue
            if parent in parents and (size := re.search(r"VmRSS:\s+(\d+)", status)):
                parents.add(int(entry.name))
                name = re.search(r"quire\.[\w.]+", words)
                key = name[0] if name else words[:40]
                found[key] = found.get(key, 0) + int(size[1]) / 1024
        return found


class Watch:
    """Two clients that note when they heard from the server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.chunks: list[float] = []
        self.health: list[tuple[float, float]] = []
        for target in (self._stream, self._ask):
            threading.Thread(target=target, daemon=True).start()

    def _stream(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 1500, "stream": True}
        data = json.dumps({**body, "ignore_eos": True})
        while True:
            connection = self._server.connect()
            headers = {"Content-Type": "application/json"}
            try:
                connection.request("POST", "/v1/completions", data, headers)
                with connection.getresponse() as reply:
                    for line in reply:
                        if line.startswith(b"data:"):
                            self.chunks.append(time.perf_counter())
            except (OSError, http.client.HTTPException):
                time.sleep(0.2)

    def _ask(self) -> None:
        connection = self._server.connect()
        while True:
            begun = time.perf_counter()
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection = self._server.connect()
            self.health.append((begun, time.perf_counter()))
            time.sleep(0.005)

    def longest(self, begun: float, ended: float) -> tuple[float, float]:
        """The longest gap between chunks and the longest wait for `/health` in a span of time."""
        times = [one for one in list(self.chunks) if begun - 1 <= one <= ended]
        times.append(ended)
        gaps = [later - former for former, later in pairwise(times) if later >= begun]
        asked = list(self.health)
        waits = [done - start for start, done in asked if done >= begun and start <= ended]
        if asked and asked[-1][1] < ended:
            waits.append(ended - asked[-1][1])
        return max(gaps, default=0.0), max(waits, default=0.0)


def measure(server: Server, watch: Watch, case: Case, timeout_s: float) -> list[float | str]:
    data = case.body()
    begun = time.perf_counter()
    time.sleep(1.0)
    quiet = watch.longest(begun, time.perf_counter())
    begun = time.perf_counter()
    status = server.post(case.path, data, timeout_s)
    took = time.perf_counter() - begun
    time.sleep(SETTLE_S)
    found = watch.longest(begun, time.perf_counter())
    more = [max(0.0, one - other) for one, other in zip(found, quiet, strict=True)]
    return [status, took, *more]


def show(case: Case, tries: list[list[Any]]) -> bool:
    """A line of the table. The least of several tries counts: other programs make any one longer,
    and what the body does happens each time."""
    took = statistics.median(one[1] for one in tries)
    gap, wait = (min(one[index] for one in tries) for index in (2, 3))
    fine = gap <= TARGET_S and wait <= TARGET_S
    in_engine = wait <= TARGET_S and "200" in {one[0] for one in tries}
    verdict = "" if fine else "over, engine" if in_engine else "over"
    name = f"{case.path} {case.name}"
    statuses = "/".join(sorted({one[0] for one in tries}))
    print(
        f"| {name:<52.52} | {case.size / MB:5.2f} | {statuses:>7} "
        f"| {took:6.2f} | {gap * 1000:7.0f} | {wait * 1000:7.0f} | {verdict} |",
        flush=True,
    )
    return fine


def measure_memory(server: Server, count: int) -> None:
    """What stays of `count` large bodies."""
    before = server.processes()
    bodies = [
        ("/v1/completions", text("prompt", max_tokens=1)(30 * MB)),
        ("/v1/completions", lists("prompt")(4 * MB)),
        ("/v1/chat/completions", messages()(4 * MB)),
        ("/tokenize", text("prompt", return_token_strs=True)(MB)),
    ]
    encoded = [(path, json.dumps(body).encode()) for path, body in bodies]
    most: dict[str, float] = {}
    for index in range(count):
        server.post(*encoded[index % len(encoded)], 120)
        for name, size in server.processes().items():
            most[name] = max(most.get(name, 0), size)
    time.sleep(2)
    after = server.processes()
    print(f"\nMegabytes in memory before, at most, and after {count} large bodies:\n")
    for name in sorted(most):
        line = [before.get(name, 0), most[name], after.get(name, 0)]
        print(f"| {name:<40} | {' | '.join(f'{one:7.0f}' for one in line)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", default="0.01,0.06,0.4,4", help="megabytes, several by commas")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a case's path and name")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a reply")
    parser.add_argument("--memory", type=int, default=0, help="large bodies after which to look")
    arguments, flags = parser.parse_known_args()
    server = Server(flags)
    try:
        watch = Watch(server)
        time.sleep(2)
        print(f"| {'body':<52} |    MB |  status |      s |  gap ms | health |  |")
        print("| --- | --: | --: | --: | --: | --: | --- |")
        sizes = [float(one) for one in arguments.size.split(",")]
        results = []
        for case in cases(sizes, arguments.only):
            tries = [
                measure(server, watch, case, arguments.timeout) for _ in range(arguments.tries)
            ]
            results.append(show(case, tries))
        print(f"\n{results.count(False)} of {len(results)} bodies held others up beyond 50 ms.")
        if arguments.memory:
            measure_memory(server, arguments.memory)
    finally:
        server.process.terminate()
        server.process.wait(60)


if __name__ == "__main__":
    main()
