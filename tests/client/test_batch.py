"""`quire run-batch`: files in OpenAI's batch format, through a server on a real socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.client import batch
from tests.protocol_server import ProtocolServer, protocol_server

Run = Callable[..., dict[str | None, dict[str, Any]]]
SERIAL = ("--concurrency", "1")


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    with protocol_server() as running:
        yield running


@pytest.fixture
def run(server: ProtocolServer, tmp_path: Path) -> Run:
    """Runs lines as a batch; returns the results by custom id."""

    def run_lines(
        *lines: Any, words: tuple[str, ...] = (), status: int = 0
    ) -> dict[str | None, dict[str, Any]]:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        source.write_text("\n".join(texts) + "\n")
        flags = ["-i", str(source), "-o", str(target), "--url", server.url]
        assert main(["run-batch", *flags, *words]) == status
        results = [json.loads(line) for line in target.read_text().splitlines()]
        assert all(result.keys() == {"id", "custom_id", "response", "error"} for result in results)
        assert len({result["id"] for result in results}) == len(results)
        return {result["custom_id"]: result for result in results}

    return run_lines


def line(custom_id: Any, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_answers_are_kept_whole(
    run: Run, server: ProtocolServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each body goes to its route unchanged, and comes back as the server answered."""
    messages = [{"role": "user", "content": "é"}]
    results = run(
        line("a", prompt="x", max_tokens=2),
        line("b", "/v1/chat/completions", messages=messages, max_tokens=1),
        line("c", "/v1/embeddings", input="x"),
        words=("--concurrency", "2"),
    )
    assert results["a"]["error"] is None
    assert results["a"]["response"]["status_code"] == 200
    assert results["a"]["response"]["request_id"] == "request-7"
    assert results["a"]["response"]["body"]["choices"][0]["text"] == "w0 w1"
    assert results["b"]["response"]["body"]["choices"][0]["message"]["content"] == "w0"
    sent = {seen.path: seen.body for seen in server.seen}
    assert sent == {
        "/v1/completions": {"prompt": "x", "max_tokens": 2},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/embeddings": {"input": "x"},
    }
    assert server.most_at_once <= 2
    assert "quire run-batch: 3 completed, 0 failed; see " in capsys.readouterr().err


def test_a_refused_request_has_the_servers_answer(run: Run, server: ProtocolServer) -> None:
    """And one without any answer says why; the others are not touched."""
    server.behaviours += ["400", "drop"]
    results = run(
        line("refused", prompt="x"),
        line("lost", prompt="x"),
        line("good", prompt="x"),
        words=("--concurrency", "1"),
        status=1,
    )
    response = results["refused"]["response"]
    assert response["status_code"] == 400 and results["refused"]["error"] is None
    assert response["body"]["error"]["message"] == "this is a 400"
    # An idle connection that was closed is tried again, on a new one.
    assert results["lost"]["response"]["status_code"] == 200
    assert results["good"]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("bad", "custom_id", "message"),
    [
        ("{", None, "line 2 is not JSON"),
        ("[" * 100_000, None, "line 2 is not JSON"),
        ([1], None, "line 2 must be a JSON object"),
        (line(None), None, "line 2: custom_id must be a text, got None"),
        (line(""), None, "line 2: custom_id must be a text, got ''"),
        (line("x") | {"method": "GET"}, "x", "line 2: method must be \"POST\", got 'GET'"),
        (line("x", "/v1/models"), "x", "line 2: url must be one of /v1/chat/completions"),
        (line("x") | {"body": None}, "x", "line 2: body must be a JSON object, got None"),
        (line("x", stream=True), "x", "line 2: body.stream must be left out"),
    ],
)
def test_bad_lines_do_not_end_the_batch(
    bad: Any,
    custom_id: str | None,
    message: str,
    run: Run,
    server: ProtocolServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = run(line("first", prompt="x"), bad, "", line("last", prompt="x"), status=1)
    assert results[custom_id]["response"] is None
    assert results[custom_id]["error"]["code"] == "invalid_line"
    assert message in results[custom_id]["error"]["message"]
    for name in ("first", "last"):
        assert results[name]["response"]["status_code"] == 200
    assert len(server.seen) == 2
    assert "2 completed, 0 failed, 1 bad lines" in capsys.readouterr().err


def test_half_a_character_comes_back_as_it_was(run: Run) -> None:
    results = run(line("\ud83d", prompt="x"), line("\u00e9", prompt="x"))
    assert results.keys() == {"\ud83d", "\u00e9"}
    assert all(result["response"]["status_code"] == 200 for result in results.values())


def test_a_custom_id_may_come_once(run: Run, server: ProtocolServer, tmp_path: Path) -> None:
    """A reader finds the results by it."""
    run(line("a", prompt="x"), line("a", prompt="y"), status=1)
    results = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    (wrong,) = [result for result in results if result["error"]]
    assert "line 2: custom_id 'a' was used before" in wrong["error"]["message"]
    assert [body["prompt"] for body in server.bodies] == ["x"]


def output_lines(tmp_path: Path) -> list[str]:
    return (tmp_path / "out.jsonl").read_text().splitlines()


@pytest.mark.parametrize("trouble", ["429", "500", "503", "drop"])
def test_what_is_the_servers_trouble_is_tried_again(
    trouble: str, run: Run, server: ProtocolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "FIRST_WAIT_S", 0.001)
    server.behaviours += [trouble] * 5
    results = run(*(line(f"{i}", prompt="x") for i in range(8)))
    assert len(results) == 8 and len(server.seen) >= 8 + 5
    assert all(result["response"]["status_code"] == 200 for result in results.values())


@pytest.mark.parametrize("trouble", ["503", "drop"])
def test_trying_again_has_a_bound(
    trouble: str,
    run: Run,
    server: ProtocolServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit status and the counts say what is missing; a rerun does that alone."""
    lines = [line(f"{i}", prompt="x") for i in range(3)]
    words = ("--concurrency", "1", "--retry-for", "0")
    run(lines[0])
    # A request on an idle connection that was closed is sent once more by the connection's owner.
    server.behaviours += [trouble] * (3 if trouble == "drop" else 2)
    results = run(*lines, words=words, status=1)
    assert results["0"]["response"]["status_code"] == 200
    assert "0 completed, 2 failed, 1 done before; see " in capsys.readouterr().err
    kept = output_lines(tmp_path)[0]
    server.seen.clear()
    results = run(*lines)
    assert len(server.seen) == 2 and len(results) == 3
    assert output_lines(tmp_path)[0] == kept, "what was done is not touched"
    assert all(result["response"]["status_code"] == 200 for result in results.values())
    assert "2 completed, 0 failed, 1 done before" in capsys.readouterr().err
    server.seen.clear()
    run(*lines)
    assert not server.seen


def test_one_request_is_not_tried_for_ever(
    run: Run, server: ProtocolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what makes the server fail."""
    monkeypatch.setattr(batch, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(batch, "LONGEST_WAIT_S", 0.0)
    server.behaviours += ["500"] * batch.MAX_TRIES
    results = run(line("bad", prompt="x"), line("good", prompt="x"), status=1, words=SERIAL)
    assert results["bad"]["response"]["status_code"] == 500
    assert results["good"]["response"]["status_code"] == 200
    assert len(server.seen) == batch.MAX_TRIES + 1


def test_a_result_cut_off_is_made_again(run: Run, server: ProtocolServer, tmp_path: Path) -> None:
    """At whatever byte a crash left the file; the results before it stay as they are."""
    lines = [line(f"{i}", prompt="é") for i in range(3)]
    run(*lines, words=SERIAL)
    target = tmp_path / "out.jsonl"
    whole = target.read_bytes()
    first = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for cut in (first, first + 1, first + 40, len(whole) - 1):
        target.write_bytes(whole[:cut])
        server.seen.clear()
        results = run(*lines)
        assert results.keys() == {"0", "1", "2"} and len(server.seen) == 1
        assert target.read_bytes()[:first] == whole[:first]
    target.write_bytes(whole + bytes(100))  # what a file system may leave after a power cut
    assert run(*lines).keys() == {"0", "1", "2"} and len(server.seen) == 1


def test_a_request_that_changed_is_run_again(run: Run, server: ProtocolServer) -> None:
    run(line("a", prompt="x"), line("b", prompt="x"))
    server.seen.clear()
    run(line("a", prompt="x"), line("b", prompt="y"), line("c", prompt="x"))
    assert sorted(body["prompt"] for body in server.bodies) == ["x", "y"]
    server.seen.clear()
    run(line("a", prompt="x"), words=("--overwrite",))
    assert len(server.seen) == 1


@pytest.mark.parametrize("text", ["my notes\nof yesterday\n", "my notes", "{}", '{"id": 1}\n'])
def test_a_file_of_another_kind_is_not_touched(
    text: str, tmp_path: Path, server: ProtocolServer, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text(text)
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line("a", prompt="x")))
    words = ["run-batch", "-i", str(source), "-o", str(target), "--url", server.url]
    assert main(words) == 2
    assert "line 1 is no result of a batch" in capsys.readouterr().err
    assert target.read_text() == text and not server.seen
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-i", "no-such-file", "-o", "out"], "--input-file 'no-such-file' does not exist"),
        (["-i", "in", "-o", "in"], "--output-file must not be the --input-file"),
        (["-i", "in", "-o", "out", "--concurrency", "0"], "--concurrency must be at least 1"),
        (["-i", "in", "-o", "out", "--retry-for", "-1"], "--retry-for must be at least 0"),
        (["-i", "in", "-o", "out"], "no server listens at http://127.0.0.1:9"),
        (["-i", "in", "-o", "out", "--block-size", "16"], "--block-size is of no use with --url"),
    ],
)
def test_mistakes(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text("\n")
    assert main(["run-batch", *words, "--url", "http://127.0.0.1:9"]) == 2
    assert message in capsys.readouterr().err
