"""Commands that a client may give the engine besides requests. Values cross a socket as they are.

To add one: a function of the engine and named arguments, and its name in `COMMANDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.core import EngineCore
from quire.metrics.instruments import Readings
from quire.protocol.errors import RequestError


def reset_prefix_cache(core: EngineCore) -> bool:
    core.scheduler.reset_prefix_cache()
    return True


def read_metrics(core: EngineCore) -> Readings:
    return Readings.of(core.read_metrics())


COMMANDS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (reset_prefix_cache, read_metrics)
}


def run_command(core: EngineCore, name: str, arguments: dict[str, Any]) -> Any:
    if name not in COMMANDS:
        raise RequestError(f"command {name!r} is unknown; use one of {', '.join(COMMANDS)}.")
    return COMMANDS[name](core, **arguments)
