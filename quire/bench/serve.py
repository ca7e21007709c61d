"""`quire bench serve`: a load on a running server, Quire or another, as its users would feel it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.bench.report import Report, check_outputs, ms, percent, publish
from quire.bench.runs import say
from quire.bench.serving import plots
from quire.bench.serving.arrivals import LOAD_KINDS
from quire.bench.serving.backends import BACKENDS, first_model
from quire.bench.serving.options import ServeOptions, add_arguments, read_options
from quire.bench.serving.prompts import IdPrompts, Prompts, TextPrompts, load_tokenizer, words_of
from quire.bench.serving.runner import LoadRun, Record, Target, run_load
from quire.bench.serving.statistics import BUSY_CLIENT, PERCENTILES, TIMES, described, summarize
from quire.bench.serving.traces import read_trace
from quire.bench.serving.workload import LoadRequest, capped, drawn_requests
from quire.client.errors import no_answer, refused
from quire.client.http import HttpClient
from quire.config.cli import Arguments
from quire.frontend.event_loop import run_on_event_loop
from quire.protocol.errors import ServerError

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

__all__ = ["add_arguments", "run"]


def run(arguments: Arguments) -> int:
    check_outputs(arguments)
    options = read_options(arguments)
    requests = _requests(options)
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    model, runs = run_on_event_loop(_measure(options, requests, tokenizer))
    results = [summarize(one, tokenizer, options.price_per_hour) for one in runs]
    figures: dict[str, Any] = {"results": results}
    if len(runs) == 1:
        started = min(record.sent_s for record in runs[0].records)
        records = [described(one, started, tokenizer) for one in runs[0].records]
        figures = results[0] | {"records": records}
    make = _sweep_report if arguments.sweep else _single_report
    publish(make(figures, runs, model), arguments, _Server(options, model))
    return 0 if all(result["completed"] for result in results) else 1


class _Server:
    """The server that was measured, for the JSON file."""

    def __init__(self, options: ServeOptions, model: str) -> None:
        self._options, self._model = options, model

    def described(self) -> dict[str, Any]:
        options = self._options
        return {
            "model": self._model,
            "url": str(options.address),
            "backend": options.backend,
            "trace": options.trace,
            "seed": options.seed,
        }


def _requests(options: ServeOptions) -> list[LoadRequest]:
    flags = options.flags
    if options.trace is not None:
        trace = read_trace(options.trace, flags.num_requests)
        return capped(trace, options.max_input_len, options.max_output_len)
    return drawn_requests(
        flags.num_requests,
        flags.input_len,
        flags.output_len,
        shared_prefix=flags.shared_prefix_len,
        seed=options.seed,
        distribution=flags.distribution,
    )


async def _measure(
    options: ServeOptions, requests: Sequence[LoadRequest], tokenizer: Tokenizer | None
) -> tuple[str, list[LoadRun]]:
    backend = BACKENDS[options.backend]
    client = HttpClient(options.address, options.api_key, options.timeout_s)
    with contextlib.closing(client):
        model = options.model or await _find_model(client, options.backend)
        target = Target(
            client,
            backend,
            model,
            _prompts(options, tokenizer),
            options.ignore_eos,
            options.extra_body,
            keeps_text=tokenizer is not None,
        )
        await _warm_up(target, requests, options.flags.warm_up)
        runs = []
        for load in options.loads:
            say(f"{len(requests)} requests, {load}")
            with _progress(len(requests)) as on_record:
                runs.append(await run_load(target, load, requests, options.seed, on_record))
    return model, runs


def _prompts(options: ServeOptions, tokenizer: Tokenizer | None) -> Prompts:
    if options.vocab_size is not None:
        return IdPrompts(options.seed, options.vocab_size)
    if tokenizer is not None:
        return TextPrompts(options.seed, words_of(tokenizer))
    return TextPrompts(options.seed)


async def _find_model(client: HttpClient, name: str) -> str:
    backend = BACKENDS[name]
    if not backend.lists_models:
        raise ServerError(f"--backend {name} names no models; give --model.")
    try:
        answer = await client.get(backend.lists_models)
    except OSError as error:
        raise no_answer(client.address, error) from None
    if answer.status != 200:
        raise refused(client.address, answer.status, answer.body)
    model = first_model(backend, answer.body)
    if model is None:
        raise ServerError(
            f"{client.address}{backend.lists_models} names no model; give --model, or another "
            "--backend."
        )
    return model


async def _warm_up(target: Target, requests: Sequence[LoadRequest], count: int) -> None:
    """Requests that do not count, one by one; if one fails, a load would tell no more."""
    for index in range(count):
        request = requests[index % len(requests)]
        # Other prompts than those measured, which would find them in the server's cache.
        segments = [one._replace(key=f"warm-up {index}/{one.key}") for one in request.segments]
        changed = replace(request, segments=tuple(segments))
        record = await target.ask(changed, target.body(changed))
        if record.failure is not None:
            raise ServerError(
                f"the first request to {target.client.address} failed: "
                + ": ".join(filter(None, [record.failure, record.detail]))
            )


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Record], None]]:
    from tqdm import tqdm

    with tqdm(total=total, disable=not sys.stderr.isatty(), leave=False) as bar:
        yield lambda record: (bar.update(), None)[1]


def _single_report(figures: dict[str, Any], runs: Sequence[LoadRun], model: str) -> Report:
    header = ("", "mean", *(f"p{number}" for number in PERCENTILES), "max")
    rows = [
        (text, *(ms(figures[f"{name}_s"][part]) for part in header[1:]))
        for name, text in TIMES.items()
        if figures[f"{name}_s"] is not None
    ]
    load = runs[0].load
    title = f"{model}, {load}: {figures['output_tokens_per_s']:,.1f} output tokens/s"
    notes = [
        f"{figures['completed']} of {figures['requests']} requests in {figures['seconds']:.2f} s "
        f"({figures['requests_per_s']:.2f}/s), at most {figures['max_in_flight']} in flight; "
        f"{figures['input_tokens']:,} tokens in, {figures['output_tokens']:,} out, "
        f"{figures['total_tokens_per_s']:,.1f} tokens/s in all.",
        "TTFT: to the first token. ITL: between pieces. TPOT: per token after the first.",
        *_remarks(figures),
    ]
    return Report(
        "serve", title, header, rows, notes, figures, lambda figure: plots.draw_run(figure, runs[0])
    )


def _sweep_report(figures: dict[str, Any], runs: Sequence[LoadRun], model: str) -> Report:
    results = figures["results"]
    kind = results[0]["load"]["kind"]
    header = (
        LOAD_KINDS[kind],
        *("requests/s", "output tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "failed"),
        *(("per M out",) if results[0]["cost"] else ()),
    )
    rows = [
        (
            f"{result['load']['value']:g}",
            f"{result['requests_per_s']:.2f}",
            f"{result['output_tokens_per_s']:,.1f}",
            *(_cell(result[f"{name}_s"], part) for name in ("ttft", "tpot") for part in ENDS),
            f"{result['requests'] - result['completed']}",
            *_price(result),
        )
        for result in results
    ]
    notes = list(dict.fromkeys(note for result in results for note in _remarks(result)))
    return Report(
        "serve",
        f"{model}: latency against throughput",
        header,
        rows,
        notes,
        figures,
        lambda figure: plots.draw_sweep(figure, results),
    )


ENDS = ("p50", "p99")


def _cell(spread: dict[str, float] | None, part: str) -> str:
    return "-" if spread is None else ms(spread[part])


def _price(result: dict[str, Any]) -> tuple[str, ...]:
    if not result["cost"]:
        return ()
    price = result["cost"].get("per_million_output_tokens")
    return ("-" if price is None else f"{price:,.3f}",)


def _remarks(figures: dict[str, Any]) -> list[str]:
    """What a reader must know to trust the numbers."""
    notes = []
    for kind, failure in figures["failures"].items():
        example = f" ({failure['example']})" if failure["example"] else ""
        notes.append(f"Failed: {failure['count']} x {kind}{example}.")
    cost = figures["cost"]
    if cost and "per_million_output_tokens" in cost:
        notes.append(
            f"At {cost['price_per_hour']:g} per hour: {cost['per_million_output_tokens']:,.3f} per "
            f"million output tokens, {cost['per_million_total_tokens']:,.3f} per million of all."
        )
    if figures["output_tokens"] < figures["planned_output_tokens"]:
        share = figures["output_tokens"] / figures["planned_output_tokens"]
        notes.append(f"Answers ended early: {percent(share)} of the tokens asked for.")
    is_counted = figures["counted_by_server"] or figures["counted_by_tokenizer"]
    if figures["completed"] and not is_counted:
        notes.append("The server does not count tokens; a piece of the stream counts as one.")
    late = figures["late_s"]
    if late and late["p99"] > 0.01:
        notes.append(f"Requests were sent late by {ms(late['p99'])} (p99): the client was busy.")
    if figures["client_cpu_share"] > BUSY_CLIENT:
        notes.append(
            f"The client was busy {percent(figures['client_cpu_share'])} of the time: a faster "
            "server would not show."
        )
    return notes
