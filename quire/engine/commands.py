"""Commands that a client may give the engine besides requests. Values cross a socket as they are.

To add one: a function of the engine and named arguments, and its name in `COMMANDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.core import EngineCore
from quire.metrics.instruments import Readings
from quire.protocol.errors import RequestError
from quire.protocol.messages import KEY_BITS


def reset_prefix_cache(core: EngineCore) -> bool:
    core.scheduler.reset_prefix_cache()
    return True


def read_metrics(core: EngineCore) -> Readings:
    return Readings.of(core.read_metrics())


def abort_client(core: EngineCore, client_index: int) -> None:
    """End all requests of a client that is gone."""
    for request_id, sequences in list(core.scheduler.requests.items()):
        if sequences[0].key >> KEY_BITS == client_index:
            core.abort(request_id)


COMMANDS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (reset_prefix_cache, read_metrics, abort_client)
}


def run_command(core: EngineCore, name: str, arguments: dict[str, Any]) -> Any:
    if name not in COMMANDS:
        raise RequestError(f"command {name!r} is unknown; use one of {', '.join(COMMANDS)}.")
    return COMMANDS[name](core, **arguments)
