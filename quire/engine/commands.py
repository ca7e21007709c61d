"""Commands that a client may give the engine beside requests. Values cross a socket as they are.

To add one: a function of the engine and named arguments, and its name in `COMMANDS`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from quire.engine.core import EngineCore
from quire.engine.structured_output.build import Vocabulary
from quire.metrics.instruments import Readings
from quire.protocol.errors import RequestError
from quire.protocol.messages import ID_SEPARATOR
from quire.protocol.request import KEY_BITS
from quire.protocol.snapshot import EngineSnapshot
from quire.scheduler.scheduler import Pause


def reset_prefix_cache(core: EngineCore) -> bool:
    core.scheduler.reset_prefix_cache()
    return True


def read_metrics(core: EngineCore) -> Readings:
    return Readings.of(core.read_metrics())


def snapshot(
    core: EngineCore, max_waiting: int = 256, tables_of: list[int] | None = None
) -> EngineSnapshot:
    return core.snapshot(max_waiting, tables_of)


def abort_named(core: EngineCore, name: str) -> int:
    """End the requests that a caller knows by this name, whichever client they came through."""
    found = [
        request_id
        for request_id in core.scheduler.requests
        if request_id.rpartition(ID_SEPARATOR)[0] == name
    ]
    for request_id in found:
        core.abort(request_id)
    return len(found)


def abort_all(core: EngineCore) -> int:
    return core.abort_all()


def pause(core: EngineCore, mode: str) -> None:
    core.pause(Pause(mode))


def resume(core: EngineCore) -> None:
    core.resume()


def set_log_level(core: EngineCore, level: str) -> None:
    logging.getLogger("quire").setLevel(level)


def set_vocabulary(
    core: EngineCore, tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]
) -> None:
    """What grammars must know of the tokenizer. Clients of one engine all say the same."""
    compiler = core.grammars.compiler
    if not compiler.has_vocabulary:
        given = Vocabulary(tokenizer_json, vocab_size, tuple(eos_token_ids))
        compiler.set_vocabulary(lambda: given)
        compiler.prepare()


def answer(core: EngineCore) -> None:
    """Say that the engine gets on: commands are run between two steps."""


def check_books(core: EngineCore) -> int:
    """Raise unless every block is accounted for; returns how many are in use."""
    core.scheduler.check_books()
    return core.scheduler.kv.pool.num_used


def abort_client(core: EngineCore, client_index: int) -> None:
    """End all requests of a client that is gone."""
    for request_id, sequences in list(core.scheduler.requests.items()):
        if sequences[0].key >> KEY_BITS == client_index:
            core.abort(request_id)


COMMANDS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        reset_prefix_cache,
        read_metrics,
        snapshot,
        abort_named,
        abort_client,
        abort_all,
        pause,
        resume,
        set_log_level,
        set_vocabulary,
        answer,
        check_books,
    )
}


def run_command(core: EngineCore, name: str, arguments: dict[str, Any]) -> Any:
    if name not in COMMANDS:
        raise RequestError(f"command {name!r} is unknown; use one of {', '.join(COMMANDS)}.")
    return COMMANDS[name](core, **arguments)
