"""Mixtures of experts: a router, and one stacked weight for the experts of a layer."""

from __future__ import annotations

import torch
from torch import nn

from quire.config.experts import ExpertsConfig
from quire.kernels import dispatch
from quire.kernels.torch.experts import Routing, weighted_sum
from quire.layers.linear import Linear, width
from quire.layers.weights import Axis, Build, MatrixLayer, Shard, stacked, whole


class Router(Linear):
    """Chooses experts for each token; every rank has all of it."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, build: Build) -> None:
        super().__init__(whole(hidden_size), whole(config.count), False, build)
        self.config = config
        self.e_score_correction_bias: nn.Parameter | None
        if config.scoring == "sigmoid":
            axes = (whole(config.count),)
            self.add_weight("e_score_correction_bias", axes, build, torch.float32)
        else:
            self.register_parameter("e_score_correction_bias", None)

    def forward(self, x: torch.Tensor) -> Routing:  # type: ignore[override]
        return dispatch.route(super().forward(x), self.config, self.e_score_correction_bias)


class ExpertLinear(MatrixLayer):
    """x W^T with a matrix for each expert."""

    def __init__(self, experts: Axis, inputs: Axis, outputs: Axis, build: Build) -> None:
        super().__init__(build)
        self.experts = experts
        self.method.create_weights(self, outputs, inputs, build)

    @property
    def stack(self) -> torch.Tensor | None:
        """The weight [experts, outputs, inputs]; None where it is packed, expert by expert."""
        return None if "weight" in self.loaders else self.get_parameter("weight")

    def apply(self, expert: int, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.method.apply_expert(self, expert, x)


class Experts(nn.Module):
    """Networks of silu(gate) * up. Ranks keep a part of each, or some of them with
    `expert_parallel`; their results are summed."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, build: Build) -> None:
        super().__init__()
        self.parallel = build.parallel
        self.kept = self.parallel.experts(config.count)
        stack, size = stacked(config.count, self.kept), config.intermediate_size

        def inner(name: str | None = None) -> Axis:
            if self.parallel.expert_parallel:
                return (Shard(size, 0, size, name),)
            return width(size, build, name)

        hidden = whole(hidden_size)
        self.gate_up_proj = ExpertLinear(
            stack, hidden, inner("gate") + inner("up"), build / "gate_up_proj"
        )
        self.down_proj = ExpertLinear(stack, inner(), hidden, build / "down_proj")

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        gate_up, down = self.gate_up_proj.stack, self.down_proj.stack
        if not self.kept:
            out = torch.zeros_like(x)
        elif gate_up is not None and down is not None:
            out = dispatch.expert_mlp(x, routing, gate_up, down, self.kept.start)
        else:
            out = self._one_by_one(x, routing)
        return self.parallel.all_reduce(out)

    def _one_by_one(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        top_k = routing.experts.shape[1]
        chosen = routing.experts.flatten()
        results = x.new_zeros(len(chosen), x.shape[1])
        for expert in chosen.unique().tolist():
            if expert in self.kept:
                pairs = (chosen == expert).nonzero().squeeze(1)
                inner = self.gate_up_proj.apply(expert, x[pairs // top_k])
                results[pairs] = self.down_proj.apply(expert, dispatch.silu_and_mul(inner))
        return weighted_sum(results, routing.weights)


class SparseMLP(nn.Module):
    """A router and the experts that it chooses from."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, build: Build) -> None:
        super().__init__()
        self.gate = Router(config, hidden_size, build / "gate")
        self.experts = Experts(config, hidden_size, build / "experts")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x))
