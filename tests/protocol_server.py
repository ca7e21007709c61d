"""A small server that speaks the public protocols of several inference servers, to test clients.

It is written against their documentation with the standard library, and shares no code with Quire.
It "generates" the words w0 w1 w2 ..., as many as it is asked for, and keeps every request it gets.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: tuple[str, int]


@dataclass
class ProtocolServer:
    url: str
    seen: list[Seen] = field(default_factory=list)
    key: str | None = None
    """If set, the only API key that is let in."""
    behaviours: list[str] = field(default_factory=list)
    """What to do with the next POST requests instead of answering: "400", "503", "error" (in the
    stream), "cut" (the connection, in mid-stream), "no end", "empty", "drop" (before an answer)."""
    most_at_once: int = 0
    _at_once: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def enter(self) -> None:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)

    def leave(self) -> None:
        with self._lock:
            self._at_once -= 1

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [seen.body for seen in self.seen]


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 128  # many connect at once
    daemon_threads = True

    def handle_error(self, *arguments: Any) -> None:
        """Clients may leave at any time."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: ProtocolServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": [{"id": "some-model", "object": "model"}]},
            "/info": {"model_id": "tgi-model"},
            "/api/tags": {"models": [{"name": "ollama-model:latest"}]},
        }
        if self._is_refused():
            return
        self._send_json(200 if self.path in answers else 404, answers.get(self.path, {}))

    def do_POST(self) -> None:
        state = self.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_refused():
            return
        state.seen.append(Seen(self.path, dict(self.headers.items()), body, self.client_address))
        state.enter()
        try:
            self._answer(body, state.behaviours.pop(0) if state.behaviours else "")
        finally:
            state.leave()

    def _is_refused(self) -> bool:
        key = self.state.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._send_json(401, {"error": {"message": "bad key", "code": 401}})
        return True

    def _answer(self, body: dict[str, Any], behaviour: str) -> None:
        if behaviour.isdigit():
            error = {"message": f"this is a {behaviour}", "type": "Error", "code": int(behaviour)}
            self._send_json(int(behaviour), {"error": error})
        elif behaviour == "drop":
            self.close_connection = True
        elif not body.get("stream", self.path == "/generate_stream"):
            self._send_json(200, self._whole(body))
        else:
            self._stream(body, behaviour)

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        text = " ".join(f"w{i}" for i in range(body.get("max_tokens", 3)))
        if "messages" in body:
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        else:
            choice = {"text": text}
        return {"id": "cmpl-1", "choices": [{"index": 0, "finish_reason": "length", **choice}]}

    def _stream(self, body: dict[str, Any], behaviour: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        events = list(_events(self.path, body))
        if behaviour == "empty":
            events = []
        elif behaviour == "no end":
            events = events[:2]
        elif behaviour:
            events = events[:2]
            events.append(b'data: {"error": {"message": "out of luck"}}\n\n')
        for event in events:
            if behaviour == "cut" and event is events[-1]:
                self.close_connection = True
                return
            # In two chunks, since an event need not come in one.
            for part in (event[:7], event[7:]):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _send_json(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Request-Id", "request-7")
        self.end_headers()
        self.wfile.write(data)


def _events(path: str, body: dict[str, Any]) -> Iterator[bytes]:
    """The stream of an answer, as each server writes it."""
    if path == "/generate_stream":
        yield from _tgi_events(body)
    elif path.startswith("/v2/models/"):
        for i in range(body["max_tokens"]):
            event = {"model_name": "ensemble", "model_version": "1", "text_output": f"w{i} "}
            yield f"data: {json.dumps(event)}\n\n".encode()
    elif path == "/api/generate":
        yield from _ollama_events(body)
    else:
        yield from _openai_events(body, "chat" in path)


def _openai_events(body: dict[str, Any], is_chat: bool) -> Iterator[bytes]:
    def event(choices: list[Any], **more: Any) -> bytes:
        return f"data: {json.dumps({'id': 'x-1', 'choices': choices, **more})}\n\n".encode()

    def choice(text: str, reason: str | None = None) -> dict[str, Any]:
        content = {"delta": {"content": text}} if is_chat else {"text": text}
        return {"index": 0, "finish_reason": reason, **content}

    yield b": a comment, as keep-alives are\n\n"
    yield event([], progress={"prompt_tokens": 9, "processed_tokens": 4})
    if is_chat:
        role = {"role": "assistant", "content": ""}
        yield event([{"index": 0, "delta": role, "finish_reason": None}])
    count = body.get("max_tokens") or 3
    for i in range(count - 1):
        yield event([choice(f"w{i} ")], usage=None)
    yield event([choice(f"w{count - 1}", "length")])
    if (body.get("stream_options") or {}).get("include_usage"):
        given = body.get("prompt") or body["messages"][0]["content"]
        length = len(given) if isinstance(given, list) else len(given.split())
        yield event([], usage={"prompt_tokens": length, "completion_tokens": count})
    yield b"data: [DONE]\n\n"


def _tgi_events(body: dict[str, Any]) -> Iterator[bytes]:
    count = body["parameters"]["max_new_tokens"]
    for i in range(count):
        token = {"id": i, "text": f"w{i} ", "logprob": -1.0, "special": False}
        event: dict[str, Any] = {"index": i + 1, "token": token, "generated_text": None}
        event["details"] = None
        if i == count - 1:
            event["generated_text"] = "all of it"
            event["details"] = {
                "finish_reason": "length",
                "generated_tokens": count,
                "input_length": len(body["inputs"].split()),
            }
        yield f"data:{json.dumps(event)}\n\n".encode()


def _ollama_events(body: dict[str, Any]) -> Iterator[bytes]:
    count = body["options"]["num_predict"]
    for i in range(count):
        event = {"model": body["model"], "response": f"w{i} ", "done": False}
        yield json.dumps(event).encode() + b"\n"
    counts = {"prompt_eval_count": len(body["prompt"].split()), "eval_count": count}
    yield json.dumps({"model": body["model"], "response": "", "done": True, **counts}).encode()


@contextmanager
def protocol_server() -> Iterator[ProtocolServer]:
    """A running server on a port of its own."""
    handler = type("Handler", (_Handler,), {})
    server = _HttpServer(("127.0.0.1", 0), handler)
    state = handler.state = ProtocolServer(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
