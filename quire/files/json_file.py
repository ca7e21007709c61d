"""JSON files of a model folder, checked as they are read; errors name file, key and value."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quire.protocol.errors import AdapterError, ModelError, QuireError

REPAIR = "repair the file, download the model again, or pass a corrected value in hf_overrides"

MAX_SIZE = 1 << 24
"""Of one dimension of a tensor, such as the vocabulary: more is no model of today."""
MAX_BYTES = 64 << 20
"""The index of a large model has a few megabytes."""


class _Required:
    """Marks a key that has no default."""


REQUIRED = _Required()


@dataclass(frozen=True)
class Subject:
    """What a file belongs to, for errors about it."""

    name: str
    error: type[QuireError]


MODEL = Subject("model", ModelError)
ADAPTER = Subject("adapter", AdapterError)


def read_json_object(path: Path, subject: Subject = MODEL) -> dict[str, Any]:
    """The object in a JSON file."""
    failure, again = subject.error, f"download the {subject.name} again"
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise failure(
                f"{path} has {size} bytes, and JSON files of a {subject.name} at most "
                f"{MAX_BYTES}; {again}."
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise failure(f"{path} cannot be read ({error.strerror or error}).") from error
    except json.JSONDecodeError as error:
        raise failure(
            f"{path} is not valid JSON: {error.msg} in line {error.lineno}, column {error.colno}; "
            f"repair the file or {again}."
        ) from error
    except UnicodeDecodeError as error:
        raise failure(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); {again}."
        ) from error
    except RecursionError as error:
        raise failure(f"{path} is nested too deeply to be read; {again}.") from error
    except ValueError as error:  # such as an integer of a million digits
        if isinstance(error, QuireError):
            raise
        raise failure(f"{path} cannot be read ({error}); {again}.") from error
    if not isinstance(value, dict):
        raise failure(f"{path} must hold a JSON object, got {str(value)[:80]!r}; {again}.")
    return value


@dataclass(frozen=True)
class CheckedValues:
    """Typed access to a model's configuration. A default of None makes a key optional."""

    file: Path
    values: dict[str, Any]

    def fail(self, key: str, rule: str, value: object) -> NoReturn:
        raise ModelError(f"{self.file}: {key} must be {rule}, got {_shown(value)}; {REPAIR}.")

    def fail_missing(self, key: str) -> NoReturn:
        raise ModelError(f"{self.file}: {key} is missing; {REPAIR}.")

    def integer(
        self, key: str, default: int | _Required | None = REQUIRED, maximum: int = MAX_SIZE
    ) -> int | None:
        """A whole number from 1 to `maximum`."""
        value = self._get(key, default)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(key, "a positive integer", value)
        if value > maximum:
            self.fail(key, f"at most {maximum}", value)
        return value

    def count(self, key: str, default: int | _Required = REQUIRED, maximum: int = MAX_SIZE) -> int:
        """As `integer`, for keys that cannot be null."""
        value = self.integer(key, default, maximum)
        if value is None:
            self.fail(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | _Required = REQUIRED) -> float:
        """A positive, finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(key, "a positive number", value)
        if not 0 < value <= sys.float_info.max:  # true of no NaN
            self.fail(key, "a positive number", value)
        return float(value)

    def boolean(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.fail(key, "true or false", value)
        return value

    def text(self, key: str, default: str | _Required = REQUIRED) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self.fail(key, "a string", value)
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            self.fail(key, "an object or null", value)
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                self.fail(key, "a token id or a list of token ids", value)
        # Some published configurations write -1 for "none".
        return tuple(dict.fromkeys(token for token in ids if token >= 0))

    def _get(self, key: str, default: object) -> Any:
        """Where a key has a default, null means that default."""
        value = self.values.get(key)
        if value is not None:
            return value
        if isinstance(default, _Required):
            if key in self.values:
                self.fail(key, "set", value)
            self.fail_missing(key)
        return default


def _shown(value: object) -> str:
    """A value in an error: some have millions of digits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
