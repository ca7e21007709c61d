"""`quire chat --url` and `quire complete` over real sockets."""

from __future__ import annotations

import io
import socket
import sys
from collections.abc import Iterator

import pytest

from quire.cli import main
from quire.client.address import Address
from quire.protocol.errors import OptionError
from tests.protocol_server import ProtocolServer, protocol_server


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    with protocol_server() as running:
        yield running


def chat(monkeypatch: pytest.MonkeyPatch, lines: str, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", *words])


def test_chat_keeps_the_conversation(
    server: ProtocolServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server sees all of it, with the model it names itself and the parameters given."""
    flags = ["--url", server.url + "/v1/", "--system", "Be kind.", "--max-tokens", "2"]
    assert chat(monkeypatch, "hi\nand?\n", *flags, "--temperature", "0", "--stop", "x") == 0
    assert capsys.readouterr().out == "w0 w1\nw0 w1\n"
    assert server.bodies[1] == {
        "model": "some-model",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "w0 w1"},
            {"role": "user", "content": "and?"},
        ],
        "stream": True,
        "max_tokens": 2,
        "temperature": 0.0,
        "stop": ["x"],
    }


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("400", "refused the request (400): this is a 400"),
        ("503", "takes no more requests now: this is a 503"),
        ("500", "failed (500): this is a 500"),
        ("error", "failed: out of luck"),
        ("no end", "broke off before the end"),
        ("cut", "broke off before the end"),
        ("drop", "cannot be reached"),
    ],
)
def test_a_failed_reply_does_not_end_the_chat(
    behaviour: str,
    message: str,
    server: ProtocolServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is reported, its message is dropped, and the next one is answered."""
    server.behaviours.append(behaviour)
    flags = ["--url", server.url, "--model", "m", "--max-tokens", "3"]
    assert chat(monkeypatch, "one\ntwo\n", *flags) == 0
    captured = capsys.readouterr()
    assert message in captured.err and captured.out.endswith("w0 w1 w2\n")
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "two"}]
    assert server.bodies[-1]["model"] == "m"


def test_keys(
    server: ProtocolServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "secret"
    assert chat(monkeypatch, "hi\n", "--url", server.url) == 2
    assert "wants a key that it knows (bad key); give --api-key" in capsys.readouterr().err
    assert chat(monkeypatch, "hi\n", "--url", server.url, "--api-key", "secret") == 0
    assert server.bodies[-1]["max_tokens"] == 1024, "an answer without an end has a limit"
    assert capsys.readouterr().out.startswith("w0 w1 w2 ")


def test_engine_options_are_refused_with_a_server(
    server: ProtocolServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "hi\n", "--url", server.url, "--block-size", "16") == 2
    assert "--block-size is of no use with --url" in capsys.readouterr().err


def test_complete(server: ProtocolServer, capsys: pytest.CaptureFixture[str]) -> None:
    """One prompt gives its text alone; several give prompts with their texts."""
    assert main(["complete", "Once", "--url", server.url, "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "w0 w1\n"
    assert main(["complete", "A ", "B ", "--url", server.url, "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "A w0 w1\n\nB w0 w1\n\n"
    assert [body["prompt"] for body in server.bodies] == ["Once", "A ", "B "]


def test_complete_reads_standard_input(
    server: ProtocolServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("From a pipe\n"))
    assert main(["complete", "--url", server.url, "--max-tokens", "1"]) == 0
    assert server.bodies[0]["prompt"] == "From a pipe"
    assert capsys.readouterr().out == "w0\n"


@pytest.mark.parametrize("words", [["complete", "x"], ["chat"]])
def test_no_server(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # taken, but not listened on
        port = unused.getsockname()[1]
        assert main([*words, "--url", f"localhost:{port}"]) == 2
    assert capsys.readouterr().err == (
        f"quire: error: no server listens at http://localhost:{port}; start one with "
        "`quire serve`, or give its address with --url.\n"
    )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("example.org/v1", "http://example.org:80"),
        ("https://example.org/proxy/v1/", "https://example.org:443/proxy"),
        ("[::1]:9", "http://[::1]:9"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    """As people write them, with what is left out filled in."""
    assert str(Address.parse(url)) == shown


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "[::1", "x:99999", "x:0", "x:y", "http://k@x", "x/?a=1"]
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(OptionError, match="--url"):
        Address.parse(url)
