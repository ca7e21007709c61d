"""How tokens were shared out among the experts of a model: ranks count it, clients read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, frozen=True)
class ExpertCounts:
    """How tokens were shared out among experts since the start; without layers for models that have
    none."""

    layers: list[int]
    """The numbers of the layers with experts."""
    tokens: NDArray[np.int64]
    """[layers, experts]: tokens that an expert got."""
    used: NDArray[np.int64]
    """[layers]: experts that a step used, summed over steps."""
    num_steps: int

    @classmethod
    def none(cls) -> ExpertCounts:
        return cls([], np.zeros((0, 0), np.int64), np.zeros(0, np.int64), 0)

    @classmethod
    def joined(cls, parts: Sequence[ExpertCounts]) -> ExpertCounts:
        """Of ranks: those of one stage counted the same tokens, others have other layers."""
        own = {part.layers[0]: part for part in reversed(parts) if part.layers}
        stages = [part for _, part in sorted(own.items())]
        if not stages:
            return cls.none()
        return cls(
            [layer for part in stages for layer in part.layers],
            np.concatenate([part.tokens for part in stages]),
            np.concatenate([part.used for part in stages]),
            min(part.num_steps for part in stages),
        )

    def since(self, earlier: ExpertCounts) -> ExpertCounts:
        """What came after other counts of the same model."""
        return ExpertCounts(
            self.layers,
            self.tokens - earlier.tokens,
            self.used - earlier.used,
            self.num_steps - earlier.num_steps,
        )

    @property
    def mean_used(self) -> float | None:
        """Experts that a layer used per step, averaged over layers; None: no layer has any."""
        return float(self.used_per_step.mean()) if self.layers else None

    @property
    def used_per_step(self) -> NDArray[np.float64]:
        """Of each layer, the mean over steps."""
        return self.used / max(self.num_steps, 1)

    @property
    def busiest_share(self) -> NDArray[np.float64]:
        """Of each layer's choices of an expert, those that fell on the busiest one."""
        totals: NDArray[np.int64] = self.tokens.sum(1)
        busiest: NDArray[np.int64] = self.tokens.max(1, initial=0)
        return busiest / np.maximum(totals, 1)
