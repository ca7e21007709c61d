"""The `quire` command. Help answers at once: a command imports torch only when it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from quire import __version__
from quire.config.cli import (
    Arguments,
    CommandParser,
    add_engine_arguments,
    add_sampling_arguments,
    command_words,
    engine_arguments,
    engine_options,
    sampling_arguments,
)
from quire.protocol.errors import QuireError, RequestError
from quire.protocol.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire import LLM

GENERATE_MAX_TOKENS = 128

BENCHMARKS = {
    "throughput": "Many requests at once: tokens per second.",
    "latency": "One request at a time: time to the first token and per token.",
    "prefix": "Repeated system prompts with prefix caching on and off.",
    "blocks": "Block sizes 4 to 64: waste, allocations and speed.",
    "memory": "Paging against reserving the maximum length: waste and requests in flight.",
}

CHAT_HELP = "/clear forgets the conversation, /system TEXT sets the system message, /exit ends."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Mistakes of the user end in one line and 2."""
    words = command_words(argv)
    arguments = build_parser(words).read(words)
    try:
        status: int = arguments.run(arguments)
        return status
    except QuireError as error:
        print(f"quire: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone; closing keeps the interpreter from flushing into nothing at exit.
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.close()
        return 1


def build_parser(words: Sequence[str] = ()) -> CommandParser:
    """The whole command line. Flags of a benchmark are declared only if `words` ask for it."""
    parser = CommandParser(prog="quire", description="Run language models with a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    parser.set_defaults(run=lambda arguments: _print_help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    generate = _add_command(commands, "generate [PROMPT ...]", "Continue prompts.", _generate)
    generate.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="Text to continue (default: standard input)."
    )
    add_sampling_arguments(generate, GENERATE_MAX_TOKENS)
    add_engine_arguments(generate, exclude=("seed", "skip_tokenizer_init"))

    chat = _add_command(commands, "chat", "Talk to a model in the terminal.", _chat)
    chat.add_argument("--system", metavar="TEXT", help="System message (default: the template's).")
    add_sampling_arguments(chat)
    add_engine_arguments(chat, exclude=("seed", "skip_tokenizer_init"))

    pull = _add_command(
        commands, "pull [MODEL]", "Fetch a model, so that it runs without network.", _pull
    )
    pull.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="A name on the Hugging Face hub (default: the embedded model).",
    )
    pull.add_argument("--revision", metavar="TEXT", help="Branch, tag or commit on the hub.")

    bench = _add_command(
        commands, "bench BENCHMARK", "Measure.", lambda arguments: _print_help(bench)
    )
    benchmarks = bench.add_subparsers(prog="quire bench", title="benchmarks", metavar="BENCHMARK")
    for name, text in BENCHMARKS.items():
        benchmark = _add_command(benchmarks, name, text, _bench)
        benchmark.set_defaults(benchmark=name)
        if list(words[:2]) == ["bench", name]:
            importlib.import_module(f"quire.bench.{name}").add_arguments(benchmark)
    return parser


def _add_command(
    commands: Any, words: str, text: str, run: Callable[[Arguments], int]
) -> CommandParser:
    """`words` are the command's name and its positional arguments, as its usage shows them."""
    name, *rest = words.split()
    usage = " ".join(["%(prog)s", *rest, "[FLAGS]"])
    parser: CommandParser = commands.add_parser(name, help=text, description=text, usage=usage)
    parser.set_defaults(run=run)
    return parser


def _print_help(parser: CommandParser) -> int:
    parser.print_help()
    return 0


def _generate(arguments: Arguments) -> int:
    prompts = arguments.prompts or [_standard_input()]
    given = sampling_arguments(arguments)
    with _engine(arguments, given) as llm:
        params = _sampling_params(llm, {"max_tokens": GENERATE_MAX_TOKENS} | given)
        if len(prompts) == 1 and params.n == 1:
            params.output_kind = RequestOutputKind.DELTA
            for output in llm.stream(prompts[0], params):
                _write(output.outputs[0].text)
            print()
            return 0
        params.output_kind = RequestOutputKind.FINAL_ONLY
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        for output in outputs:
            for completion in output.outputs:
                print(f"{output.prompt}{completion.text}\n")
    return 0


def _chat(arguments: Arguments) -> int:
    given = sampling_arguments(arguments)
    with _engine(arguments, given) as llm:
        params = _sampling_params(llm, {"max_tokens": None} | given)
        params.output_kind = RequestOutputKind.DELTA
        return run_chat(llm, params, arguments.system, interactive=sys.stdin.isatty())


def _pull(arguments: Arguments) -> int:
    if arguments.model is None:
        from quire.config.embedded import pull_embedded_model

        path = pull_embedded_model(lambda line: print(line, file=sys.stderr))
    else:
        from quire.config.locate import locate_model

        path = locate_model(arguments.model, revision=arguments.revision).path
    print(path)
    return 0


def _bench(arguments: Arguments) -> int:
    module = importlib.import_module(f"quire.bench.{arguments.benchmark}")
    return module.run(arguments) or 0


@contextlib.contextmanager
def _engine(arguments: Arguments, sampling: dict[str, Any]) -> Iterator[LLM]:
    """The engine that the flags describe; bad values are found before torch is imported."""
    engine_options(arguments)
    SamplingParams(**sampling)
    from quire import LLM

    with LLM(**engine_arguments(arguments)) as llm:
        yield llm


def _sampling_params(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    return dataclasses.replace(llm.get_default_sampling_params(), **given)


def run_chat(llm: LLM, params: SamplingParams, system: str | None, interactive: bool) -> int:
    """Read messages line by line and stream the replies, until the input ends."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` line editing and history)
        print(f"Ctrl-C stops a reply, Ctrl-D ends the chat. {CHAT_HELP}")
    messages = _opening(system)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return 0
        if command in ("/clear", "/system"):
            system = rest.strip() or None if command == "/system" else system
            messages = _opening(system)
        elif re.fullmatch(r"/[a-z]+", command):
            print(CHAT_HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            _reply(llm, params, messages)


def _opening(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _reply(llm: LLM, params: SamplingParams, messages: list[dict[str, str]]) -> None:
    """Stream one reply and add it to the messages, as far as it came."""
    text = ""
    try:
        with _interrupt_flag() as interrupted:
            # Leaving the loop early drops the stream, and so gives the request up.
            for output in llm.stream_chat(messages, params):
                piece = output.outputs[0].text
                _write(piece)
                text += piece
                if interrupted():
                    break
        print()
    except RequestError as error:
        print(f"quire: error: {_one_line(error)} /clear starts afresh.", file=sys.stderr)
        messages.pop()
        return
    messages.append({"role": "assistant", "content": text})


@contextlib.contextmanager
def _interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a flag, so that no step is cut short; the second one raises."""
    seen = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, previous)


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise RequestError("prompt is missing; write it after `quire generate`, in quotes.")
    return sys.stdin.read().removesuffix("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
