"""`GrammarSettings`: what `structured_outputs_config` says, understood."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from quire.protocol.errors import OptionError

OF_OTHER_ENGINES = ("backend", "disable_fallback", "reasoning_parser", "enable_in_reasoning")
"""Keys of vLLM's setting that choose between its backends, or are options of their own here."""


@dataclass(frozen=True)
class GrammarSettings:
    """How grammars are applied by an engine."""

    jump_ahead: bool = True
    """Append all tokens at once that a grammar leaves no choice about."""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    @classmethod
    def from_config(cls, config: dict[str, Any] | None) -> GrammarSettings:
        known = {item.name for item in dataclasses.fields(cls)}
        values = {k: v for k, v in (config or {}).items() if k not in OF_OTHER_ENGINES}
        for name, value in values.items():
            if name not in known:
                raise OptionError(
                    f"structured_outputs_config[{name!r}] is unknown; use {', '.join(known)}."
                )
            if not isinstance(value, bool):
                raise OptionError(
                    f"structured_outputs_config[{name!r}] must be true or false, got {value!r}."
                )
        return cls(**values)
