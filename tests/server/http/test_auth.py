"""Keys, body size and request ids, on a server that was started with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from quire.protocol.errors import OptionError
from quire.server.http.auth import KeyRing
from tests.server.running import ENGINE, RunningServer

BODY = {"prompt": "Hi", "max_tokens": 1}
BEARER = {"Authorization": "Bearer first-key"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("file-key-1\n\nfile-key-2\n")
    flags = ("--api-key", "first-key", "--api-key", "second-key", "--api-key-file", str(keys))
    limits = (
        "--max-body-bytes",
        "4KiB",
        "--served-model-name",
        "one",
        "--served-model-name",
        "two",
    )
    serving = ("--api-server-count", "2", "--metrics-prefix", "vllm")
    server = RunningServer.start(
        *flags,
        *limits,
        *serving,
        *ENGINE,
        module="quire.entrypoints.openai.api_server",
        command="",
    )
    assert server.url, "".join(server.lines)
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize("key", ["first-key", "second-key", "file-key-1", "file-key-2"])
def test_each_key_opens(guarded: RunningServer, key: str) -> None:
    client = guarded.client(api_key=key)
    assert [one.id for one in client.models.list()] == ["one", "two"]
    assert client.completions.create(model="two", prompt="Hi", max_tokens=2).model == "two"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-key2"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "Bearer \xff"},
        {"X-Api-Key": "first-ke"},
    ],
)
def test_no_route_but_health_answers_without_a_key(
    guarded: RunningServer, headers: dict[str, str]
) -> None:
    routes = guarded.request("GET", "/openapi.json", headers=BEARER).json["paths"]
    assert "/metrics" in routes and "/v1/chat/completions" in routes
    assert "/dashboard/state" in routes
    for path in [*routes, "/openapi.json", "/nothing", "//health", "/v1/"]:
        for method in ("GET", "POST"):
            reply = guarded.request(method, path, None, headers)
            if path in ("/health", "/ping"):
                assert reply.status in (200, 405)
            else:
                assert reply.status == 401, path
                if path.startswith("/v1/messages"):
                    assert reply.json["error"]["type"] == "authentication_error"
                else:
                    assert reply.error["type"] == "AuthenticationError"


def test_the_pages_are_there_without_a_key(guarded: RunningServer) -> None:
    for path in ("/", "/docs", "/static/main.js", "/static/style.css"):
        assert guarded.request("GET", path).status == 200


def test_the_page_names_no_requests_of_other_keys(guarded: RunningServer) -> None:
    client = guarded.client(api_key="second-key")
    stream = client.completions.create(
        model="one", prompt="Hi", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    own_id = next(iter(stream)).id
    for key, seen in (("second-key", own_id), ("first-key", None)):
        headers = {"Authorization": f"Bearer {key}"}
        (one,) = guarded.request("GET", "/dashboard/state", headers=headers).json["running"]
        assert one["request_id"] == seen and one["prompt_tokens"] > 0
    stream.close()


def test_load_balancers_may_ask_for_headers_alone(guarded: RunningServer) -> None:
    for path, status in (("/health", 200), ("/ping", 200), ("/v1/models", 401)):
        reply = guarded.request("HEAD", path)
        assert (reply.status, reply.body) == (status, b"")


@pytest.mark.parametrize(("key", "said"), [("", "empty"), ("schl\u00fcssel", "ASCII")])
def test_keys_that_no_client_could_send_are_refused(key: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        KeyRing.of(["good", key])


def test_wrong_key_in_the_client(guarded: RunningServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        guarded.client(api_key="guess").models.list()


def test_anthropics_client_sends_its_key_in_either_way(guarded: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    for key in ({"api_key": "second-key"}, {"auth_token": "file-key-1"}):
        client = anthropic.Anthropic(base_url=guarded.url, max_retries=0, **key)
        reply = client.messages.create(model="two", max_tokens=2, messages=messages)
        assert reply.model == "two"
    wrong = anthropic.Anthropic(base_url=guarded.url, max_retries=0, api_key="guess")
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
        wrong.messages.create(model="two", max_tokens=2, messages=messages)
    long: Any = [{"role": "user", "content": "x" * 5000}]
    right = anthropic.Anthropic(base_url=guarded.url, max_retries=0, api_key="first-key")
    with pytest.raises(anthropic.RequestTooLargeError, match="max_body_bytes"):
        right.messages.create(model="two", max_tokens=2, messages=long)


def test_keys_are_in_no_log(guarded: RunningServer) -> None:
    guarded.request("POST", "/v1/completions", {**BODY, "temperature": 9}, BEARER)
    assert "first-key" not in "".join(guarded.lines)


def test_large_bodies(guarded: RunningServer) -> None:
    body = {**BODY, "user": "x" * 5000}
    assert guarded.request("POST", "/v1/completions", body, BEARER).error["code"] == 413
    small = {**BODY, "user": "x" * 3000}
    assert guarded.request("POST", "/v1/completions", small, BEARER).status == 200


def test_request_ids(guarded: RunningServer) -> None:
    headers = {**BEARER, "X-Request-Id": "my-id"}
    reply = guarded.request("POST", "/v1/completions", BODY, headers)
    assert reply.headers["x-request-id"] == "my-id" and reply.json["id"] == "cmpl-my-id"
    made = guarded.request("GET", "/version", headers=BEARER).headers["x-request-id"]
    assert len(made) == 32
    bad = guarded.request("GET", "/version", headers={**BEARER, "X-Request-Id": "a b"})
    assert " " not in bad.headers["x-request-id"]


def test_other_sites_are_kept_out_by_default(guarded: RunningServer) -> None:
    headers = {**BEARER, "Origin": "https://example.org"}
    reply = guarded.request("GET", "/version", headers=headers)
    assert "access-control-allow-origin" not in reply.headers


def test_metrics_under_vllms_names(guarded: RunningServer) -> None:
    text = guarded.request("GET", "/metrics", headers=BEARER).body.decode()
    labels = '{engine="0",model_name="one"}'
    assert f"vllm:num_requests_running{labels} 0.0" in text
    assert "vllm:prompt_tokens_total" in text and "quire:" not in text
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"' in text
