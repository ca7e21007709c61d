"""What to say of an argument that a class of parameters does not have."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from quire.protocol.errors import RequestError


def refuse_unknown(
    owner: str, given: Mapping[str, Any], known: Collection[str], reasons: Mapping[str, str]
) -> None:
    """Raise for the first name in `given` that is not known, with its reason or the name that is
    most like it."""
    for name, value in given.items():
        if name in known:
            continue
        if name in reasons:
            raise RequestError(f"{owner}.{name} does not exist (got {value!r}): {reasons[name]}.")
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}."
        raise RequestError(f"{owner}.{name} does not exist (got {value!r}); {hint}")
