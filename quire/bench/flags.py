"""The flags of benchmarks. Each has a usual default and one for `--quick`, which tests use."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.cli import Arguments, add_engine_arguments
from quire.protocol.errors import OptionError

if TYPE_CHECKING:
    from quire.config.cli import CommandParser

DISTRIBUTIONS = ("log-uniform", "uniform")


@dataclass(frozen=True)
class Lengths:
    """Token counts from `low` to `high`."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True)
class Flag:
    """One flag. The type of `usual` says how its value is written and read."""

    name: str
    usual: Any
    quick: Any
    help: str
    minimum: int = 1
    choices: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        if isinstance(self.usual, Lengths):
            return "N[:N]"
        return "N,..." if isinstance(self.usual, tuple) else "N"

    def read(self, text: str) -> Any:
        """The value a user wrote."""
        try:
            return self._checked(self._parse(text))
        except ValueError:
            raise OptionError(
                f"{self.word} must be {self._rule}, got {text!r}. Leave it out for the default "
                f"({shown(self.usual)})."
            ) from None

    def _parse(self, text: str) -> Any:
        if isinstance(self.usual, Lengths):
            low, _, high = text.partition(":")
            return Lengths(int(low), int(high or low))
        if isinstance(self.usual, tuple):
            return tuple(int(word) for word in text.split(","))
        return type(self.usual)(text)

    def _checked(self, value: Any) -> Any:
        if isinstance(value, Lengths):
            if not self.minimum <= value.low <= value.high:
                raise ValueError
        elif isinstance(value, str):
            if value not in self.choices:
                raise ValueError
        else:
            for number in value if isinstance(value, tuple) else (value,):
                if not number >= self.minimum:
                    raise ValueError
        return value

    @property
    def _rule(self) -> str:
        if isinstance(self.usual, Lengths):
            return f"a number of tokens or a range such as 16:256, at least {self.minimum}"
        if isinstance(self.usual, tuple):
            return f"numbers such as {shown(self.usual)}, each at least {self.minimum}"
        if self.choices:
            return " or ".join(self.choices)
        kind = "a number" if isinstance(self.usual, float) else "an integer"
        return f"{kind} of at least {self.minimum}"


INPUT_LEN = Flag("input_len", Lengths(16, 256), Lengths(8, 32), "Prompt tokens, or least and most.")
OUTPUT_LEN = Flag(
    "output_len", Lengths(8, 128), Lengths(4, 16), "Tokens to generate, or least and most."
)
DISTRIBUTION = Flag(
    "distribution",
    "log-uniform",
    "log-uniform",
    "How lengths spread; log-uniform: many short ones, few long ones.",
    choices=DISTRIBUTIONS,
)
ROUNDS = Flag("rounds", 3, 1, "Rounds over everything compared; medians are shown.")


def add_flags(parser: CommandParser, flags: Iterable[Flag], set_here: Collection[str] = ()) -> None:
    """A benchmark's own flags, those all benchmarks share, and the engine's.

    `set_here` names the engine options that the benchmark itself sets.
    """
    add_own_flags(parser, flags)
    add_engine_arguments(parser, exclude=set_here)


def add_own_flags(parser: CommandParser, flags: Iterable[Flag]) -> None:
    """A benchmark's own flags, and those all benchmarks share."""
    section = parser.add_argument_group("benchmark")
    for flag in flags:
        section.add_argument(
            flag.word,
            dest=f"bench_{flag.name}",
            metavar=flag.metavar,
            help=f"{flag.help} (default: {shown(flag.usual)}; quick: {shown(flag.quick)})",
        )
    section.add_argument("--quick", action="store_true", help="A few seconds, to see that it runs.")
    section.add_argument("--json", metavar="FILE", help="Write all figures to this file.")
    section.add_argument(
        "--plot", metavar="FILE", help="Draw the result into this file, such as out.png."
    )


def read_flags(arguments: Arguments, flags: Iterable[Flag]) -> Any:
    """The values of a benchmark's flags, by name."""
    values = Arguments()
    for flag in flags:
        given = getattr(arguments, f"bench_{flag.name}")
        usual = flag.quick if arguments.quick else flag.usual
        setattr(values, flag.name, usual if given is None else flag.read(given))
    return values


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)
