"""`Pause`: what the scheduler leaves undone while an operator wants it to."""

from __future__ import annotations

from enum import Enum


class Pause(Enum):
    NONE = "none"
    DRAIN = "drain"
    """No request begins; those that have begun go on to their end."""
    HOLD = "hold"
    """Nothing is computed; running requests keep their rows and blocks."""
