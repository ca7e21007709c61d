"""`quire bench serve` over real sockets, against a server that knows nothing of Quire.

No test looks at how long anything took, only at how times add up.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.bench.serving.prompts import load_tokenizer
from quire.cli import main
from quire.config.embedded import find_embedded_model
from tests.protocol_server import ProtocolServer, protocol_server

Serve = Callable[..., dict[str, Any]]

LENGTHS = ["--input-len", "7:20", "--output-len", "3:6"]


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    with protocol_server() as running:
        yield running


@pytest.fixture
def serve(server: ProtocolServer, tmp_path: Path) -> Serve:
    """Runs `quire bench serve` and returns what it wrote as JSON."""

    def run(*words: str, status: int = 0) -> dict[str, Any]:
        path = tmp_path / "figures.json"
        given = ["bench", "serve", "--url", server.url, "--quick", "--json", str(path), *words]
        assert main(given) == status
        figures: dict[str, Any] = json.loads(path.read_text())
        return figures

    return run


@pytest.mark.parametrize("backend", ["openai", "openai-chat", "tgi", "triton", "ollama"])
def test_every_backend(backend: str, serve: Serve, server: ProtocolServer) -> None:
    """Tokens are those asked for, each piece with a token is one arrival, and no other event is."""
    words = ["--model", "ensemble"] if backend == "triton" else []
    figures = serve("--backend", backend, "--warm-up", "0", *LENGTHS, *words)
    assert figures["completed"] == figures["requests"] == len(server.seen) == 8
    lengths = [_asked_for(backend, body) for body in server.bodies]
    assert figures["output_tokens"] == figures["pieces"] == sum(out for _, out in lengths)
    assert figures["input_tokens"] == sum(prompt for prompt, _ in lengths)
    assert figures["counted_by_server"] is (backend != "triton")
    assert all(7 <= prompt <= 20 and 3 <= out <= 6 for prompt, out in lengths)
    names = {"tgi": "tgi-model", "triton": "ensemble", "ollama": "ollama-model:latest"}
    assert figures["model"] == names.get(backend, "some-model")


def _asked_for(backend: str, body: dict[str, Any]) -> tuple[int, int]:
    """Words of the prompt and tokens to generate, where each server's documentation has them."""
    if backend == "tgi":
        return len(body["inputs"].split()), body["parameters"]["max_new_tokens"]
    if backend == "triton":
        return len(body["text_input"].split()), body["max_tokens"]
    if backend == "ollama":
        return len(body["prompt"].split()), body["options"]["num_predict"]
    prompt = body["messages"][0]["content"] if backend == "openai-chat" else body["prompt"]
    return len(prompt.split()), body["max_tokens"]


def test_routes_headers_and_extra_fields(serve: Serve, server: ProtocolServer) -> None:
    """The key is sent, a null leaves a field out, and outputs may be allowed to end."""
    server.key = "secret"
    extra = json.dumps({"temperature": None, "top_k": 5})
    serve("--api-key", "secret", "--extra-body", extra, "--respect-eos", "--model", "mine")
    assert {seen.path for seen in server.seen} == {"/v1/completions"}
    for body in server.bodies:
        assert body["model"] == "mine" and body["top_k"] == 5 and body["stream"] is True
        assert not body.keys() & {"temperature", "ignore_eos"}


def test_prompts_depend_on_the_seed_alone(serve: Serve, server: ProtocolServer) -> None:
    """Two engines get the same load; warm-up prompts are others, so no cache knows the load's."""
    prompts = []
    for seed in ("1", "1", "2"):
        server.seen.clear()
        serve("--seed", seed, "--warm-up", "2")
        prompts.append(sorted(body["prompt"] for body in server.bodies))
    assert prompts[0] == prompts[1] != prompts[2]
    assert len(set(prompts[0])) == 10


def test_shared_prefix_and_token_ids(serve: Serve, server: ProtocolServer) -> None:
    """All prompts begin alike and go on differently; ids are below the size given."""
    words = ["--vocab-size", "50", "--shared-prefix-len", "6", "--input-len", "16"]
    figures = serve(*words, "--warm-up", "0")
    prompts = [body["prompt"] for body in server.bodies]
    assert all(len(prompt) == 16 and 0 <= min(prompt) <= max(prompt) < 50 for prompt in prompts)
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt[6:]) for prompt in prompts}) == len(prompts)
    assert figures["input_tokens"] == 8 * 16


def test_concurrency_is_kept_and_connections_are_reused(
    serve: Serve, server: ProtocolServer
) -> None:
    figures = serve("--concurrency", "3", "--num-requests", "20", "--warm-up", "0")
    assert figures["completed"] == 20
    assert server.most_at_once <= 3 and figures["max_in_flight"] <= 3
    assert len({seen.connection for seen in server.seen}) <= 3


def test_failures_are_counted_by_kind(
    serve: Serve, server: ProtocolServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad answer is one failure with its reason; the figures are those of the others."""
    server.behaviours += ["503", "400", "503", "error", "cut", "no end", "empty"]
    figures = serve("--concurrency", "1", "--num-requests", "9", "--warm-up", "0")
    counts = {kind: one["count"] for kind, one in figures["failures"].items()}
    assert counts == {
        "HTTP 503": 2,
        "HTTP 400": 1,
        "error in the stream": 1,
        "connection lost": 1,
        "stream without an end": 2,
    }
    assert figures["failures"]["HTTP 400"]["example"] == "this is a 400"
    assert figures["failures"]["error in the stream"]["example"] == "out of luck"
    assert figures["completed"] == 2
    good = [one for one in figures["records"] if "failure" not in one]
    assert figures["output_tokens"] == sum(one["output_tokens"] for one in good)
    assert "Failed: 2 x HTTP 503 (this is a 503)." in capsys.readouterr().out


def test_an_idle_connection_that_the_server_closed_is_no_failure(
    serve: Serve, server: ProtocolServer
) -> None:
    """A request that was never read is sent again; one on a fresh connection is not."""
    server.behaviours += ["", "drop"]
    figures = serve("--concurrency", "1", "--num-requests", "3", "--warm-up", "0")
    assert figures["completed"] == 3 and len(server.seen) == 4
    server.behaviours += ["drop", "", ""]
    words = ["--model", "m"]  # looking for it would open a connection
    figures = serve("--concurrency", "1", "--num-requests", "3", "--warm-up", "0", *words)
    assert figures["failures"]["connection lost"]["count"] == 1


def test_only_failures_is_a_failure(serve: Serve, server: ProtocolServer) -> None:
    server.behaviours += ["500"] * 2
    figures = serve("--num-requests", "2", "--warm-up", "0", status=1)
    assert figures["completed"] == 0 and figures["ttft_s"] is None


def test_times_add_up(serve: Serve) -> None:
    """Percentiles are of the requests' own times, which lie within each other."""
    figures = serve("--rate", "inf", "--num-requests", "11", *LENGTHS)
    for name in ("ttft_s", "e2e_s"):
        values = sorted(one[name] for one in figures["records"])
        spread = figures[name]
        assert spread["p50"] == pytest.approx(values[5])
        assert spread["p90"] == pytest.approx(values[9])
        assert spread["min"] == values[0] and spread["max"] == values[-1]
        assert spread["mean"] == pytest.approx(sum(values) / 11)
    assert all(
        0 < one["ttft_s"] <= one["e2e_s"] <= figures["seconds"] for one in figures["records"]
    )
    assert figures["output_tokens_per_s"] == pytest.approx(
        figures["output_tokens"] / figures["seconds"]
    )
    assert figures["max_in_flight"] <= 11


def test_cost(serve: Serve) -> None:
    """A million tokens take a million over the tokens per second, at the price of that time."""
    figures = serve("--price-per-hour", "7.2")
    hours = 1e6 / figures["output_tokens_per_s"] / 3600
    assert figures["cost"]["per_million_output_tokens"] == pytest.approx(7.2 * hours)
    assert figures["cost"]["per_million_total_tokens"] < 7.2 * hours


def test_sweep(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One result per load, a row for each, and a picture."""
    pytest.importorskip("matplotlib")
    plot = tmp_path / "sweep.png"
    figures = serve("--sweep", "--concurrency", "1,2,4", "--plot", str(plot))
    assert [one["load"] for one in figures["results"]] == [
        {"kind": "concurrency", "value": value} for value in (1, 2, 4)
    ]
    assert [one["completed"] for one in figures["results"]] == [8, 8, 8]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "latency against throughput" in capsys.readouterr().out


def test_plot_of_one_load(serve: Serve, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "one.svg"
    serve("--plot", str(plot))
    assert "<svg" in plot.read_text()


def test_mooncake_trace(serve: Serve, server: ProtocolServer, tmp_path: Path) -> None:
    """Prompts that begin with the same hash ids begin with the same 512 words each, and part where
    the ids do."""
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 2, "hash_ids": [5, 6, 7]},
        {"timestamp": 1, "input_length": 1030, "output_length": 3, "hash_ids": [5, 6, 8]},
        {"timestamp": 1, "input_length": 600, "output_length": 4, "hash_ids": [5, 9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = serve("--trace", str(path), "--trace-speed", "2", "--warm-up", "0")
    assert figures["load"] == {"kind": "speed", "value": 2}
    found = sorted((body["max_tokens"], body["prompt"].split()) for body in server.bodies)
    (first, second, third) = [prompt for _, prompt in found]
    assert [len(first), len(second), len(third)] == [1100, 1030, 600]
    assert first[:1024] == second[:1024] and first[1024:1030] != second[1024:]
    assert first[:512] == third[:512] and first[512:600] != third[512:]
    server.seen.clear()
    serve("--trace", str(path), "--max-input-len", "700", "--max-output-len", "2", "--warm-up", "0")
    cut = sorted(len(body["prompt"].split()) for body in server.bodies)
    assert cut == [600, 700, 700]
    assert {body["max_tokens"] for body in server.bodies} == {2}


@pytest.mark.parametrize(
    ("name", "inputs", "last_s"),
    [
        ("AzureLLMInferenceTrace_conv.csv", [374, 396, 879], 4.5418770),
        ("mooncake_arxiv_trace_first1000.jsonl", [6755, 7319, 7234], 0.0),
    ],
)
def test_published_traces(
    name: str,
    inputs: list[int],
    last_s: float,
    serve: Serve,
    server: ProtocolServer,
    test_data: Path,
) -> None:
    """The files as their owners publish them."""
    path = str(test_data / "traces" / name)
    words = ["--trace", path, "--num-requests", "3", "--trace-speed", "1e6", "--warm-up", "0"]
    figures = serve(*words)
    assert sorted(len(body["prompt"].split()) for body in server.bodies) == sorted(inputs)
    assert figures["completed"] == 3
    from quire.bench.serving.traces import read_trace

    assert read_trace(path, 3)[-1].arrival_s == pytest.approx(last_s, abs=1e-6)


@pytest.mark.skipif(find_embedded_model() is None, reason="the embedded model is not installed")
def test_tokenizer_makes_lengths_exact(serve: Serve, server: ProtocolServer) -> None:
    """Counted by the tokenizer itself, joined pieces included."""
    model = str(find_embedded_model())
    serve("--tokenizer", model, "--input-len", "33", "--shared-prefix-len", "10")
    tokenizer = load_tokenizer(model)
    assert {len(tokenizer.encode(body["prompt"], False)) for body in server.bodies} == {33}


@pytest.mark.skipif(find_embedded_model() is None, reason="the embedded model is not installed")
def test_tokenizer_counts_what_the_server_does_not(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the sum as in each record, and no note says that pieces were counted."""
    flags = ["--backend", "triton", "--model", "ensemble"]
    pieces = serve(*flags)
    assert "a piece of the stream counts as one" in capsys.readouterr().out
    assert pieces["output_tokens"] == pieces["pieces"]
    figures = serve(*flags, "--tokenizer", str(find_embedded_model()))
    assert figures["output_tokens"] > figures["pieces"]  # a word of this server is several tokens
    assert figures["output_tokens"] == sum(one["output_tokens"] for one in figures["records"])
    assert "a piece of the stream counts as one" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "grpc"], "--backend must be one of openai"),
        (["--rate", "0"], "--rate must be a number of at least"),
        (["--rate", "1,x", "--sweep"], "--rate must be a number"),
        (["--concurrency", "1.5"], "--concurrency must be an integer of at least 1, got '1.5'"),
        (["--concurrency", "1,2"], "add --sweep"),
        (["--concurrency", "1", "--sweep"], "--sweep needs several values"),
        (["--rate", "1", "--concurrency", "1"], "--rate and --concurrency cannot be combined"),
        (["--trace-speed", "2"], "--trace-speed is of use with --trace only"),
        (["--burstiness", "2"], "--burstiness is of use with --rate only"),
        (["--backend", "tgi", "--vocab-size", "9"], "--backend tgi takes text only"),
        (["--shared-prefix-len", "50"], "must be below the least --input-len"),
        (["--extra-body", "[1]"], "--extra-body must be a JSON object"),
        (["--url", "ftp://x"], "--url must be the address of a server"),
        (["--trace", "no/such/file"], "--trace 'no/such/file' cannot be read"),
        (["--plot", "x.doc"], "--plot 'x.doc' must end in one of"),
        (["--backend", "triton"], "--backend triton names no models; give --model"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Named before anything is sent."""
    assert main(["bench", "serve", "--url", "127.0.0.1:9", *words]) == 2
    assert message in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # taken, but not listened on
        url = f"127.0.0.1:{unused.getsockname()[1]}"
        assert main(["bench", "serve", "--url", url]) == 2
    assert f"no server listens at http://{url}; start one" in capsys.readouterr().err


def test_a_server_that_refuses(server: ProtocolServer, capsys: pytest.CaptureFixture[str]) -> None:
    """The first request tells why, instead of a table of failures."""
    server.behaviours += ["400"]
    assert main(["bench", "serve", "--url", server.url]) == 2
    assert "failed: HTTP 400: this is a 400" in capsys.readouterr().err
    server.key = "other"
    assert main(["bench", "serve", "--url", server.url]) == 2
    assert "give --api-key" in capsys.readouterr().err
