"""`GrammarSettings`: what `structured_outputs_config` says, understood."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from quire.protocol.errors import OptionError
from quire.protocol.structured import JsonSettings

OF_OTHER_ENGINES = ("backend", "disable_fallback", "reasoning_parser", "enable_in_reasoning")
"""Keys of vLLM's setting that choose between its backends, or are options of their own here."""


@dataclass(frozen=True)
class GrammarSettings:
    """How grammars are applied by an engine."""

    jump_ahead: bool = True
    """Append all tokens at once that a grammar leaves no choice about."""
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any] | None) -> GrammarSettings:
        known = {item.name for item in dataclasses.fields(cls)}
        values = {k: v for k, v in (config or {}).items() if k not in OF_OTHER_ENGINES}
        for name, value in values.items():
            if name not in known:
                raise OptionError(
                    f"structured_outputs_config[{name!r}] is unknown; use {', '.join(known)}."
                )
            is_text = name == "whitespace_pattern"
            if value is not None and not isinstance(value, str if is_text else bool):
                wanted = "a regular expression" if is_text else "true or false"
                raise OptionError(
                    f"structured_outputs_config[{name!r}] must be {wanted}, got {value!r}."
                )
        return cls(**{name: value for name, value in values.items() if value is not None})

    def for_json(self, own: JsonSettings) -> JsonSettings:
        """The settings of one request: its own layout if it asks for one, or the engine's."""
        layout: JsonSettings | GrammarSettings = own if own.has_layout else self
        return JsonSettings(
            layout.disable_any_whitespace,
            own.disable_additional_properties or self.disable_additional_properties,
            layout.whitespace_pattern,
        )
