"""HTTPS, other sites, a proxy's path, and what the list of processes shows: one server with all."""

from __future__ import annotations

import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.running import OnLoop, RunningServer

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

SITE = "https://pages.example"
KEY = {"Authorization": "Bearer sesame"}


@dataclass
class Files:
    certificate: Path
    key: Path
    other_key: Path
    locked_key: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    made = Files(*(folder / name for name in ("cert.pem", "key.pem", "other.pem", "locked.pem")))

    def openssl(*words: str | Path) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)

    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-days", "2"),
        *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", made.key, "-out", made.certificate),
    )
    openssl("genrsa", "-out", made.other_key, "2048")
    openssl("rsa", "-aes128", "-passout", "pass:word", "-in", made.key, "-out", made.locked_key)
    return made


@pytest.fixture(scope="module")
def secure(files: Files, tiny_model: Path, on_loop: OnLoop) -> Iterator[RunningServer]:
    server = on_loop.start(
        *("--model", str(tiny_model), "--num-threads", "1", "--kv-cache-memory-bytes", "32MiB"),
        *("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)),
        *("--api-key", "sesame", "--admin-key=open-sesame", "--allowed-origins", SITE),
        *("--root-path", "/behind"),
    )
    server.certificate = files.certificate
    yield server
    assert server.stop() == 0


def test_requests_over_https(secure: RunningServer) -> None:
    assert secure.url.startswith("https://")
    body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
    whole = secure.request("POST", "/v1/completions", body, KEY)
    assert whole.json["usage"]["completion_tokens"] == 3
    streamed = secure.request("POST", "/v1/completions", {**body, "stream": True}, KEY)
    assert streamed.body.endswith(b"data: [DONE]\n\n")


def test_who_does_not_know_the_certificate_stays_away(secure: RunningServer) -> None:
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{secure.url}/health")


def test_plain_http_is_not_answered(secure: RunningServer) -> None:
    with secure.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not connection.recv(100).startswith(b"HTTP/")


def test_only_sites_that_were_named_may_call(secure: RunningServer) -> None:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-tenant"}
    allowed = "access-control-allow-origin"
    asked = secure.request("OPTIONS", "/v1/completions", None, {"Origin": SITE, **wanted})
    assert asked.status == 200 and asked.headers[allowed] == SITE
    elsewhere = {"Origin": "https://evil.example", **wanted}
    other = secure.request("OPTIONS", "/v1/completions", None, elsewhere)
    assert other.status == 400 and allowed not in other.headers
    assert secure.request("GET", "/version", None, {"Origin": SITE, **KEY}).headers[allowed] == SITE


@pytest.mark.parametrize("key", ["sesame", "wrong", ""])
def test_admin_routes_need_the_admin_key_wherever_a_proxy_shows_them(
    secure: RunningServer, key: str
) -> None:
    for path in ("/admin/reset_prefix_cache", "/behind/admin/reset_prefix_cache"):
        reply = secure.request("POST", path, None, {"Authorization": f"Bearer {key}"})
        assert reply.status in (401, 404)
    assert secure.request("GET", "/health").status == 200
    headers = {"Authorization": "Bearer open-sesame"}
    assert secure.request("POST", "/admin/reset_prefix_cache", None, headers).status == 200


def test_keys_are_not_passed_to_child_processes_by_their_command_lines(
    secure: RunningServer,
) -> None:
    shown = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in secure.child_pids("quire")]
    assert len(shown) == 2 and not any(b"sesame" in words for words in shown)
    assert "sesame" not in "".join(secure.lines)


@pytest.mark.parametrize("fault", ["missing", "other_key", "locked_key", "garbage"])
def test_files_that_cannot_be_used_end_the_start(files: Files, fault: str, tmp_path: Path) -> None:
    """No model is loaded first, no password is asked for, and the last line says it all."""
    garbage = tmp_path / "garbage"
    garbage.write_text("no certificate")
    certificate = {"missing": tmp_path / "none", "garbage": garbage}.get(fault, files.certificate)
    key = {"other_key": files.other_key, "locked_key": files.locked_key}.get(fault, files.key)
    server = RunningServer.start("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    assert not server.url and server.process.wait(60) == 2
    (line,) = server.lines
    assert line.startswith("quire: error: ssl_certfile=") and "PEM" in line
