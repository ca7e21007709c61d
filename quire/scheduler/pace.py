"""`Pace`: how quickly the engine has been working of late, for estimates."""

from __future__ import annotations

from math import exp

MEMORY_S = 30.0
"""What lies this far back counts for a third."""


class Pace:
    """Rates over the time in which there was work; the recent past counts most."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._busy_s = 0.0
        self._computed = 0.0
        self._admitted = 0.0
        self._newly_admitted = 0

    def admitted(self, num_tokens: int) -> None:
        """A request with a prompt of `num_tokens` left the queue."""
        self._newly_admitted += num_tokens

    def planned(self, now: float, num_tokens: int) -> None:
        """A step of `num_tokens` is planned."""
        if self._last is not None:
            elapsed = now - self._last
            fading = exp(-elapsed / MEMORY_S)
            self._busy_s = self._busy_s * fading + elapsed
            self._computed = self._computed * fading + num_tokens
            self._admitted = self._admitted * fading + self._newly_admitted
            self._newly_admitted = 0
        self._last = now

    def rested(self) -> None:
        """There is nothing to do; the time until the next step does not count."""
        self._last = None

    @property
    def computed_per_s(self) -> float:
        """Tokens computed per second, 0 while that is unknown."""
        return self._computed / self._busy_s if self._busy_s else 0.0

    @property
    def admitted_per_s(self) -> float:
        """Prompt tokens that leave the queue per second, 0 while that is unknown."""
        return self._admitted / self._busy_s if self._busy_s else 0.0
