"""`quire bench throughput`: many requests at once, tokens per second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.bench.flags import (
    DISTRIBUTION,
    INPUT_LEN,
    OUTPUT_LEN,
    ROUNDS,
    Flag,
    add_flags,
    read_flags,
)
from quire.bench.report import (
    INK,
    Report,
    check_outputs,
    counted,
    described,
    median,
    percent,
    publish,
)
from quire.bench.runs import Engines, Run, measure, say
from quire.bench.workload import read_requests
from quire.config.cli import Arguments

if TYPE_CHECKING:
    from quire.config.cli import CommandParser

FLAGS = (
    Flag("num_requests", 32, 6, "Requests, all there from the start."),
    INPUT_LEN,
    OUTPUT_LEN,
    DISTRIBUTION,
    ROUNDS,
)


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "--requests",
        metavar="FILE[:KEY]",
        help='Read requests from a JSON list of {"ids": [...], "out": N} instead of making them.',
    )
    add_flags(parser, FLAGS)


def run(arguments: Arguments) -> int:
    check_outputs(arguments)
    flags = read_flags(arguments, FLAGS)
    given = None if arguments.requests is None else read_requests(arguments.requests)
    engines = Engines(arguments)
    requests = given or engines.dice(flags.distribution).requests(
        flags.num_requests, flags.input_len, flags.output_len
    )
    runs = []
    with engines.start() as llm:
        before = llm._core.expert_counts()
        for number in range(flags.rounds):
            say(f"round {number + 1} of {flags.rounds}: {len(requests)} requests")
            llm.reset_prefix_cache()
            runs.append(measure(llm, requests))
        experts = llm._core.expert_counts().since(before)
    figures = _figures(runs, len(requests))
    figures["requests"] = described(requests)
    figures["experts_per_step"] = experts.mean_used
    publish(_report(runs, figures), arguments, engines)
    return 0


def _figures(runs: list[Run], num_requests: int) -> dict[str, Any]:
    first = runs[0]
    seconds = median([one.seconds for one in runs])
    return {
        "rounds_s": [one.seconds for one in runs],
        "rounds_cpu_s": [one.cpu_s for one in runs],
        "seconds": seconds,
        "input_tokens": first.num_input_tokens,
        "output_tokens": first.num_output_tokens,
        "output_tokens_per_s": first.num_output_tokens / seconds,
        "total_tokens_per_s": (first.num_input_tokens + first.num_output_tokens) / seconds,
        "requests_per_s": num_requests / seconds,
        "steps": len(first.log.samples),
        "max_running": max(first.log.num_running),
        "peak_blocks": first.log.peak_blocks,
        "waste": first.log.waste,
        "hit_rate": first.hit_rate,
        "preemptions": first.num_preemptions,
    }


def _report(runs: list[Run], figures: dict[str, Any]) -> Report:
    rows = [
        ("output tokens/s", f"{figures['output_tokens_per_s']:,.1f}"),
        ("total tokens/s", f"{figures['total_tokens_per_s']:,.1f}"),
        ("requests/s", f"{figures['requests_per_s']:.2f}"),
        ("seconds", f"{figures['seconds']:.2f}"),
        ("steps", f"{figures['steps']:,}"),
        ("requests in flight, most", f"{figures['max_running']}"),
        ("KV blocks in use, most", f"{figures['peak_blocks']:,}"),
        ("KV slots without a token", percent(figures["waste"])),
        ("preemptions", f"{figures['preemptions']}"),
    ]
    if figures["experts_per_step"] is not None:
        rows.append(("experts used per layer and step", f"{figures['experts_per_step']:.1f}"))
    notes = [
        f"{figures['input_tokens']:,} tokens in, {figures['output_tokens']:,} out; median of "
        f"{counted(len(runs), 'round')}, from {min(figures['rounds_s']):.2f} to "
        f"{max(figures['rounds_s']):.2f} s."
    ]

    def draw(figure: Any) -> None:
        log = runs[0].log
        left, right = figure.subplots(1, 2)
        left.plot(log.num_running, color=INK[0], label="running")
        left.plot([s.num_waiting for s in log.samples], color=INK[1], label="waiting")
        left.set(xlabel="step", ylabel="requests", title="Requests", ylim=(0, None))
        left.legend(frameon=False)
        size = log.block_size
        right.plot([s.num_used * size for s in log.samples], color=INK[1], label="held")
        right.plot([s.num_tokens.sum() for s in log.samples], color=INK[0], label="with a token")
        right.set(xlabel="step", ylabel="KV slots", title="KV cache", ylim=(0, None))
        right.legend(frameon=False)

    title = f"Throughput: {figures['output_tokens_per_s']:,.1f} output tokens/s"
    return Report("throughput", title, ("", "value"), rows, notes, figures, draw)
