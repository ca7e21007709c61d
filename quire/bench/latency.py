"""`quire bench latency`: one batch at a time, to the first token and from token to token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.bench.flags import Flag, Lengths, add_flags, read_flags
from quire.bench.report import INK, Report, check_outputs, median, ms, p90, publish
from quire.bench.runs import Engines, measure, say
from quire.config.cli import Arguments

if TYPE_CHECKING:
    from quire.config.cli import CommandParser

FLAGS = (
    Flag("batch_size", 1, 2, "Requests at once."),
    Flag("input_len", 128, 16, "Prompt tokens of each."),
    Flag("output_len", 64, 8, "Tokens to generate for each.", minimum=2),
    Flag("repeats", 12, 3, "Batches that count."),
    Flag("warm_up", 2, 1, "Batches before them that do not.", minimum=0),
)


def add_arguments(parser: CommandParser) -> None:
    add_flags(parser, FLAGS)


def run(arguments: Arguments) -> int:
    check_outputs(arguments)
    flags = read_flags(arguments, FLAGS)
    engines = Engines(arguments)
    dice = engines.dice()
    inputs = Lengths(flags.input_len, flags.input_len)
    outputs = Lengths(flags.output_len, flags.output_len)
    say(f"{flags.warm_up} + {flags.repeats} batches of {flags.batch_size}")
    with engines.start() as llm:
        runs = []
        for _ in range(flags.warm_up + flags.repeats):
            llm.reset_prefix_cache()
            runs.append(measure(llm, dice.requests(flags.batch_size, inputs, outputs)))
    runs = runs[flags.warm_up :]
    first_token_s = [seconds for one in runs for seconds in one.first_token_s]
    per_token_s = [seconds for one in runs for seconds in one.per_token_s]
    figures = {
        "batch_size": flags.batch_size,
        "input_tokens": flags.input_len,
        "output_tokens": flags.output_len,
        "repeats": flags.repeats,
        "first_token_s": first_token_s,
        "first_token_median_s": median(first_token_s),
        "first_token_p90_s": p90(first_token_s),
        "per_token_s": per_token_s,
        "per_token_median_s": median(per_token_s),
        "per_token_p90_s": p90(per_token_s),
        "batch_s": [one.seconds for one in runs],
        "batch_median_s": median([one.seconds for one in runs]),
        "batch_p90_s": p90([one.seconds for one in runs]),
        "cached_tokens": sum(one.num_cached_tokens for one in runs),
    }
    publish(_report(figures), arguments, engines)
    return 0


def _report(figures: dict[str, Any]) -> Report:
    rows = [
        (label, ms(figures[f"{name}_median_s"]), ms(figures[f"{name}_p90_s"]))
        for label, name in (
            ("to the first token", "first_token"),
            ("per token after it", "per_token"),
            ("whole batch", "batch"),
        )
    ]
    notes = [
        f"Batches of {figures['batch_size']}, {figures['input_tokens']} tokens in and "
        f"{figures['output_tokens']} out each; {figures['repeats']} batches after warm-up. "
        "Per token: each request's mean."
    ]

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, 2)
        for axes, name, label, ink in zip(
            panels,
            ("first_token", "per_token"),
            ("to the first token", "per token after it"),
            INK,
            strict=False,
        ):
            values = [1000 * seconds for seconds in figures[f"{name}_s"]]
            axes.plot(values, "o", color=ink, markersize=5)
            for kind, style in (("median", "-"), ("p90", "--")):
                axes.axhline(
                    1000 * figures[f"{name}_{kind}_s"], color=ink, linestyle=style, label=kind
                )
            axes.set(xlabel="request", ylabel="ms", title=label, ylim=(0, 1.2 * max(values)))
            axes.legend(frameon=False, loc="lower right")

    title = f"Latency at batch size {figures['batch_size']}"
    return Report("latency", title, ("", "median", "p90"), rows, notes, figures, draw)
