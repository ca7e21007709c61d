"""`EngineArgs`: an engine's options as an object and as flags of a script's own parser, as vLLM's
scripts have them. It declares nothing: fields, checks and flags are those of `EngineOptions`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, TypeVar

from quire.config.cli import add_engine_arguments, add_foreign_arguments, engine_arguments
from quire.config.options import EngineOptions, group_class, option_groups

Args = TypeVar("Args", bound="EngineArgs")


class EngineArgs:
    """The arguments of `LLM`. They are a dataclass: `LLM(**dataclasses.asdict(args))` works."""

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        options = EngineOptions.from_arguments(model=model, **arguments)
        for name, value in options.flat().items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:  # for type checkers: fields are made below
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each option, and for arguments of vLLM's that have no effect here."""
        add_engine_arguments(parser)
        add_foreign_arguments(parser)
        parser.set_defaults(**EngineOptions().flat())
        return parser

    @classmethod
    def from_cli_args(cls: type[Args], args: argparse.Namespace) -> Args:
        """From what a parser with these flags has read."""
        return cls(**engine_arguments(args))

    def create_engine_config(self, *_: Any, **__: Any) -> EngineOptions:
        """The options, checked."""
        return EngineOptions.from_arguments(**_values(self))


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {
        item.name: dataclasses.field(default=item.default, repr=item.repr)
        for group in dataclasses.fields(EngineOptions)
        for item in dataclasses.fields(group_class(group))
    }


def _values(args: EngineArgs) -> dict[str, Any]:
    return {name: getattr(args, name) for name in option_groups()}


EngineArgs.__annotations__ = dict.fromkeys(_fields(), Any)
for _name, _field in _fields().items():
    setattr(EngineArgs, _name, _field)
dataclasses.dataclass(init=False)(EngineArgs)


class AsyncEngineArgs(EngineArgs):
    """The arguments of `AsyncLLM`, which are `LLM`'s."""
