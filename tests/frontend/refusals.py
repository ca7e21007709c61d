"""`refuses`: what every error that a user can cause has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import QuireError, RequestError


def refuses(call: Callable[[], Any], *parts: str, kind: type[QuireError] = RequestError) -> None:
    """The call raises an error of this kind that mentions all `parts`."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, QuireError)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
