"""Declares an option once: default, help, limits. Checks, command line and help come from it."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin, get_type_hints

from quire.protocol.errors import OptionError

_KIND_NAMES = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a dictionary",
}


@dataclass(frozen=True)
class Declaration:
    """Everything about an option but its name, type and default value."""

    help: str
    default_text: str | None = None
    """What happens by default, where the default value alone does not say it."""
    choices: tuple[str | int, ...] | None = None
    minimum: float | None = None
    accepts: Callable[[Any], bool] | None = None
    """A limit that choices and minimum cannot express; `rule` says it in words."""
    rule: str | None = None
    convert: Callable[[Any], Any] | None = None
    """Turns accepted spellings into the one that is stored; what it does not know it returns."""


def option(default: Any, help: str, *, secret: bool = False, **limits: Any) -> Any:
    """A dataclass field that carries its declaration."""
    metadata = {"declaration": Declaration(help, **limits)}
    return field(default=default, repr=not secret, metadata=metadata)


@cache
def kinds(owner: type, name: str) -> tuple[type, ...]:
    """The plain types an annotated field accepts, in order; NoneType included."""
    hint = get_type_hints(owner)[name]
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(get_origin(member) or member for member in members)


def check(options: Any) -> None:
    """Check every field of a frozen dataclass of options, storing converted values."""
    for item in fields(options):
        value = getattr(options, item.name)
        checked = _checked(item.name, value, item.default, type(options), item.metadata)
        if checked is not value:
            object.__setattr__(options, item.name, checked)


def _checked(name: str, value: Any, default: Any, owner: type, metadata: Any) -> Any:
    declaration: Declaration = metadata["declaration"]
    if declaration.convert is not None:
        value = declaration.convert(value)
    value, fault = _typed(value, kinds(owner, name))
    if fault is not None and declaration.convert is not None:
        fault = declaration.rule or fault
    if fault is None and value is not None:
        fault = _fault(value, declaration)
    if fault is None:
        return value
    usual = declaration.default_text or f"{default!r}"
    raise OptionError(
        f"{name} must be {fault}, got {value!r}. Leave it unset for the default ({usual})."
    )


def _typed(value: Any, accepted: tuple[type, ...]) -> tuple[Any, str | None]:
    """The value as one of the accepted types, and what is wrong with it."""
    if value is None and types.NoneType in accepted:
        return value, None
    if isinstance(value, bool):
        if bool in accepted:
            return value, None
    elif int in accepted and isinstance(value, Integral):
        return int(value), None
    elif float in accepted and isinstance(value, Real):
        number = float(value)
        return number, None if math.isfinite(number) else "a finite number"
    elif isinstance(value, accepted):
        return value, None
    return value, " or ".join(_KIND_NAMES[kind] for kind in accepted if kind in _KIND_NAMES)


def _fault(value: Any, declaration: Declaration) -> str | None:
    choices, low, accepts = declaration.choices, declaration.minimum, declaration.accepts
    if choices is not None and value not in choices:
        return declaration.rule or "one of " + ", ".join(map(repr, choices))
    if low is not None and value < low:
        return f"at least {low:g}"
    if accepts is not None and not accepts(value):
        return declaration.rule
    return None
