"""Adapters of the experts of a layer.

The kernels of all experts at once have no place for what adapters add between the products. So the
tokens whose adapters have experts are computed a second time, expert by expert, and their results
take the place of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from quire.config.experts import ClampedGate
from quire.kernels import dispatch
from quire.kernels.adapter_pool import AdapterTokens, LayerAdapters
from quire.kernels.torch.experts import Routing, weighted_sum


class ExpertProduct(Protocol):
    """x W^T + b of one expert, for biases of all that are kept."""

    def apply(self, expert: int, x: Tensor, bias: Tensor | None) -> Tensor: ...


class Steps(Protocol):
    """What the step that runs uses."""

    @property
    def tokens(self) -> AdapterTokens | None: ...

    @property
    def slots_with_experts(self) -> set[int]: ...

    def tokens_of(self, slots: Tensor) -> AdapterTokens:
        """Tokens by the slots of their adapters."""
        ...


class ExpertAdapters:
    """What adapters add to the two products of each expert of a layer."""

    def __init__(
        self,
        steps: Steps,
        gate_up: Mapping[int, LayerAdapters],
        down: Mapping[int, LayerAdapters],
    ) -> None:
        """By the numbers of the experts that this rank keeps."""
        self._steps, self._gate_up, self._down = steps, gate_up, down

    def correct(
        self,
        x: Tensor,
        routing: Routing,
        gate_up: ExpertProduct,
        down: ExpertProduct,
        biases: tuple[Tensor | None, Tensor | None],
        gate: ClampedGate | None,
        out: Tensor,
    ) -> None:
        """Puts into `out` [tokens, hidden] what experts with adapters give, for the tokens that use
        such."""
        tokens, with_experts = self._steps.tokens, self._steps.slots_with_experts
        if tokens is None or not with_experts:
            return
        known = torch.tensor(sorted(with_experts), dtype=torch.int32, device=x.device)
        chosen = torch.isin(tokens.slots, known).nonzero().squeeze(1)
        if not len(chosen):
            return
        x, slots = x[chosen], tokens.slots[chosen]
        experts, weights = routing.experts[chosen], routing.weights[chosen]
        top_k = experts.shape[1]
        flat = experts.flatten()
        results = x.new_zeros(len(flat), x.shape[1])
        for expert in flat.unique().tolist():
            if expert not in self._gate_up:
                continue
            pairs = (flat == expert).nonzero().squeeze(1)
            users = self._steps.tokens_of(slots[pairs // top_k].contiguous())
            rows = x[pairs // top_k]
            inner = gate_up.apply(expert, rows, biases[0])
            dispatch.add_adapters(rows, inner, None, self._gate_up[expert], users)
            inner = dispatch.gate_and_mul(inner, gate)
            result = down.apply(expert, inner, biases[1])
            dispatch.add_adapters(inner, result, None, self._down[expert], users)
            results[pairs] = result
        out[chosen] = weighted_sum(results, weights).to(out.dtype)
