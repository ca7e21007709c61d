"""The page docs/options.md, written from the declarations of options and of vLLM's arguments.

`python -m quire.config.document > docs/options.md` brings it up to date.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from types import NoneType
from typing import Any

from quire.config.arguments import IGNORED, REFUSED
from quire.config.cli import SAMPLING_HELP
from quire.config.fields import Declaration, kinds
from quire.config.options import EngineOptions, group_class
from quire.config.server import ServerOptions
from quire.protocol.sampling import SamplingParams

TYPE_NAMES: dict[type, str] = {
    bool: "yes or no",
    int: "integer",
    float: "number",
    str: "text",
    dict: "dictionary",
    list: "list",
    tuple: "texts",
}

HEAD = """\
# Options

<!-- Written by `python -m quire.config.document > docs/options.md`; change the declarations. -->

Every option is a keyword argument of `LLM` and `AsyncLLM`, and a flag of the commands that can use
it: `max_num_seqs=8` is `--max-num-seqs 8`. What is yes or no is `True` or `False` in Python and
`--name` or `--no-name` on the command line. `None` stands for the default.

Names and meanings are vLLM's where vLLM has the option. An argument of vLLM's `LLM` belongs to one
of three classes: [supported](#supported), [accepted with a warning](#accepted-with-a-warning)
because it is harmless here, or [refused](#refused) because ignoring it would change results. Any
other name is an error that suggests the nearest one. [Hardware](hardware.md) says which devices
there are.
"""

SAMPLING = """\
## Sampling flags

`quire generate` and `quire chat` take these in addition to the options. They are fields of
`SamplingParams`, which has more; see [usage](usage.md#sampling). Two things differ from Python:
`max_tokens` is 128 for `generate` and 1,024 for `chat`, which has no `n`;
and without `seed` each run draws other random numbers. What is left out comes from the model's
generation_config.json where that has it; the embedded model has `temperature` 0.2, `top_p` 0.9,
`repetition_penalty` 1.1 and, in chats, `repetition_detection`.
"""

SERVER = """\
## Server flags

`quire serve` takes these in addition to the options; see [serving](serving.md).
"""

WARNED = """\
## Accepted with a warning

These are accepted and have no effect, which a warning says unless the value is `None` or `False`.
The same holds for flags.
"""

REFUSALS = """\
## Refused

Any value but those in brackets, or `None`, is an `OptionError` with the reason given here.
"""

ENVIRONMENT = """\
## Environment

| variable | meaning |
| --- | --- |
| `QUIRE_LOG_LEVEL` | How much Quire says on standard error, where `log_level` is unset: `DEBUG`, `INFO` (default), `WARNING`, `ERROR` or `CRITICAL`. |
| `QUIRE_RANKS_SHARE_DEVICES` | `1`: ranks beyond the number of GPUs share them, for tests of several ranks on one GPU. Slow: tensors pass between ranks through the host, and CUDA graphs are off. |
| `OMP_NUM_THREADS` | CPU threads, instead of the cores that may be used; the option `num_threads` overrides it. |
| `XDG_CACHE_HOME` | `quire pull` keeps the embedded model in its folder `quire`. (default: `~/.cache`) |
| `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` | Read by huggingface_hub: where models from the hub are kept, the access token, and whether to stay offline. |
| `CXX` | The C++ compiler, when Quire is installed from source. |
"""  # noqa: E501


def options_page() -> str:
    """The whole page."""
    parts = [HEAD, "## Supported\n", *_option_tables(EngineOptions), SAMPLING, _sampling_table()]
    parts += [SERVER, *_option_tables(ServerOptions)]
    parts += [WARNED, _warned_list(), REFUSALS, _refused_list(), ENVIRONMENT]
    return "\n".join(parts)


def _option_tables(options: type) -> list[str]:
    tables = []
    for group in dataclasses.fields(options):
        owner: type = group_class(group)
        title = group.metadata["title"]
        tables.append(f"### {title[0].upper()}{title[1:]}\n\n{owner.__doc__}\n")
        rows = []
        for item in dataclasses.fields(owner):
            declaration: Declaration = item.metadata["declaration"]
            usual = declaration.default_text or _code(item.default)
            rows.append((_code_name(item.name), _values(owner, item.name), usual, declaration.help))
        tables.append(_table(("option", "values", "default", "meaning"), rows))
    return tables


def _sampling_table() -> str:
    defaults = {item.name: item.default for item in dataclasses.fields(SamplingParams)}
    rows = [(_code_name(name), _code(defaults[name]), text) for name, text in SAMPLING_HELP.items()]
    return _table(("parameter", "default", "meaning"), rows)


def _values(owner: type, name: str) -> str:
    """What may be written: the choices, or else the type and the limit."""
    field = next(item for item in dataclasses.fields(owner) if item.name == name)
    declaration: Declaration = field.metadata["declaration"]
    if declaration.choices is not None:
        return ", ".join(_code(choice) for choice in declaration.choices)
    if declaration.rule is not None:
        return declaration.rule
    types = [TYPE_NAMES[kind] for kind in kinds(owner, name) if kind is not NoneType]
    limit = "" if declaration.minimum is None else f", at least {declaration.minimum:g}"
    return " or ".join(types) + limit


def _warned_list() -> str:
    names: dict[str, list[str]] = {}
    for name, reason in IGNORED.items():
        names.setdefault(reason, []).append(_code_name(name))
    return _reasons(names)


def _refused_list() -> str:
    names: dict[str, list[str]] = {}
    for name, refusal in REFUSED.items():
        neutral = ", ".join(_code(value) for value in refusal.neutral if value is not None)
        shown = _code_name(name) + (f" ({neutral})" if neutral else "")
        names.setdefault(refusal.reason, []).append(shown)
    return _reasons(names)


def _reasons(names: dict[str, list[str]]) -> str:
    lines = [
        f"- **{reason[0].upper()}{reason[1:]}:** {', '.join(listed)}."
        for reason, listed in names.items()
    ]
    return "\n".join(lines) + "\n"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(value: Any) -> str:
    return f"`{value!r}`"


def _code_name(name: str) -> str:
    return f"`{name}`"


if __name__ == "__main__":
    sys.stdout.write(options_page())
