"""What the server tells: lines about requests, spans, a board for Grafana; and that none of it can
hurt a request."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from quire.protocol.errors import OptionError
from quire.server.tracing import check_tracing
from tests.server.launch.test_faults import eventually
from tests.server.running import ENGINE, ROOT, RunningServer

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
BODY = {"prompt": "A secret of mine", "max_tokens": 5, "seed": 1, "ignore_eos": True}


class Collector(ThreadingHTTPServer):
    """Takes spans as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                data = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def watched(collector: Collector) -> Iterator[RunningServer]:
    flags = ("--enable-log-requests", "--max-log-len", "8", "--api-key", "a-key")
    server = RunningServer.start(*flags, "--otlp-traces-endpoint", collector.url, *ENGINE)
    assert server.url, "".join(server.lines)
    yield server
    assert server.stop() == 0


def post(server: RunningServer, path: str, body: Any, name: str, key: str = "a-key") -> Any:
    headers = {"Authorization": f"Bearer {key}", "X-Request-Id": name, "traceparent": TRACEPARENT}
    return server.request("POST", path, body, headers)


def line_of(server: RunningServer, name: str) -> dict[str, Any]:
    def lines() -> list[str]:
        return [line for line in server.lines if f'"request_id":"{name}"' in line]

    eventually(lambda: bool(lines()), "the line")
    (line,) = lines()
    record: dict[str, Any] = json.loads(line[line.index("{") :])
    return record


def test_a_line_for_each_request(watched: RunningServer) -> None:
    usage = post(watched, "/v1/completions", BODY, "plain").json["usage"]
    record = line_of(watched, "plain")
    assert (record["status"], record["path"]) == (200, "/v1/completions")
    assert record["prompt_tokens"] == usage["prompt_tokens"]
    assert record["completion_tokens"] == 5 and record["finish_reasons"] == ["length"]
    assert 0 <= record["queue_s"] <= record["first_token_s"] <= record["total_s"]
    # As much text as was asked for, and no key.
    assert record["prompts"] == ["A secret"] and len(record["outputs"][0]) <= 8
    assert "of mine" not in "".join(watched.lines) and "a-key" not in "".join(watched.lines)


def test_lines_for_requests_that_were_refused(watched: RunningServer) -> None:
    post(watched, "/v1/completions", {**BODY, "temperature": -1}, "bad-value")
    post(watched, "/v1/completions", b"{", "no-json")
    post(watched, "/v1/chat/completions", BODY, "wrong-key", key="guess")
    assert [line_of(watched, name)["status"] for name in ("bad-value", "no-json")] == [400, 400]
    refused = line_of(watched, "wrong-key")
    assert refused["status"] == 401 and "prompt_tokens" not in refused
    assert "guess" not in "".join(watched.lines)


def test_spans(watched: RunningServer, collector: Collector) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 4, "stream": True, "temperature": 0.5, "n": 2}
    post(watched, "/v1/chat/completions", {**body, "ignore_eos": True}, "traced")

    def spans() -> list[Any]:
        return [s for s in collector.spans if attributes(s).get("gen_ai.request.id") == "traced"]

    eventually(lambda: bool(spans()), "the span")
    (span,) = spans()
    values = attributes(span)
    assert span.name == "llm_request" and span.trace_id.hex() == TRACE
    assert values["gen_ai.usage.completion_tokens"] == 8
    assert values["gen_ai.request.n"] == values["gen_ai.usage.num_sequences"] == 2
    assert values["gen_ai.request.temperature"] == 0.5 and values["gen_ai.request.max_tokens"] == 4
    assert values["gen_ai.response.finish_reasons"] == ["length", "length"]
    parts = [
        values[f"gen_ai.latency.{name}"]
        for name in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    ]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(values["gen_ai.latency.e2e"])
    lasted = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert lasted == pytest.approx(values["gen_ai.latency.e2e"], abs=1e-4)


def attributes(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(one) for one in found.values] if kind == "array_value" else found

    return {one.key: plain(one.value) for one in span.attributes}


def test_the_page_names_all_requests_of_the_only_key(watched: RunningServer) -> None:
    """Whichever of its users a gateway made them for."""
    key = {"Authorization": "Bearer a-key"}
    named = {**key, "X-Tenant": "alice", "X-Request-Id": "hers"}
    with watched.send({**BODY, "max_tokens": 900}, headers=named):

        def running() -> list[Any]:
            state = watched.request("GET", "/dashboard/state", headers=key).json
            return [one["request_id"] for one in state["running"]]

        eventually(lambda: bool(running()), "the request")
        assert running() == ["cmpl-hers"]


def test_endpoints_and_packages_that_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_tracing("http://collector:4318/") == "http://collector:4318/v1/traces"
    assert check_tracing("https://c/custom") == "https://c/custom"
    for endpoint in ("grpc://localhost:4317", "localhost:4318", "http://", "http://[::1"):
        with pytest.raises(OptionError, match=r"otlp_traces_endpoint.*4318"):
            check_tracing(endpoint)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(OptionError, match=r"opentelemetry\.sdk\.trace.*pip install '\.\[otel\]'"):
        check_tracing("http://collector:4318")


def test_full_disk_for_logs() -> None:
    """Nothing can be written to standard error, and requests do not notice."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "quire", "serve", "--port", str(port), "--enable-log-requests"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([*words, *ENGINE], cwd=ROOT, stderr=full)
    server = RunningServer(process, f"http://127.0.0.1:{port}")
    try:
        eventually(lambda: answers(server), "the start")
        for i in range(50):
            body = {**BODY, "max_tokens": 2} if i % 2 else {**BODY, "temperature": -1}
            assert server.request("POST", "/v1/completions", body).status == (200 if i % 2 else 400)
        assert server.request("GET", "/health").status == 200
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    assert status == 0


def answers(server: RunningServer) -> bool:
    assert server.process.poll() is None
    try:
        return server.request("GET", "/health").status == 200
    except ConnectionRefusedError:
        return False


def test_every_metric_of_the_grafana_dashboard_exists(server: RunningServer) -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked = {name for query in queries for name in re.findall(r"quire:(\w+)", query)}
    assert len(queries) >= 12 and len(asked) >= 15
    text = server.request("GET", "/metrics").body.decode()
    exposed = set(re.findall(r"^quire:(\w+)\{", text, re.MULTILINE))
    assert not asked - exposed
    # With --metrics-prefix vllm the board is used after replacing the prefix: nothing else has it.
    assert "quire:" not in re.sub(r"quire:\w+", "", json.dumps(board["panels"]))
