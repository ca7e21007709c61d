"""How many tokens each expert got, counted where the model runs and read now and then."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from quire.layers.experts import Router
from quire.protocol.expert_counts import ExpertCounts


class ExpertCounter:
    """Adds up what the routers of a stage chose, once per step for all layers. Nothing waits for
    the device, so that a CUDA graph may have it."""

    def __init__(self, routers: list[Router], device: torch.device) -> None:
        self._routers = routers
        self._layers = [_layer_of(router.path) for router in routers]
        self._num_experts = max(router.config.count for router in routers)
        shape = (len(routers), self._num_experts)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._used = torch.zeros(len(routers), dtype=torch.int64, device=device)
        """Experts that a step used, summed over steps."""
        self._num_steps = torch.zeros((), dtype=torch.int64, device=device)
        firsts = torch.arange(len(routers), dtype=torch.int32, device=device) * self._num_experts
        self._firsts = firsts.view(-1, 1, 1)

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> ExpertCounter | None:
        """None for models without experts."""
        routers = [module for module in model.modules() if isinstance(module, Router)]
        return cls(routers, device) if routers else None

    def take(self, is_real: Tensor | None = None) -> None:
        """Count what the routers chose since the last time. `is_real` [tokens] is False for tokens
        that only fill up a graph."""
        chosen = [router.take_chosen() for router in self._routers]
        places = (torch.stack(chosen) + self._firsts).flatten()
        if is_real is None:
            amounts = torch.ones_like(places, dtype=torch.int64)
        else:
            amounts = is_real.long().view(1, -1, 1).expand(len(chosen), -1, chosen[0].shape[1])
        step = torch.zeros_like(self._tokens)
        step.view(-1).index_add_(0, places, amounts.flatten())
        self._tokens += step
        self._used += (step > 0).sum(1)
        self._num_steps += 1

    def reset(self) -> None:
        """Forget what was counted, such as steps that warmed up."""
        for sums in (self._tokens, self._used, self._num_steps):
            sums.zero_()

    def read(self) -> ExpertCounts:
        """Waits for the device."""
        return ExpertCounts(
            layers=list(self._layers),
            tokens=self._tokens.cpu().numpy().copy(),
            used=self._used.cpu().numpy().copy(),
            num_steps=int(self._num_steps),
        )


def _layer_of(path: str) -> int:
    """The number of a layer in the model."""
    found = re.search(r"\.(\d+)\.", path)
    assert found is not None, path
    return int(found[1])
