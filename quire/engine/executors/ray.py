"""Ranks as actors of a Ray cluster."""

from __future__ import annotations

from quire.config.options import EngineOptions
from quire.engine.executors.nodes import ConnectedRanks


class RayActors(ConnectedRanks):
    def __init__(self, options: EngineOptions) -> None:
        raise NotImplementedError

    def ended(self) -> dict[int, str]:
        raise NotImplementedError

    def missing(self) -> str:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError
