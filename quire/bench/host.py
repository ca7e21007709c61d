"""`quire bench host`: what a step costs the host, with a device that takes no time.

Frontend, engine, scheduler and the rows of the worker are the real ones; only the model is not run,
and tokens are drawn in advance. So whatever time passes is the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.bench.flags import Flag, Lengths, add_flags, read_flags
from quire.bench.report import INK, Report, check_outputs, median, publish
from quire.bench.runs import Engines, say
from quire.bench.stopwatch import STAGES, HostRun, StepTimes, Stopwatch
from quire.bench.workload import longest
from quire.config.cli import Arguments

if TYPE_CHECKING:
    from quire.config.cli import CommandParser

FLAGS = (
    Flag("num_requests", 1024, 12, "Requests at once, all of which run together."),
    Flag("input_len", Lengths(128, 128), Lengths(8, 32), "Prompt tokens, or least and most."),
    Flag("output_len", Lengths(256, 256), Lengths(4, 16), "Tokens out, or least and most."),
    Flag("step_tokens", 8192, 64, "Tokens per step; the default is that of a GPU."),
    Flag("rounds", 4, 2, "Rounds; the first, which finds an empty cache, does not count.", 2),
)
SET_HERE = (
    "hf_overrides",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_steps_in_flight",
    "num_gpu_blocks_override",
)
KINDS = ("decode", "admission", "finish")


def add_arguments(parser: CommandParser) -> None:
    add_flags(parser, FLAGS, SET_HERE)


def run(arguments: Arguments) -> int:
    check_outputs(arguments)
    flags = read_flags(arguments, FLAGS)
    engines = Engines(arguments)
    dice, size = engines.dice("uniform"), engines.wanted.cache.block_size
    rounds = [
        dice.requests(flags.num_requests, flags.input_len, flags.output_len)
        for _ in range(flags.rounds)
    ]
    with engines.start(
        load_format="dummy",  # no weight is ever read, whatever --load-format says
        hf_overrides={"num_hidden_layers": 1},
        max_model_len=max(map(longest, rounds)),
        max_num_seqs=flags.num_requests,
        max_num_batched_tokens=flags.step_tokens,
        max_steps_in_flight=2,
        # Room for one round: each further one evicts what the one before left in the cache.
        num_gpu_blocks_override=max(sum(-(-r.num_tokens // size) for r in one) for one in rounds),
    ) as llm:
        watch = Stopwatch(llm)
        runs = []
        for number, requests in enumerate(rounds):
            say(f"round {number + 1} of {flags.rounds}: {len(requests)} requests")
            runs.append(watch.measure(requests))
        histogram = llm._core.metrics.step_host.read()
    figures = _figures(runs[1:], flags.num_requests)
    figures["step_host_seconds"] = {"mean": histogram.mean, "max": histogram.max}
    publish(_report(figures), arguments, engines)
    return 0


def _figures(runs: Sequence[HostRun], num_requests: int) -> dict[str, Any]:
    steps = [step for one in runs for step in one.steps]
    return {
        "num_requests": num_requests,
        "rounds": len(runs),
        "steps": {kind: _distributions([s for s in steps if s.kind == kind]) for kind in KINDS},
        "submit_s": median([one.submit_s for one in runs]),
        "read_s": median([one.read_s for one in runs]),
        "generate_s": median(
            [one.submit_s + one.read_s + sum(step.total for step in one.steps) for one in runs]
        ),
        "step_s": [step.total for step in runs[-1].steps],
    }


def _distributions(steps: Sequence[StepTimes]) -> dict[str, Any]:
    """Mean, median, p99 and worst of each stage and of all together."""
    columns = {stage: [step.seconds[stage] for step in steps] for stage in STAGES}
    columns["all"] = [step.total for step in steps]
    changes = sum(step.num_added + step.num_finished for step in steps)
    return {
        "count": len(steps),
        "requests": changes,
        **{
            name: {
                "mean": float(np.mean(values)),
                "median": median(values),
                "p99": float(np.percentile(values, 99)),
                "worst": max(values),
            }
            for name, values in columns.items()
            if values
        },
    }


def _report(figures: dict[str, Any]) -> Report:
    rows = []
    for kind in KINDS:
        steps = figures["steps"][kind]
        for name in (*STAGES, "all"):
            if name in steps:
                values = [f"{1000 * value:.3f}" for value in steps[name].values()]
                first = f"{kind}: {steps['count']:,} steps" if name == STAGES[0] else ""
                rows.append((first, name, *values))
    per_request = 1e6 / figures["num_requests"]
    notes = [
        f"Milliseconds per step, {figures['num_requests']:,} requests at once, "
        f"{figures['rounds']} rounds. Steps that admit requests, steps in which some end, others.",
        f"generate: {figures['generate_s']:.3f} s of host work, of it before the first step "
        f"{figures['submit_s']:.3f} s ({figures['submit_s'] * per_request:.0f} us per request), "
        f"after the last {figures['read_s']:.3f} s "
        f"({figures['read_s'] * per_request:.0f} us per request).",
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        values = [1000 * seconds for seconds in figures["step_s"]]
        axes.plot(values, color=INK[0])
        axes.set(xlabel="step", ylabel="ms", title="Host work", ylim=(0, None))

    title = f"Host work per step with {figures['num_requests']:,} requests"
    header = ("steps", "stage", "mean", "median", "p99", "worst")
    return Report("host", title, header, rows, notes, figures, draw)
