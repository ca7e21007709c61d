"""The command line, generated from the declarations of options and sampling parameters."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
import warnings
from collections.abc import Collection, Sequence
from types import NoneType
from typing import Any, NoReturn

from quire.config.arguments import IGNORED, REFUSED, SWITCHES, refuse_unless_neutral
from quire.config.fields import Declaration, kinds
from quire.config.log import QUIET
from quire.config.options import EngineOptions, group_class, option_groups
from quire.config.server import ServerOptions
from quire.protocol.errors import OptionError
from quire.protocol.sampling import PARAMETERS, RepetitionDetectionParams, SamplingParams

Arguments = argparse.Namespace

SAMPLING_HELP = {name: info.help for name, info in PARAMETERS.items() if info.help}
"""Help for every sampling parameter that has a flag."""

_REPEATED = frozenset(
    {"stop", "bad_words", "api_key", "served_model_name", "allowed_origins", "allowed_hosts"}
)
_METAVARS = {int: "N", float: "X", dict: "JSON", RepetitionDetectionParams: "JSON", list: "IDS"}


# What other programs call a command.
OTHER_NAMES = {"run": "chat", "start": "serve", "download": "pull", "batch": "run-batch"}


class CommandParser(argparse.ArgumentParser):
    """Reports mistakes in one line, takes underscores for dashes, and suggests the nearest flag."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", _HelpFormatter)
        super().__init__(add_help=False, **settings)
        self.takes_engine_options = False
        self.add_argument("-h", "--help", action="help", help="Show this help.")
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"quire: error: {message} (see `{self.prog} --help`)\n")

    def read(self, words: Sequence[str]) -> Arguments:
        """Parse a command line whole."""
        arguments: Arguments
        arguments, unknown = self.parse_known_args(_dashed(words))
        if unknown:
            arguments.parser.refuse(unknown[0])
        return arguments

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Flags without effect are added here: those of other commands are never needed, and the
        command's own flags are known by now."""
        if self.takes_engine_options:
            add_foreign_arguments(self)
            self.takes_engine_options = False
        return super().parse_known_args(args, namespace)

    def refuse(self, word: str) -> NoReturn:
        """End with the reason why a word of the command line is not understood."""
        flag = word.partition("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        if not flag.startswith("-"):
            beside = "; write it next to the other ones" if self._get_positional_actions() else ""
            self.error(f"unexpected argument {word!r}{beside}")
        if name in IGNORED:
            self.error(f"{flag} has no effect here: {IGNORED[name]}; leave it out")
        if name in REFUSED:
            self.error(f"{flag} is refused: {REFUSED[name].reason}; leave it out")
        if flag.startswith("--") and (name in option_groups() or name in SAMPLING_HELP):
            self.error(f"{flag} is of no use to `{self.prog}`; leave it out")
        close = difflib.get_close_matches(name, self._names(), n=1)
        hint = f". Did you mean {_flag(close[0])}?" if close else ""
        self.error(f"unknown flag {flag}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """An unknown command gets a suggestion, or the list of all."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = [OTHER_NAMES.get(value), *difflib.get_close_matches(value, action.choices, n=1)]
            found = next((name for name in near if name in action.choices), None)
            hint = f"Did you mean `{self.prog} {found}`?"
            every = f"There are {', '.join(action.choices)}."
            self.error(
                f"unknown {str(action.metavar).lower()} {value!r}. {hint if found else every}"
            )
        super()._check_value(action, value)

    def _names(self) -> list[str]:
        """The names of all flags with an effect, written as options are."""
        actions = self._option_string_actions.items()
        flags = [
            flag
            for flag, action in actions
            if flag.startswith("--") and not isinstance(action, _ForeignFlag)
        ]
        return [flag[2:].replace("-", "_") for flag in flags]


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            # Their names are indented once more than argparse reckons with.
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs are wrapped; lines that are indented already stay as they are."""
        wrap = super()._fill_text
        lines = text.splitlines()
        return "\n".join(x if x.startswith(" ") else wrap(x, width, indent) for x in lines)


def command_words(argv: Sequence[str] | None = None) -> list[str]:
    """The given words, or those this program was started with."""
    return list(sys.argv[1:] if argv is None else argv)


def add_engine_arguments(parser: argparse.ArgumentParser, exclude: Collection[str] = ()) -> None:
    """One flag per engine option, grouped as the options are; and --quiet."""
    _add_option_arguments(parser, EngineOptions, exclude)
    if isinstance(parser, CommandParser):
        parser.takes_engine_options = True
    parser.add_argument(
        "--quiet",
        action="store_const",
        const=QUIET,
        dest="log_level",
        default=argparse.SUPPRESS,
        help=f"Say nothing but warnings and errors: --log-level {QUIET}.",
    )


def add_foreign_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per argument of vLLM's that `LLM` accepts with a warning, or refuses by name."""
    taken = parser._option_string_actions
    for name in (*IGNORED, *REFUSED):
        flags = [_flag(name), _flag(f"no_{name}")] if name in SWITCHES else [_flag(name)]
        if flags[0] not in taken:
            nargs = 0 if name in SWITCHES else None
            parser.add_argument(*flags, dest=name, nargs=nargs, action=_ForeignFlag)


class _ForeignFlag(argparse.Action):
    """Says why a flag has no effect, or cannot have one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS})

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag, name = str(option_string), self.dest
        if name in SWITCHES and flag.startswith("--no-"):
            return
        if name in IGNORED:
            warnings.warn(f"{flag} has no effect: {IGNORED[name]}.", stacklevel=2)
            return
        try:
            value: Any = True if name in SWITCHES else _plain_value(values)
            refuse_unless_neutral(name, value)
        except OptionError:
            parser.error(f"{flag} is refused: {REFUSED[name].reason}; leave it out")


def _plain_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None if text.lower() == "none" else text


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per option of the server."""
    _add_option_arguments(parser, ServerOptions)


def server_options(arguments: Arguments) -> ServerOptions:
    """The server's options that were given, checked; the others have their defaults."""
    return ServerOptions.from_flat(vars(arguments))


def _add_option_arguments(
    parser: argparse.ArgumentParser, options: type, exclude: Collection[str] = ()
) -> None:
    for group in dataclasses.fields(options):
        owner: type = group_class(group)
        section = parser.add_argument_group(group.metadata["title"])
        for item in dataclasses.fields(owner):
            if item.name in exclude:
                continue
            declaration: Declaration = item.metadata["declaration"]
            usual = declaration.default_text or _shown(item.default, kinds(owner, item.name))
            section.add_argument(
                _flag(item.name),
                dest=item.name,
                default=argparse.SUPPRESS,
                help=_help(declaration.help, usual),
                **_reading(owner, item.name, declaration),
            )


def engine_arguments(arguments: Arguments) -> dict[str, Any]:
    """The engine options that were given, as keyword arguments of `LLM`."""
    given = vars(arguments)
    return {name: given[name] for name in option_groups() if name in given}


def engine_options(arguments: Arguments) -> EngineOptions:
    """The engine options that were given, checked; the others have their defaults."""
    return EngineOptions.from_arguments(**engine_arguments(arguments))


def add_sampling_arguments(
    parser: argparse.ArgumentParser,
    max_tokens: int | None = None,
    exclude: Collection[str] = (),
) -> None:
    """One flag per sampling parameter that shows in text. `max_tokens` is the usual limit."""
    section = parser.add_argument_group(
        "sampling",
        "Without a flag, the model's generation_config.json decides, then the default shown.",
    )
    defaults = {item.name: item.default for item in dataclasses.fields(SamplingParams)}
    defaults["max_tokens"] = "up to the end of the context" if max_tokens is None else max_tokens
    for name, text in SAMPLING_HELP.items():
        if name in exclude:
            continue
        section.add_argument(
            _flag(name),
            dest=f"sampling_{name}",
            default=argparse.SUPPRESS,
            help=_help(text, _shown(defaults[name], kinds(SamplingParams, name))),
            **_reading(SamplingParams, name),
        )


def sampling_arguments(arguments: Arguments) -> dict[str, Any]:
    """The sampling parameters that were given."""
    given = vars(arguments)
    return {
        name: given[f"sampling_{name}"] for name in SAMPLING_HELP if f"sampling_{name}" in given
    }


def _reading(owner: type, name: str, declaration: Declaration | None = None) -> dict[str, Any]:
    """How argparse reads a field. Values are checked where they are declared, not here."""
    accepted = [kind for kind in kinds(owner, name) if kind is not NoneType]
    if accepted == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    if name == "lora_modules":  # vLLM's flag takes several words
        return {"action": "extend", "nargs": "+", "metavar": "NAME=FOLDER"}
    if name in _REPEATED:
        return {"action": "append", "metavar": "TEXT"}
    kind = accepted[0]
    settings: dict[str, Any] = {"metavar": _METAVARS.get(kind, "TEXT")}
    if declaration is not None and declaration.choices is not None:
        settings["metavar"] = "{" + ",".join(map(str, declaration.choices)) + "}"
    if declaration is None or declaration.convert is None:
        settings["type"] = _READERS.get(kind, str)
    return settings


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _repetition_detection(text: str) -> RepetitionDetectionParams:
    values = _json_object(text)
    try:
        return RepetitionDetectionParams(**values)
    except TypeError:
        names = ", ".join(item.name for item in dataclasses.fields(RepetitionDetectionParams))
        raise argparse.ArgumentTypeError(f"the keys are {names}, got {text!r}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ids such as 1,2") from None


_READERS: dict[type, Any] = {
    int: int,
    float: float,
    dict: _json_object,
    list: _token_ids,
    RepetitionDetectionParams: _repetition_detection,
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(default: Any, accepted: Collection[type]) -> str:
    if bool in accepted:
        return "yes" if default else "no"
    return "none" if default is None else str(default)


def _help(text: str, default: str) -> str:
    return f"{text} (default: {default})".replace("%", "%%")


def _dashed(words: Sequence[str]) -> list[str]:
    """Flags written with underscores become flags with dashes; what follows `--` is left alone."""
    end = words.index("--") if "--" in words else len(words)
    dashed = [
        re.sub(r"^--[a-z][a-z0-9_]*(?==|$)", lambda flag: flag[0].replace("_", "-"), word)
        for word in words[:end]
    ]
    return dashed + list(words[end:])
