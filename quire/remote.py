"""Commands that talk to a running server: `quire chat --url`, `complete` and `run-batch`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.client.address import DEFAULT_URL
from quire.config.cli import (
    Arguments,
    CommandParser,
    add_engine_arguments,
    add_sampling_arguments,
    engine_arguments,
    engine_options,
    sampling_arguments,
)
from quire.config.embedded import CHAT_MAX_TOKENS
from quire.config.server import ServerOptions
from quire.protocol.errors import OptionError
from quire.protocol.sampling import RepetitionDetectionParams, SamplingParams
from quire.terminal import prompt_from_input, run_chat, standard_input, write

if TYPE_CHECKING:
    from quire.client.batch import BatchAnswer, Post
    from quire.client.terminal_client import TerminalClient

MAX_TOKENS = 128
BATCH_CONCURRENCY = 256
RETRY_FOR_S = 300.0


def add_chat_arguments(parser: CommandParser) -> None:
    """Those that `quire chat` has in addition to its engine's."""
    parser.add_argument(
        "--url",
        help="Talk to the model of a running server, such as http://127.0.0.1:8000, instead of "
        "starting an engine; --model then names one of its models.",
    )
    _add_api_key(parser)


def add_complete_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Continue prompts by a running server that speaks OpenAI's protocol; the text is printed "
        "as it comes."
    )
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="Text to continue. (default: standard input)"
    )
    parser.add_argument("--url", default=DEFAULT_URL, help=f"Its address. (default: {DEFAULT_URL})")
    parser.add_argument("--model", metavar="NAME", help="Model to ask for. (default: its first)")
    _add_api_key(parser)
    add_sampling_arguments(parser, MAX_TOKENS, exclude=("n",))


def add_batch_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Run a file of requests in OpenAI's batch format, by a running server or by an engine that "
        "is started for it. A line that cannot be run does not end the batch: its result says why."
    )
    parser.add_argument(
        "-i",
        "--input-file",
        metavar="FILE",
        required=True,
        help="One request per line: custom_id, method, url, body.",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        metavar="FILE",
        required=True,
        help="Gets one result per line, in the order in which they are done. Requests that have "
        "one there already are not run again.",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="Run all requests, whatever the output file holds."
    )
    parser.add_argument(
        "--url", help="Use a running server, such as http://127.0.0.1:8000. (default: an engine)"
    )
    _add_api_key(parser)
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=int,
        default=BATCH_CONCURRENCY,
        help=f"Most requests at a time. (default: {BATCH_CONCURRENCY})",
    )
    parser.add_argument(
        "--retry-for",
        metavar="SECONDS",
        type=float,
        default=RETRY_FOR_S,
        help="How long to try again once the server cannot be reached, restarts or takes no more "
        f"requests. (default: {RETRY_FOR_S:g})",
    )
    add_engine_arguments(parser, exclude=("skip_tokenizer_init",))


def _add_api_key(parser: CommandParser) -> None:
    parser.add_argument("--api-key", metavar="KEY", help="The server's key, if it wants one.")


def chat(arguments: Arguments) -> int:
    _refuse_engine_flags(arguments, but=("model",))
    options = {"max_tokens": CHAT_MAX_TOKENS} | _body_options(sampling_arguments(arguments))
    client = _client(arguments)
    return run_chat(
        lambda messages: client.stream_chat(messages, options),
        arguments.system,
        interactive=standard_input().isatty(),
    )


def complete(arguments: Arguments) -> int:
    prompts = arguments.prompts or [prompt_from_input("complete")]
    options = {"max_tokens": MAX_TOKENS} | _body_options(sampling_arguments(arguments))
    client = _client(arguments)
    for prompt in prompts:
        if len(prompts) > 1:
            write(prompt)
        for piece in client.stream_completion(prompt, options):
            write(piece)
        print("\n" if len(prompts) > 1 else "")
    return 0


def run_batch(arguments: Arguments) -> int:
    from quire.client import run_batch

    if arguments.url is None:
        poster: run_batch.Poster = partial(_engine_poster, arguments)
    else:
        _refuse_engine_flags(arguments)
        poster = partial(run_batch.server_poster, arguments.url, arguments.api_key)
    files = run_batch.BatchFiles(arguments.input_file, arguments.output_file, arguments.overwrite)
    return run_batch.run_file(files, poster, arguments.concurrency, arguments.retry_for)


@contextlib.asynccontextmanager
async def _engine_poster(arguments: Arguments) -> AsyncIterator[Post]:
    """Posts to the routes of a server that is not there: its application, without a socket."""
    engine_options(arguments)
    try:
        from quire.server.app import build_app
        from quire.server.state import ServerState
    except ImportError as error:
        raise OptionError(
            f"run-batch needs the package {error.name!r}, which is not installed; in a clone of "
            "Quire `pip install .` installs all that it needs. Or give the --url of a running "
            "server."
        ) from None
    from quire import AsyncLLM
    from quire.client.run_batch import post_asgi

    llm = AsyncLLM(**engine_arguments(arguments))
    state = ServerState(llm, ServerOptions())
    app = build_app(state)

    async def post(path: str, body: bytes) -> BatchAnswer:
        answer = await post_asgi(app, path, body)
        if answer.status != 200:
            await llm.check_health()  # unlike a server's, this engine does not come back
        return answer

    try:
        yield post
    finally:
        state.pool.close()
        llm.shutdown()


def _client(arguments: Arguments) -> TerminalClient:
    from quire.client.terminal_client import TerminalClient

    return TerminalClient(arguments.url, arguments.api_key, getattr(arguments, "model", None))


def _refuse_engine_flags(arguments: Arguments, but: Collection[str] = ()) -> None:
    unused = engine_arguments(arguments).keys() - {"log_level", *but}
    if unused:
        flag = "--" + min(unused).replace("_", "-")
        raise OptionError(f"{flag} is of no use with --url: the server has its options already.")


def _body_options(given: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters as a request's body has them, checked before anything is sent."""
    SamplingParams(**given)
    return {
        name: dataclasses.asdict(value) if isinstance(value, RepetitionDetectionParams) else value
        for name, value in given.items()
    }
