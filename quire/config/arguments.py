"""What becomes of each argument of vLLM's `LLM`: supported, accepted with a warning, or refused.

Supported arguments are the options themselves (options.py). The others are listed in
vllm_arguments.json, so that a script written for vLLM either runs with the same results or stops
with a reason.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.protocol.errors import OptionError


@dataclass(frozen=True)
class Refusal:
    """An argument that would change results if it were ignored."""

    reason: str
    neutral: tuple[Any, ...]
    """Values that ask for nothing, and so are accepted in silence."""


def _neutral(values: list[Any]) -> tuple[Any, ...]:
    """None always is; an empty list stands for anything empty that a script may pass."""
    empty: tuple[Any, ...] = ((), set()) if [] in values else ()
    return (None, *values, *empty)


_TABLE = json.loads(Path(__file__).with_name("vllm_arguments.json").read_text("utf-8"))

IGNORED: dict[str, str] = {
    name: entry["reason"]
    for entry in _TABLE["ignored"]
    for name in (*entry.get("arguments", ()), *entry.get("switches", ()))
}
"""Why an argument may be ignored; each is accepted with a warning."""
REFUSED: dict[str, Refusal] = {
    name: Refusal(entry["reason"], _neutral(values))
    for entry in _TABLE["refused"]
    for name, values in entry["arguments"].items()
}
SWITCHES = frozenset(
    {name for entry in _TABLE["ignored"] for name in entry.get("switches", ())}
    | {name for name, refusal in REFUSED.items() if any(v is False for v in refusal.neutral)}
)
"""Arguments without effect that are True or False, and so flags without a value."""


def accepted_arguments(
    arguments: Mapping[str, Any], supported: Collection[str], stacklevel: int
) -> dict[str, Any]:
    """The supported ones among `arguments`; warns of those ignored, raises for all others."""
    accepted = {}
    for name, value in arguments.items():
        if name in supported:
            accepted[name] = value
        elif name in IGNORED:
            if value is not None and value is not False:
                message = f"{name}={value!r} has no effect: {IGNORED[name]}."
                warnings.warn(message, stacklevel=stacklevel)
        elif name in REFUSED:
            refuse_unless_neutral(name, value)
        else:
            raise OptionError(
                f"{name} is not an option (got {value!r}). " + nearest(name, supported)
            )
    return accepted


def refuse_unless_neutral(name: str, value: Any) -> None:
    refusal = REFUSED[name]
    plain = value is None or isinstance(value, (bool, int, float, str, list, tuple, dict, set))
    if not plain or value not in refusal.neutral:
        raise OptionError(f"{name}={value!r} is refused: {refusal.reason}. Leave {name} unset.")


def nearest(name: str, supported: Collection[str]) -> str:
    """A sentence that names the supported option most like `name`."""
    close = difflib.get_close_matches(name, supported, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]}?"
    return "`quire generate --help` lists all options."
