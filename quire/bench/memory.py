"""`quire bench memory`: paging against reserving the maximum length, in the same memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from quire.bench.flags import (
    DISTRIBUTION,
    INPUT_LEN,
    OUTPUT_LEN,
    ROUNDS,
    Flag,
    Lengths,
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
from quire.bench.static_batches import StaticRun, load_model, run_static_batches
from quire.bench.steps import MemoryStep, mean_shares, under_load
from quire.bench.workload import BenchRequest, longest
from quire.config.cli import Arguments
from quire.protocol.errors import OptionError

if TYPE_CHECKING:
    from quire.config.cli import CommandParser

FLAGS = (
    Flag("num_requests", 32, 8, "Requests, all there from the start."),
    INPUT_LEN,
    replace(OUTPUT_LEN, usual=Lengths(8, 64)),
    DISTRIBUTION,
    Flag(
        "reservations",
        4.5,
        2.5,
        "KV memory, in requests of maximum length that it could hold; kv_cache_memory_bytes "
        "overrides it.",
    ),
    ROUNDS,
)
SLOT_LABELS = {
    "used": "used: holds a token",
    "internal": "internal: rest of the last block",
    "not_yet_used": "reserved, used later",
    "never_used": "reserved, never used",
    "padding": "padding of short prompts",
    "ended": "held for ended requests",
    "external": "external: too small to reserve",
    "free": "free",
}
SLOT_INKS = dict(
    zip(
        SLOT_LABELS,
        ("#2f6f9f", "#7a6c9d", "#f0b878", "#d9822b", "#a94f64", "#d59aa8", "#8a8a8a", "#eeeeee"),
        strict=True,
    )
)
SYSTEM_LABELS = {
    "paged": "paged",
    "max_length": "max length",
    "transformers": "transformers",
}


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "--no-transformers",
        action="store_true",
        help="Leave out transformers' generate, the slowest of the three.",
    )
    add_flags(parser, FLAGS, set_here=("reservation", "enable_prefix_caching"))


def run(arguments: Arguments) -> int:
    check_outputs(arguments)
    flags = read_flags(arguments, FLAGS)
    engines = Engines(arguments)
    requests = engines.dice(flags.distribution).requests(
        flags.num_requests, flags.input_len, flags.output_len
    )
    options = _same_memory(engines, requests, flags.reservations)
    runs: dict[str, list[Run]] = {"paged": [], "max_length": []}
    static: StaticRun | None = None
    for number in range(flags.rounds):
        for reservation, so_far in runs.items():
            say(f"round {number + 1} of {flags.rounds}: reservation={reservation}")
            with engines.start(reservation=reservation, **options) as llm:
                so_far.append(measure(llm, requests))
        if number == 0 and _wants_transformers(arguments):
            static = _static(engines, requests, runs["max_length"][0])
    figures = _figures(requests, runs, static)
    if static is not None and engines.wanted.model.load_format != "dummy":
        figures["equal_outputs"] = _num_equal(static.tokens, runs["paged"][0].tokens)
    publish(_report(figures), arguments, engines)
    return 0


def _same_memory(
    engines: Engines, requests: Sequence[BenchRequest], reservations: float
) -> dict[str, Any]:
    """Engine options that give every system the same memory.

    Without a length from the user the maximum is the longest request that occurs: the kindest
    choice for an engine that reserves it.
    """
    wanted, cache = engines.wanted.model, engines.wanted.cache
    length = wanted.max_model_len or longest(requests)
    if 0 < length < longest(requests):
        raise OptionError(
            f"max_model_len={length} is less than the longest request of {longest(requests)} "
            "tokens. Raise it, or lower --input-len or --output-len."
        )
    options: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": length}
    if cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None:
        per_request = -(-max(length, longest(requests)) // cache.block_size)
        options["num_gpu_blocks_override"] = int(reservations * per_request)
    return options


def _wants_transformers(arguments: Arguments) -> bool:
    if arguments.no_transformers:
        return False
    if importlib.util.find_spec("transformers") is None:
        say("transformers is not installed (pip install transformers): left out")
        return False
    return True


def _static(engines: Engines, requests: Sequence[BenchRequest], reserved: Run) -> StaticRun:
    """transformers, with as many requests at once as the memory holds at their maximum length."""
    import torch

    limits = reserved.log.scheduler.limits
    num_slots = limits.num_blocks * limits.block_size
    batch_size = num_slots // limits.max_model_len
    say(f"transformers: static batches of {batch_size}")
    torch.set_num_threads(engines.last["num_threads"])
    model = load_model(engines.model, engines.last["dtype"], engines.wanted.model.load_format)
    run_static_batches(model, [BenchRequest([1] * 16, 4)], 1, num_slots)
    return run_static_batches(model, requests, batch_size, num_slots)


def _figures(
    requests: Sequence[BenchRequest], runs: dict[str, list[Run]], static: StaticRun | None
) -> dict[str, Any]:
    limits = runs["max_length"][0].log.scheduler.limits
    per_reservation = {"paged": 1, "max_length": limits.max_blocks_per_row}
    systems = {name: _side(so_far, per_reservation[name]) for name, so_far in runs.items()}
    if static is not None:
        seconds = static.seconds
        systems["transformers"] = {
            **_memory(static.steps),
            "rounds_s": [seconds],
            "rounds_cpu_s": [static.cpu_s],
            "seconds": seconds,
            "output_tokens_per_s": sum(map(len, static.tokens)) / seconds,
        }
    speed = {name: system["output_tokens_per_s"] for name, system in systems.items()}
    return {
        "requests": described(requests),
        "num_blocks": limits.num_blocks,
        "block_size": limits.block_size,
        "max_model_len": limits.max_model_len,
        "systems": systems,
        "speedup": {
            name: speed["paged"] / other for name, other in speed.items() if name != "paged"
        },
    }


def _side(runs: Sequence[Run], blocks_per_reservation: int) -> dict[str, Any]:
    first, seconds = runs[0], median([one.seconds for one in runs])
    return {
        **_memory(first.log.memory_steps(blocks_per_reservation)),
        "rounds_s": [one.seconds for one in runs],
        "rounds_cpu_s": [one.cpu_s for one in runs],
        "seconds": seconds,
        "output_tokens_per_s": first.num_output_tokens / seconds,
        "max_unused_slots": first.log.max_unused_slots,
        "preemptions": first.num_preemptions,
    }


def _memory(steps: Sequence[MemoryStep]) -> dict[str, Any]:
    loaded = under_load(steps)
    shares = mean_shares(loaded)
    return {
        "slots": asdict(shares),
        "waste": shares.waste,
        "in_flight_mean": sum(step.num_running for step in loaded) / len(loaded),
        "in_flight_max": max(step.num_running for step in steps),
        "steps": len(steps),
        "steps_under_load": len(loaded),
        "slots_over_all_steps": asdict(mean_shares(steps)),
    }


def _num_equal(left: Sequence[list[int]], right: Sequence[list[int]]) -> int:
    return sum(mine == theirs for mine, theirs in zip(left, right, strict=True))


def _report(figures: dict[str, Any]) -> Report:
    systems = figures["systems"]

    def row(label: str, shown: Any) -> tuple[str, ...]:
        return (label, *(shown(system) for system in systems.values()))

    fast = systems["paged"]["output_tokens_per_s"]
    rows = [
        row("waste, of what is taken", lambda one: percent(one["waste"])),
        *(
            row(f"  {label}", lambda one, name=name: percent(one["slots"][name]))
            for name, label in SLOT_LABELS.items()
        ),
        row("requests in flight, mean", lambda one: f"{one['in_flight_mean']:.1f}"),
        row("requests in flight, most", lambda one: f"{one['in_flight_max']}"),
        row("steps", lambda one: f"{one['steps']:,}"),
        row("output tokens/s", lambda one: f"{one['output_tokens_per_s']:,.1f}"),
        row("paged is faster by", lambda one: f"{fast / one['output_tokens_per_s']:.2f} x"),
    ]
    slots = figures["num_blocks"] * figures["block_size"]
    notes = [
        f"{len(figures['requests'])} requests in {slots:,} KV slots ({figures['num_blocks']} "
        f"blocks of {figures['block_size']}); the maximum length is {figures['max_model_len']} "
        "tokens. Indented lines are shares of all slots; these and the mean in flight are "
        "averages over the steps during which requests waited. Speed: median of "
        f"{counted(len(systems['paged']['rounds_s']), 'interleaved round')}; transformers: one."
    ]
    if "equal_outputs" in figures:
        notes.append(
            f"{figures['equal_outputs']} of {len(figures['requests'])} outputs of transformers "
            "are equal to Quire's."
        )

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 1))
        _draw_slots(left, systems)
        labels = [SYSTEM_LABELS[name] for name in systems][::-1]
        speeds = [system["output_tokens_per_s"] for system in systems.values()][::-1]
        bars = right.barh(labels, speeds, color=INK[0])
        right.bar_label(bars, fmt="%.0f", padding=3)
        right.set(xlabel="output tokens/s", yticks=[], title="Throughput")
        right.margins(x=0.2)

    header = ("", *(SYSTEM_LABELS[name] for name in systems))
    title = "KV memory: paging against reserving the maximum length"
    return Report("memory", title, header, rows, notes, figures, draw, size=(10.0, 3.8))


def _draw_slots(axes: Any, systems: dict[str, Any]) -> None:
    """One bar per system, cut into what its slots were doing."""
    names = list(systems)[::-1]
    start = [0.0] * len(names)
    for kind, label in SLOT_LABELS.items():
        widths = [100 * systems[name]["slots"][kind] for name in names]
        if not any(widths):
            continue
        bars = axes.barh(
            [SYSTEM_LABELS[name] for name in names],
            widths,
            left=start,
            color=SLOT_INKS[kind],
            label=label,
        )
        texts = [f"{width:.0f}" if width >= 4 else "" for width in widths]
        dark = kind in ("used", "internal", "padding", "external")
        axes.bar_label(bars, texts, label_type="center", color="white" if dark else "black")
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.set(
        xlim=(0, 100), xlabel="% of KV slots, while requests wait", title="What the memory does"
    )
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22))
