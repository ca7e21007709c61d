"""`quire bench prefix`: repeated system prompts, with prefix caching on and off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.bench.flags import ROUNDS, Flag, add_flags, read_flags
from quire.bench.report import (
    INK,
    Report,
    check_outputs,
    counted,
    described,
    median,
    ms,
    p90,
    percent,
    publish,
)
from quire.bench.runs import Engines, Run, measure, say
from quire.config.cli import Arguments

if TYPE_CHECKING:
    from quire.config.cli import CommandParser

FLAGS = (
    Flag("system_prompts", 2, 2, "Different system prompts."),
    Flag("questions", 12, 3, "Questions under each of them."),
    Flag("system_len", 512, 48, "Tokens of a system prompt."),
    Flag("question_len", 32, 8, "Tokens of a question."),
    Flag("output_len", 16, 4, "Tokens to generate for each question."),
    ROUNDS,
)


def add_arguments(parser: CommandParser) -> None:
    add_flags(parser, FLAGS, set_here=("enable_prefix_caching",))


def run(arguments: Arguments) -> int:
    check_outputs(arguments)
    flags = read_flags(arguments, FLAGS)
    engines = Engines(arguments)
    requests = engines.dice().shared_prefix_requests(
        flags.system_prompts,
        flags.questions,
        flags.system_len,
        flags.question_len,
        flags.output_len,
    )
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for number in range(flags.rounds):
        for caching, so_far in runs.items():
            word = "on" if caching else "off"
            say(f"round {number + 1} of {flags.rounds}: {len(requests)} requests, caching {word}")
            with engines.start(enable_prefix_caching=caching) as llm:
                so_far.append(measure(llm, requests))
    figures = _figures(runs[True], runs[False])
    figures["requests"] = described(requests)
    figures["system_prompts"] = flags.system_prompts
    figures["system_tokens"] = flags.system_len
    publish(_report(figures), arguments, engines)
    return 0


def _figures(on: Sequence[Run], off: Sequence[Run]) -> dict[str, Any]:
    with_cache, without = _side(on), _side(off)
    return {
        "on": with_cache,
        "off": without,
        "speedup": without["seconds"] / with_cache["seconds"],
        "first_token_speedup": without["first_token_median_s"] / with_cache["first_token_median_s"],
        "round_speedups": [slow.seconds / fast.seconds for fast, slow in zip(on, off, strict=True)],
        "equal_outputs": sum(
            mine == theirs for mine, theirs in zip(on[0].tokens, off[0].tokens, strict=True)
        ),
    }


def _side(runs: Sequence[Run]) -> dict[str, Any]:
    first_token_s = [seconds for one in runs for seconds in one.first_token_s]
    seconds = median([one.seconds for one in runs])
    return {
        "rounds_s": [one.seconds for one in runs],
        "rounds_cpu_s": [one.cpu_s for one in runs],
        "seconds": seconds,
        "output_tokens_per_s": runs[0].num_output_tokens / seconds,
        "first_token_median_s": median(first_token_s),
        "first_token_p90_s": p90(first_token_s),
        "input_tokens": runs[0].num_input_tokens,
        "cached_tokens": runs[0].num_cached_tokens,
        "hit_rate": runs[0].hit_rate,
        "peak_blocks": runs[0].log.peak_blocks,
        "allocated_blocks": runs[0].num_allocated_blocks,
    }


def _report(figures: dict[str, Any]) -> Report:
    on, off = figures["on"], figures["off"]

    def row(label: str, shown: Any, name: str, ratio: bool = True) -> tuple[str, ...]:
        times = f"{off[name] / on[name]:.2f} x" if ratio and on[name] else ""
        return (label, shown(off[name]), shown(on[name]), times)

    def plain(value: float) -> str:
        return f"{value:,}"

    rows = [
        row("seconds", lambda value: f"{value:.2f}", "seconds"),
        row("to the first token, median", ms, "first_token_median_s"),
        row("to the first token, p90", ms, "first_token_p90_s"),
        row("prompt tokens from the cache", percent, "hit_rate", ratio=False),
        row("KV blocks in use, most", plain, "peak_blocks"),
        row("KV blocks allocated", plain, "allocated_blocks"),
    ]
    requests, rounds = figures["requests"], figures["round_speedups"]
    notes = [
        f"{len(requests)} requests at once under {figures['system_prompts']} system prompts of "
        f"{figures['system_tokens']} tokens, the cache empty at the start; medians of "
        f"{counted(len(rounds), 'interleaved round')}, ratio per round from {min(rounds):.2f} to "
        f"{max(rounds):.2f}. {figures['equal_outputs']} of {len(requests)} outputs are equal."
    ]

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for axes, name, label in (
            (left, "seconds", "whole run"),
            (right, "first_token_median_s", "to the first token, median"),
        ):
            bars = axes.barh(["on", "off"], [on[name], off[name]], color=[INK[0], INK[1]])
            axes.bar_label(bars, fmt="%.2f s", padding=3)
            axes.set(xlabel="seconds", title=label)
            axes.margins(x=0.2)
        left.set_ylabel("prefix caching")

    title = f"Prefix caching: without it the run takes {figures['speedup']:.2f} x as long"
    header = ("", "off", "on", "off / on")
    return Report("prefix", title, header, rows, notes, figures, draw, size=(8.0, 2.8))
