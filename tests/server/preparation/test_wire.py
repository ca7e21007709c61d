"""Errors on their way from the process that prepares requests."""

from __future__ import annotations

import pytest

from quire.protocol.codec import encode
from quire.protocol.errors import ContextLengthError, RequestError
from quire.server.preparation.wire import HEADS, Refusal
from quire.text.chat_template import _plain


def test_numbers_beyond_64_bits_are_told() -> None:
    """The words have the number as it came; fields are bounded."""
    refusal = HEADS.decode(encode(Refusal.of(ContextLengthError(256, 5, 1 << 64, "max_tokens"))))
    assert isinstance(refusal, Refusal)
    error = refusal.error()
    assert isinstance(error, ContextLengthError) and str(1 << 64) in str(error)


def test_data_that_is_nested_too_deeply_is_refused_by_name() -> None:
    value: object = "x"
    for _ in range(100_000):
        value = [value]
    with pytest.raises(RequestError, match="tools is nested too deeply"):
        _plain(value, "tools")
    while isinstance(value, list):  # taken apart without recursion
        (value,) = value
