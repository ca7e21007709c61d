"""The `quire` command. Help answers at once: a command imports torch only when it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire import __version__, remote
from quire.config.adapters import check_folders
from quire.config.cli import (
    Arguments,
    CommandParser,
    add_engine_arguments,
    add_sampling_arguments,
    add_server_arguments,
    command_words,
    engine_arguments,
    engine_options,
    sampling_arguments,
    server_options,
)
from quire.config.embedded import CHAT_MAX_TOKENS
from quire.config.log import configure_logging
from quire.config.resolve import refuse_launched_outside
from quire.protocol.errors import ModelError, OptionError, QuireError, RequestError
from quire.protocol.sampling import RequestOutputKind, SamplingParams
from quire.terminal import (
    CHAT_HELP,
    Message,
    note,
    progress_line,
    prompt_from_input,
    report,
    run_chat,
    standard_input,
    write,
)

if TYPE_CHECKING:
    from quire import LLM

GENERATE_MAX_TOKENS = 128

BENCHMARKS = {
    "throughput": "Many requests at once: tokens per second.",
    "latency": "One batch at a time: time to the first token and per token.",
    "prefix": "Repeated system prompts with prefix caching on and off.",
    "blocks": "Block sizes 4 to 64: waste, allocations and speed.",
    "memory": "Paging against reserving the maximum length: waste and requests in flight.",
    "serve": "A load on a running server, Quire or another: latency, throughput, cost.",
    "host": "Host work per step with 1,024 requests and no model to wait for.",
}

# Options that neither `generate` nor `chat` can make use of; their --seed is the requests' own.
NOT_FOR_TEXT = ("seed", "skip_tokenizer_init", "max_logprobs", "scheduling_policy")

EXAMPLES = """\
examples:
  quire generate "The capital of France is" --max-tokens 20
  quire generate --model ./my-model.gguf --temperature 0 < prompt.txt
  quire chat --system "Answer in one sentence."
  quire serve --port 8000
  quire chat --url http://127.0.0.1:8000
  quire quantize ./my-model ./my-model-4bit --method w4a16
  quire quality ./my-model-4bit --against ./my-model
  quire bench prefix

`quire COMMAND --help` shows the flags of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Mistakes of the user end in one line and 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may write any character, and a terminal may not know it.
        sys.stdout.reconfigure(errors="replace")
    words = command_words(argv)
    try:
        with _plain_warnings():
            arguments = build_parser(words).read(words)
            status: int = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except QuireError as error:
        report(error)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            report(error)
        # What could not be written would be tried again at exit.
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return 1


def build_parser(words: Sequence[str] = ()) -> CommandParser:
    """The whole command line. Flags of a benchmark are declared only if `words` ask for it."""
    parser = CommandParser(
        prog="quire", description="Run language models with a paged KV cache.", epilog=EXAMPLES
    )
    parser.add_argument(
        "--version", action="version", version=f"quire {__version__}", help="Show the version."
    )
    parser.set_defaults(run=lambda arguments: _print_help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_remote(commands)
    _add_pull(commands)
    _add_quantize(commands)
    _add_lora(commands)
    _add_quality(commands, words)
    _add_bench(commands, words)
    return parser


def _add_generate(commands: Any) -> None:
    parser = _add_command(commands, "generate [PROMPT ...]", "Continue prompts.", _generate)
    parser.description = (
        "Continue prompts. The text of one prompt is printed as it is made; several prompts, or "
        "several completions, are printed together with their prompts when all are done."
    )
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="Text to continue; one that starts with a dash goes after --. "
        "(default: standard input)",
    )
    add_sampling_arguments(parser, GENERATE_MAX_TOKENS)
    add_engine_arguments(parser, exclude=(*NOT_FOR_TEXT, "chat_template"))


def _add_chat(commands: Any) -> None:
    parser = _add_command(commands, "chat", "Talk to a model in the terminal.", _chat)
    parser.description = (
        "Talk to a model in the terminal, or through a pipe: each line of standard input is a "
        f"message. {CHAT_HELP} In a terminal, Ctrl-C stops a reply and Ctrl-D ends the chat."
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="System message. (default: the chat template's)"
    )
    remote.add_chat_arguments(parser)
    add_sampling_arguments(parser, CHAT_MAX_TOKENS, exclude=("n",))
    add_engine_arguments(parser, exclude=NOT_FOR_TEXT)


def _add_remote(commands: Any) -> None:
    """The commands that need a server, or can use one."""
    text = "Continue prompts by a running server."
    parser = _add_command(commands, "complete [PROMPT ...]", text, remote.complete)
    remote.add_complete_arguments(parser)
    text = "Run a file of requests in OpenAI's batch format."
    parser = _add_command(commands, "run-batch -i FILE -o FILE", text, remote.run_batch)
    remote.add_batch_arguments(parser)


def _add_serve(commands: Any) -> None:
    text = "Serve a model over HTTP, as OpenAI's API."
    parser = _add_command(commands, "serve [MODEL]", text, _serve)
    parser.add_argument(
        "model_word",
        nargs="?",
        metavar="MODEL",
        help="As --model. (default: the embedded model)",
    )
    add_server_arguments(parser)
    add_engine_arguments(parser, exclude=("skip_tokenizer_init",))


def _add_pull(commands: Any) -> None:
    text = "Fetch a model, so that it runs without network."
    parser = _add_command(commands, "pull [MODEL]", text, _pull)
    parser.description = f"{text} Prints where its files are."
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="A name on the Hugging Face hub. (default: the embedded model)",
    )
    parser.add_argument(
        "--revision",
        metavar="TEXT",
        help="Branch, tag or commit on the hub. (default: the main branch)",
    )
    parser.add_argument("--quiet", action="store_true", help="Print where the files are alone.")


def _add_quantize(commands: Any) -> None:
    text = "Write a model in 8 or 4 bits."
    parser = _add_command(commands, "quantize [MODEL] OUT", text, _quantize)
    parser.description = (
        f"{text} The folder is in the format of compressed-tensors, which Quire, vLLM and "
        "transformers read. Embeddings, norms and the output head stay in 16 bits. `quire quality` "
        "tells what it costs."
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="A folder, a .gguf file, or a name on the hub. (default: the embedded model)",
    )
    parser.add_argument("out", metavar="OUT", help="The folder to write; it must not exist yet.")
    parser.add_argument(
        "--method",
        required=True,
        metavar="{fp8,w8a8,w4a16}",
        help="fp8 and w8a8: weights and inputs in 8 bits, floats or integers; w4a16: weights in 4 "
        "bits.",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="A text, or a .jsonl file with a prompt in each line: weights are scaled and rounded "
        "so that it costs least on such inputs. (default: all inputs count alike)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="{32,64,128}",
        help="Inputs that share a scale in w4a16. (default: 128)",
    )
    parser.add_argument(
        "--device", default="auto", metavar="{auto,cpu,cuda}", help="(default: auto)"
    )
    parser.add_argument(
        "--revision",
        metavar="TEXT",
        help="Branch, tag or commit on the hub. (default: the main branch)",
    )
    parser.add_argument("--quiet", action="store_true", help="Show no progress.")


def _add_lora(commands: Any) -> None:
    text = "Work with LoRA adapters."
    parser = _add_command(commands, "lora COMMAND", text, lambda _: _print_help(parser))
    actions = parser.add_subparsers(prog="quire lora", title="commands", metavar="COMMAND")
    text = "Write a model with an adapter in its weights."
    merging = _add_command(actions, "merge BASE ADAPTER OUT", text, _merge)
    merging.description = (
        f"{text} The result is an ordinary model folder, which needs no adapter to be served."
    )
    merging.add_argument(
        "base", metavar="BASE", help="A folder, a .gguf file, or a name on the hub."
    )
    merging.add_argument("adapter", metavar="ADAPTER", help="The adapter's folder, of peft.")
    merging.add_argument("out", metavar="OUT", help="The folder to write; it must not exist yet.")
    merging.add_argument(
        "--dtype",
        default="auto",
        metavar="{auto,bfloat16,float16,float32}",
        help="Of the weights that are written. (default: auto, those of the base; what a .gguf "
        "file has in blocks becomes 16 bits)",
    )
    merging.add_argument(
        "--revision",
        metavar="TEXT",
        help="Branch, tag or commit of the base on the hub. (default: the main branch)",
    )
    merging.add_argument("--quiet", action="store_true", help="Show no progress.")


def _add_quality(commands: Any, words: Sequence[str]) -> None:
    text = "Tell what a quantised model costs next to another."
    parser = _add_command(commands, "quality [MODEL]", text, _quality)
    if list(words[:1]) == ["quality"]:
        importlib.import_module("quire.bench.quality").add_arguments(parser)


def _add_bench(commands: Any, words: Sequence[str]) -> None:
    text = "Measure speed and memory on this machine."
    parser = _add_command(commands, "bench BENCHMARK", text, lambda _: _print_help(parser))
    benchmarks = parser.add_subparsers(prog="quire bench", title="benchmarks", metavar="BENCHMARK")
    for name, text in BENCHMARKS.items():
        benchmark = _add_command(benchmarks, name, text, _bench)
        benchmark.set_defaults(benchmark=name)
        if list(words[:2]) == ["bench", name]:
            importlib.import_module(f"quire.bench.{name}").add_arguments(benchmark)


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
    prompts = arguments.prompts or [prompt_from_input("generate")]
    if "" in prompts:
        raise RequestError("prompt is empty; write at least one character.")
    given = sampling_arguments(arguments)
    is_single = len(prompts) == 1 and given.get("n", 1) == 1
    with _engine(arguments, given, is_single) as llm:
        params = _sampling_params(llm, {"max_tokens": GENERATE_MAX_TOKENS} | given)
        if is_single:
            params.output_kind = RequestOutputKind.DELTA
            for output in llm.stream(prompts[0], params):
                write(output.outputs[0].text)
            print()
            return 0
        params.output_kind = RequestOutputKind.FINAL_ONLY
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        for output in outputs:
            for completion in output.outputs:
                print(f"{output.prompt}{completion.text}\n")
    return 0


def _chat(arguments: Arguments) -> int:
    standard_input()
    if arguments.url is not None:
        return remote.chat(arguments)
    given = sampling_arguments(arguments)
    with _engine(arguments, given, is_single=True) as llm:
        if not llm.get_tokenizer().chat_template:
            raise ModelError(
                f"model {llm.model_config.source.name!r} has no chat template, so it cannot chat; "
                "give one with --chat-template, or use `quire generate`."
            )
        params = llm.get_default_chat_params()
        limit = {"max_tokens": params.max_tokens or CHAT_MAX_TOKENS}
        params = dataclasses.replace(params, **(limit | given))
        params.output_kind = RequestOutputKind.DELTA

        def stream(messages: list[Message]) -> Iterator[str]:
            return (output.outputs[0].text for output in llm.stream_chat(messages, params))

        return run_chat(stream, arguments.system, interactive=standard_input().isatty())


def _serve(arguments: Arguments) -> int:
    word = arguments.model_word
    if word is not None:
        if getattr(arguments, "model", word) != word:
            raise OptionError(f"model is given twice: {word!r} and --model {arguments.model!r}.")
        arguments.model = word
    options = engine_options(arguments)
    if options.parallel.node_rank > 0:
        from quire.engine.executors.nodes import run_node

        configure_logging(options.observability.log_level, for_server=True)
        return run_node(options)
    refuse_launched_outside(options.parallel.distributed_executor_backend, "a server")
    served = server_options(arguments)
    check_folders(served.adapters.modules, served.adapters.lora_folder)
    if served.adapters.has_any and not options.adapters.enable_lora:
        options = options.replace(enable_lora=True)
    try:
        from quire.server.launch.supervisor import serve
    except ImportError as error:
        raise OptionError(
            f"the server needs the package {error.name!r}, which is not installed; in a clone of "
            "Quire `pip install .` installs all that it needs."
        ) from None
    return serve(options.for_server().flat(), served)


def _pull(arguments: Arguments) -> int:
    if arguments.model is None:
        from quire.config.embedded import pull_embedded_model

        path = pull_embedded_model(lambda line: None if arguments.quiet else note(line))
    else:
        from quire.config.locate import locate_model

        path = locate_model(arguments.model, revision=arguments.revision).path
    print(path)
    return 0


def _quantize(arguments: Arguments) -> int:
    if arguments.method not in ("fp8", "w8a8", "w4a16"):
        raise OptionError(f"--method must be fp8, w8a8 or w4a16, got {arguments.method!r}.")
    from quire.quantize.command import quantize

    with progress_line(not arguments.quiet) as progress:
        summary = quantize(
            arguments.model,
            arguments.out,
            arguments.method,
            group_size=arguments.group_size,
            calibrate_file=arguments.calibrate,
            revision=arguments.revision,
            device=arguments.device,
            progress=progress,
        )
    for line in summary.lines():
        print(line)
    print(arguments.out)
    return 0


def _merge(arguments: Arguments) -> int:
    from quire.lora.merge import merge

    with progress_line(not arguments.quiet) as progress:
        summary = merge(
            arguments.base,
            arguments.adapter,
            arguments.out,
            dtype=arguments.dtype,
            revision=arguments.revision,
            progress=progress,
        )
    print(summary.line())
    print(arguments.out)
    return 0


def _quality(arguments: Arguments) -> int:
    status: int = importlib.import_module("quire.bench.quality").run(arguments)
    return status


def _bench(arguments: Arguments) -> int:
    module = importlib.import_module(f"quire.bench.{arguments.benchmark}")
    return module.run(arguments) or 0


@contextlib.contextmanager
def _engine(arguments: Arguments, sampling: dict[str, Any], is_single: bool) -> Iterator[LLM]:
    """The engine that the flags describe, for one sequence at a time if `is_single`; bad values are
    found before torch is imported.

    Without --seed it draws other random numbers each time.
    """
    engine_options(arguments)
    seed = SamplingParams(**sampling).seed
    from quire import LLM

    seed = secrets.randbits(32) if seed is None else seed
    own = {"max_num_seqs": 1} if is_single else {}
    with LLM(**{**own, **engine_arguments(arguments)}, seed=seed) as llm:
        yield llm


def _sampling_params(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    return dataclasses.replace(llm.get_default_sampling_params(), **given)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Shows each warning once, in one line, without the code that gave it."""
    shown = set()

    def show(message: Warning | str, *where: object, **more: object) -> None:
        if str(message) not in shown:
            shown.add(str(message))
            note(f"quire: warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
