"""`quire bench blocks`: block sizes against each other, on short and on long requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.bench.flags import ROUNDS, Flag, Lengths, add_flags, read_flags
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
from quire.config.cli import Arguments
from quire.protocol.errors import OptionError
from quire.protocol.kv_spec import BLOCK_SIZES

if TYPE_CHECKING:
    from quire.config.cli import CommandParser

FLAGS = (
    Flag("block_sizes", (4, 8, 16, 32, 64), (4, 16), "Block sizes to compare."),
    Flag("short_requests", 16, 4, "Requests of the short mix."),
    Flag("short_input_len", Lengths(8, 64), Lengths(8, 16), "Prompt tokens there."),
    Flag("short_output_len", Lengths(4, 32), Lengths(4, 8), "Tokens to generate there."),
    Flag("long_requests", 4, 2, "Requests of the long mix."),
    Flag("long_input_len", Lengths(128, 512), Lengths(48, 64), "Prompt tokens there."),
    Flag("long_output_len", Lengths(16, 64), Lengths(8, 16), "Tokens to generate there."),
    ROUNDS,
)

Runs = dict[tuple[str, int], list[Run]]
"""By mix and block size."""


def add_arguments(parser: CommandParser) -> None:
    add_flags(parser, FLAGS, set_here=("block_size", "enable_prefix_caching"))


def run(arguments: Arguments) -> int:
    check_outputs(arguments)
    flags = read_flags(arguments, FLAGS)
    _check_sizes(flags.block_sizes)
    engines = Engines(arguments)
    dice = engines.dice()
    mixes = {
        "short": dice.requests(flags.short_requests, flags.short_input_len, flags.short_output_len),
        "long": dice.requests(flags.long_requests, flags.long_input_len, flags.long_output_len),
    }
    runs: Runs = {(mix, size): [] for mix in mixes for size in flags.block_sizes}
    for number in range(flags.rounds):
        for size in flags.block_sizes:
            say(f"round {number + 1} of {flags.rounds}: block_size={size}")
            # Sharing would blur what is counted: without it, each block has one owner.
            with engines.start(block_size=size, enable_prefix_caching=False) as llm:
                for mix, requests in mixes.items():
                    runs[mix, size].append(measure(llm, requests))
    figures = {
        "mixes": {mix: described(requests) for mix, requests in mixes.items()},
        "rounds": flags.rounds,
        "results": [
            {"mix": mix, "block_size": size, **_side(so_far)}
            for (mix, size), so_far in runs.items()
        ],
    }
    publish(_report(figures), arguments, engines)
    return 0


def _check_sizes(sizes: Sequence[int]) -> None:
    for size in sizes:
        if size not in BLOCK_SIZES:
            raise OptionError(
                f"--block-sizes has {size}; each must be a power of two from {BLOCK_SIZES[0]} to "
                f"{BLOCK_SIZES[-1]}."
            )


def _side(runs: Sequence[Run]) -> dict[str, Any]:
    first, seconds = runs[0], median([one.seconds for one in runs])
    return {
        "rounds_s": [one.seconds for one in runs],
        "rounds_cpu_s": [one.cpu_s for one in runs],
        "seconds": seconds,
        "output_tokens_per_s": first.num_output_tokens / seconds,
        "waste": first.log.waste,
        "max_unused_slots": first.log.max_unused_slots,
        "allocated_blocks": first.num_allocated_blocks,
        "peak_blocks": first.log.peak_blocks,
        "peak_slots": first.log.peak_blocks * first.log.block_size,
        "preemptions": first.num_preemptions,
    }


def _report(figures: dict[str, Any]) -> Report:
    results = figures["results"]
    best = {
        mix: max(r["output_tokens_per_s"] for r in results if r["mix"] == mix)
        for mix in figures["mixes"]
    }
    rows = [
        (
            result["mix"],
            f"{result['block_size']}",
            percent(result["waste"]),
            f"{result['allocated_blocks']:,}",
            f"{result['peak_blocks']:,}",
            f"{result['peak_slots']:,}",
            f"{result['output_tokens_per_s']:,.1f}",
            percent(result["output_tokens_per_s"] / best[result["mix"]]),
        )
        for result in results
    ]
    lengths = "; ".join(
        f"{mix}: {_summary(requests)}" for mix, requests in figures["mixes"].items()
    )
    notes = [
        f"{lengths}. Speed: median of {counted(figures['rounds'], 'interleaved round')}. "
        "Waste: slots held without a token, over all steps; prefix caching is off."
    ]

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for mix, ink in zip(figures["mixes"], INK, strict=False):
            mine = [result for result in results if result["mix"] == mix]
            sizes = [str(result["block_size"]) for result in mine]
            left.plot(sizes, [100 * r["waste"] for r in mine], "o-", color=ink, label=mix)
            speeds = [100 * r["output_tokens_per_s"] / best[mix] for r in mine]
            right.plot(sizes, speeds, "o-", color=ink, label=mix)
        left.set(xlabel="block size", ylabel="% of slots held", title="Waste", ylim=(0, None))
        right.set(xlabel="block size", ylabel="% of the fastest", title="Speed", ylim=(0, 110))
        for axes in (left, right):
            axes.legend(frameon=False, title="requests")

    header = ("mix", "size", "waste", "allocated", "peak", "peak slots", "tok/s", "of best")
    return Report("blocks", "Block sizes", header, rows, notes, figures, draw)


def _summary(requests: Sequence[dict[str, int]]) -> str:
    inputs = [request["input_tokens"] for request in requests]
    outputs = [request["output_tokens"] for request in requests]
    return (
        f"{len(requests)} requests, {min(inputs)}-{max(inputs)} tokens in, "
        f"{min(outputs)}-{max(outputs)} out"
    )
