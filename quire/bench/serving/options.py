"""The command line of `quire bench serve`, read into one checked record."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.bench.flags import DISTRIBUTION, Flag, Lengths, add_own_flags, read_flags
from quire.bench.serving.arrivals import Load
from quire.bench.serving.backends import BACKENDS
from quire.client.address import DEFAULT_URL, Address
from quire.config.cli import Arguments
from quire.protocol.errors import OptionError

if TYPE_CHECKING:
    from quire.config.cli import CommandParser

FLAGS = (
    Flag("num_requests", 100, 8, "Requests per load; of a trace, its first ones."),
    Flag("input_len", Lengths(16, 256), Lengths(8, 32), "Prompt tokens, or least and most."),
    Flag("output_len", Lengths(8, 128), Lengths(4, 16), "Tokens out, or least and most."),
    DISTRIBUTION,
    Flag("shared_prefix_len", 0, 0, "Tokens with which all prompts begin alike.", 0),
    Flag("warm_up", 1, 1, "Requests sent before, which do not count.", 0),
)
SWEEP_CONCURRENCIES = (1, 2, 4, 8, 16, 32)
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True)
class ServeOptions:
    address: Address
    backend: str
    model: str | None
    api_key: str | None
    tokenizer: str | None
    vocab_size: int | None
    seed: int
    ignore_eos: bool
    extra_body: dict[str, Any]
    timeout_s: float
    trace: str | None
    max_input_len: int | None
    max_output_len: int | None
    loads: list[Load]
    price_per_hour: float | None
    flags: Any
    """The values of FLAGS, by name."""


def add_arguments(parser: CommandParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", default=DEFAULT_URL, help=f"Its address. (default: {DEFAULT_URL})")
    server.add_argument(
        "--backend",
        default="openai",
        metavar="{" + ",".join(BACKENDS) + "}",
        help="Which protocol it speaks. (default: openai, which is /v1/completions)",
    )
    server.add_argument("--model", metavar="NAME", help="Model to ask for. (default: its first)")
    server.add_argument("--api-key", metavar="KEY", help="Sent as `Authorization: Bearer KEY`.")
    server.add_argument(
        "--timeout", metavar="S", default="600", help="Seconds for one answer. (default: 600)"
    )
    server.add_argument(
        "--extra-body", metavar="JSON", help="Fields to add to each body; null leaves one out."
    )
    server.add_argument(
        "--respect-eos",
        action="store_true",
        help="Let answers end by themselves. (default: ask for exactly so many tokens)",
    )
    load = parser.add_argument_group(
        "load", "One of --rate, --concurrency and --trace; several values need --sweep."
    )
    load.add_argument("--rate", metavar="X[,X...]", help="Requests per second; inf: all at once.")
    load.add_argument(
        "--concurrency",
        metavar="N[,N...]",
        help=f"So many at a time; an answer makes room for the next. (default: "
        f"{DEFAULT_CONCURRENCY})",
    )
    load.add_argument(
        "--burstiness",
        metavar="X",
        help="Of --rate: 1 is a Poisson process, less comes in bursts, inf evenly. (default: 1)",
    )
    load.add_argument(
        "--trace",
        metavar="FILE",
        help="Replay an Azure (CSV) or Mooncake (JSON lines) trace: its lengths, shared prefixes "
        "and, without --rate or --concurrency, its times.",
    )
    load.add_argument(
        "--trace-speed", metavar="X[,X...]", help="Of the trace's times: 2 is twice as fast."
    )
    load.add_argument("--max-input-len", metavar="N", help="Cut prompts of a trace to this length.")
    load.add_argument("--max-output-len", metavar="N", help="Cut outputs of a trace likewise.")
    load.add_argument(
        "--sweep",
        action="store_true",
        help="Measure each of several loads and plot latency against throughput. (default loads: "
        f"--concurrency {','.join(map(str, SWEEP_CONCURRENCIES))})",
    )
    load.add_argument("--seed", metavar="N", default="0", help="Of lengths, prompts and times.")
    load.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="A model or folder: prompts have exactly so many of its tokens. (default: common "
        "words, about one token each)",
    )
    load.add_argument(
        "--vocab-size", metavar="N", help="Send prompts as token ids below N (backend openai)."
    )
    load.add_argument(
        "--price-per-hour", metavar="X", help="Of the machine; gives the cost per million tokens."
    )
    add_own_flags(parser, FLAGS)


def read_options(arguments: Arguments) -> ServeOptions:
    backend = arguments.backend
    if backend not in BACKENDS:
        raise OptionError(f"--backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    vocab_size = _number(arguments, "vocab_size", least=2, whole=True)
    if vocab_size is not None and not BACKENDS[backend].takes_token_ids:
        raise OptionError(f"--vocab-size: --backend {backend} takes text only; leave it out.")
    if vocab_size is not None and arguments.tokenizer is not None:
        raise OptionError("--vocab-size sends token ids, so --tokenizer is of no use; drop one.")
    for name in ("max_input_len", "max_output_len", "trace_speed"):
        if getattr(arguments, name) is not None and arguments.trace is None:
            raise OptionError(f"{_word(name)} is of use with --trace only; leave it out.")
    return ServeOptions(
        address=Address.parse(arguments.url),
        backend=backend,
        model=arguments.model,
        api_key=arguments.api_key,
        tokenizer=arguments.tokenizer,
        vocab_size=vocab_size,
        seed=_number(arguments, "seed", least=0, whole=True),
        ignore_eos=not arguments.respect_eos,
        extra_body=_read_json(arguments.extra_body),
        timeout_s=_number(arguments, "timeout", least=0.001),
        trace=arguments.trace,
        max_input_len=_number(arguments, "max_input_len", least=1, whole=True),
        max_output_len=_number(arguments, "max_output_len", least=1, whole=True),
        loads=_read_loads(arguments),
        price_per_hour=_number(arguments, "price_per_hour", least=0.0),
        flags=read_flags(arguments, FLAGS),
    )


def _read_loads(arguments: Arguments) -> list[Load]:
    given = [
        name
        for name in ("rate", "concurrency", "trace_speed")
        if getattr(arguments, name) is not None
    ]
    if len(given) > 1:
        words = " and ".join(map(_word, given))
        raise OptionError(f"{words} cannot be combined; give one of them.")
    values: Sequence[float]
    if given:
        name = given[0]
        values = _numbers(arguments, name, whole=name == "concurrency")
    elif arguments.trace is not None:
        name, values = "trace_speed", [1.0]
    else:
        name = "concurrency"
        values = SWEEP_CONCURRENCIES if arguments.sweep else [DEFAULT_CONCURRENCY]
    if arguments.burstiness is not None and name != "rate":
        raise OptionError("--burstiness is of use with --rate only; leave it out.")
    if len(values) > 1 and not arguments.sweep:
        raise OptionError(f"{_word(name)} has several values; add --sweep to measure each.")
    if arguments.sweep and len(values) < 2:
        raise OptionError(f"--sweep needs several values; write {_word(name)} X,X,...")
    burstiness = _number(arguments, "burstiness", least=1e-3)
    kind = "speed" if name == "trace_speed" else name
    return [Load(kind, value, 1.0 if burstiness is None else burstiness) for value in values]


def _numbers(arguments: Arguments, name: str, whole: bool) -> list[float]:
    text = getattr(arguments, name)
    return [_read_number(name, text, word, 1 if whole else 1e-6, whole) for word in text.split(",")]


def _number(arguments: Arguments, name: str, least: float, whole: bool = False) -> Any:
    text = getattr(arguments, name)
    return None if text is None else _read_number(name, text, text, least, whole)


def _read_number(name: str, text: str, word: str, least: float, whole: bool) -> Any:
    try:
        value = int(word) if whole else float(word)
        if value < least or math.isnan(value):
            raise ValueError
    except ValueError:
        kind = "an integer" if whole else "a number"
        raise OptionError(
            f"{_word(name)} must be {kind} of at least {least:g}, got {text!r}."
        ) from None
    return value


def _read_json(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise OptionError(f"--extra-body {text!r} is not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise OptionError(f"--extra-body must be a JSON object, got {text!r}.")
    return value


def _word(name: str) -> str:
    return "--" + name.replace("_", "-")
