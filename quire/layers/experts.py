"""Mixtures of experts: a router, and one stacked weight for the experts of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import nn

from quire.config.experts import ExpertsConfig
from quire.kernels import cpu, dispatch
from quire.kernels.cpu.experts import NativeExperts
from quire.kernels.cpu.library import MatrixHandle
from quire.kernels.expert_matrices import ExpertMatrices
from quire.kernels.torch.experts import Routing, weighted_sum
from quire.layers.expert_adapters import ExpertAdapters
from quire.layers.linear import Linear, width
from quire.layers.quantization.matrices import DenseMatrix, stack_experts
from quire.layers.weights import (
    Axis,
    Bring,
    Build,
    MatrixLayer,
    Shard,
    ShardKey,
    Weight,
    alternating,
    stacked,
    whole,
)

Stack = torch.Tensor | ExpertMatrices
"""The weights of all experts of a layer."""


class Router(Linear):
    """Chooses experts for each token; every rank has all of it."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, build: Build) -> None:
        super().__init__(whole(hidden_size), whole(config.count), config.has_biases, build)
        self.config = config
        self.e_score_correction_bias: nn.Parameter | None
        if config.scoring == "sigmoid":
            axes = (whole(config.count),)
            self.add_weight("e_score_correction_bias", axes, build, torch.float32)
        else:
            self.register_parameter("e_score_correction_bias", None)
        self._chosen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Routing:  # type: ignore[override]
        logits = self.method.apply(self, x, self.bias, self._exact_logits(x))
        routing = dispatch.route(logits, self.config, self.e_score_correction_bias)
        self._chosen = routing.experts
        return routing

    def _exact_logits(self, x: torch.Tensor) -> torch.Tensor | None:
        """Where logits go that are not to be of the type of x."""
        if not self.config.exact_router or x.dtype == torch.float32 or not self._is_dense:
            return None
        return x.new_empty((len(x), self.config.count), dtype=torch.float32)

    @cached_property
    def _is_dense(self) -> bool:
        """Whether the matrix is kept as floats; asked at the first step, when it is loaded."""
        return "weight" in self._parameters or all(
            isinstance(matrix, DenseMatrix) for matrix in self.matrices
        )

    def take_chosen(self) -> torch.Tensor:
        """The experts that the last batch chose, which the router then forgets."""
        chosen, self._chosen = self._chosen, None
        assert chosen is not None, f"{self.path} has chosen nothing since the last time"
        return chosen


class ExpertLinear(MatrixLayer):
    """x W^T + b with a matrix, and perhaps a bias, for each expert."""

    bias: nn.Parameter | None
    """[experts, outputs]"""

    def __init__(
        self, experts: Axis, inputs: Axis, outputs: Axis, has_bias: bool, build: Build
    ) -> None:
        super().__init__(build)
        self.experts, self.device = experts, build.device
        self.when_loaded: Callable[[], None] | None = None
        """Called when the last of packed matrices has arrived."""
        self.method.create_weights(self, outputs, inputs, build)
        if has_bias:
            self.add_weight("bias", (experts, outputs), build)
        else:
            self.register_parameter("bias", None)

    @property
    def is_packed(self) -> bool:
        """Whether each expert has a matrix of its own, until they are stacked."""
        return "weight" in self.loaders

    @property
    def stack(self) -> Stack | None:
        """The weight [experts, outputs, inputs], or the same packed; None where it is packed expert
        by expert."""
        return self.stacked if self.is_packed else self.get_parameter("weight")

    @property
    def is_loaded(self) -> bool:
        """Whether the matrices of all experts are there, of a layer that is packed."""
        return 0 < len(self.by_expert) == len(self.kept_experts)

    @cached_property
    def handles(self) -> list[MatrixHandle] | None:
        """The matrices of the kept experts as the native library knows them; None where it does not
        have one for each."""
        found = [
            matrix.handle
            for expert in self.kept_experts
            for matrix in self.by_expert.get(expert, ())
        ]
        handles = [handle for handle in found if handle is not None]
        return handles if len(handles) == len(found) == len(self.kept_experts) > 0 else None

    def load(
        self, name: str, shard_key: ShardKey, tensor: Weight, bring: Bring | None = None
    ) -> None:
        super().load(name, shard_key, tensor, bring)
        if self.when_loaded is not None and name in self.loaders and self.is_loaded:
            self.when_loaded()

    def finish_loading(self) -> None:
        super().finish_loading()
        on_cpu = cpu.available()[0] and self.device.type == "cpu"
        if on_cpu and self.by_expert and self.handles is None:
            self.why_slower.append(
                "called one by one, because the library does not have all experts"
            )

    def apply(  # type: ignore[override]
        self, expert: int, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """With `bias`, or a part of it, for all experts that are kept."""
        first = self.kept_experts.start
        if self.stacked is not None:
            return dispatch.expert_product(x, self.stacked, expert, first, bias)
        own = None if bias is None else bias[expert - first]
        return self.method.apply_expert(self, expert, x, own)


class Experts(nn.Module):
    """Networks of silu(gate) * up, or of another gate. Ranks keep a part of each, or some of them
    with `expert_parallel`; their results are summed."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, build: Build) -> None:
        super().__init__()
        self.parallel = build.parallel
        self.kept = self.parallel.experts(config.count)
        self.gate = config.gate
        self._top_k, self._hidden_size = config.top_k, hidden_size
        self._dtype, self._device = build.dtype, build.device
        stack, size = stacked(config.count, self.kept), config.intermediate_size

        def inner(name: str | None = None) -> Axis:
            if self.parallel.expert_parallel:
                return (Shard(size, 0, size, name),)
            return width(size, build, name)

        hidden, has_bias = whole(hidden_size), config.has_biases
        gate_up = inner("gate") + inner("up")
        if config.alternates:
            gate_up = alternating(gate_up)
        self.gate_up_proj = ExpertLinear(stack, hidden, gate_up, has_bias, build / "gate_up_proj")
        self.down_proj = ExpertLinear(stack, inner(), hidden, has_bias, build / "down_proj")
        if build.device.type == "cuda":
            for linear in (self.gate_up_proj, self.down_proj):
                linear.when_loaded = self._stack
        self.adapters: ExpertAdapters | None = None

    @property
    def waits_for_device(self) -> bool:
        """Whether a step waits to learn which experts are chosen, so that no graph can hold it."""
        is_stacked = self.gate_up_proj.stack is not None and self.down_proj.stack is not None
        return self._device.type == "cuda" and len(self.kept) > 0 and not is_stacked

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        gate_up, down = self.gate_up_proj.stack, self.down_proj.stack
        if not self.kept:
            out = torch.zeros_like(x)
        elif self.native is not None:
            out = self.native.run(x, routing)
        elif gate_up is not None and down is not None:
            out = self._all_at_once(x, routing, gate_up, down)
        else:
            out = self._one_by_one(x, routing)
        if self.adapters is not None and self.kept:
            products, biases = (self.gate_up_proj, self.down_proj), self._biases
            self.adapters.correct(x, routing, *products, biases, self.gate, out)
        return self.parallel.all_reduce(out)

    @property
    def _biases(self) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        return self.gate_up_proj.bias, self._down_bias

    def warm_up(self, max_tokens: int) -> None:
        """Goes through all kernels that steps of so many tokens meet."""
        from quire.kernels.triton.experts import kernel_changes

        gate_up, down = self.gate_up_proj.stack, self.down_proj.stack
        if gate_up is None or down is None or not self.kept:
            return
        first = self.kept.start
        chosen = torch.arange(first, first + self._top_k, device=self._device).int()
        for count in kernel_changes(len(self.kept), self._top_k):
            if count <= max_tokens:
                x = torch.zeros(count, self._hidden_size, dtype=self._dtype, device=self._device)
                weights = torch.ones(count, self._top_k, device=self._device)
                self._all_at_once(x, Routing(chosen.repeat(count, 1), weights), gate_up, down)

    @property
    def kernels(self) -> tuple[object, ...]:
        """What decides on the kernels: of equal ones it is enough to warm one up."""
        stacks = (self.gate_up_proj.stack, self.down_proj.stack)
        formats = tuple(
            (one.shape, one.dtype) if isinstance(one, torch.Tensor) else one and one.layout
            for one in stacks
        )
        return len(self.kept), self._top_k, self._dtype, *formats

    def _stack(self) -> None:
        """What is packed becomes one for all experts, once the last of them is there."""
        packed = [one for one in (self.gate_up_proj, self.down_proj) if one.is_packed]
        if not all(one.is_loaded for one in packed):
            return
        stacks = [stack_experts([one.by_expert[i] for i in self.kept]) for one in packed]
        for linear, stack in zip(packed, stacks, strict=True):
            if None in stacks:
                linear.why_slower.append(
                    "expert by expert, each waited for, and without CUDA graphs, because no kernel "
                    "has all of them in their formats"
                )
            else:
                linear.stacked = stack
                linear.by_expert.clear()
                linear.matrices.clear()

    def _all_at_once(
        self, x: torch.Tensor, routing: Routing, gate_up: Stack, down: Stack
    ) -> torch.Tensor:
        first = self.kept.start
        return dispatch.expert_mlp(x, routing, gate_up, down, first, *self._biases, self.gate)

    @cached_property
    def native(self) -> NativeExperts | None:
        """The experts as the native library computes them, all in one call; None where it cannot.
        Made at the first step, when weights are loaded."""
        gate_up, down = self.gate_up_proj.handles, self.down_proj.handles
        if gate_up is None or down is None:
            return None
        return NativeExperts(gate_up, down, self.kept.start, *self._biases, self.gate)

    def _one_by_one(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        top_k = routing.experts.shape[1]
        chosen = routing.experts.flatten()
        results = x.new_zeros(len(chosen), x.shape[1])
        for expert in chosen.unique().tolist():
            if expert in self.kept:
                pairs = (chosen == expert).nonzero().squeeze(1)
                inner = self.gate_up_proj.apply(expert, x[pairs // top_k], self.gate_up_proj.bias)
                inner = dispatch.gate_and_mul(inner, self.gate)
                results[pairs] = self.down_proj.apply(expert, inner, self._down_bias)
        return weighted_sum(results, routing.weights)

    @property
    def _down_bias(self) -> nn.Parameter | None:
        """Added once where each rank has a part of an expert."""
        is_own = self.parallel.expert_parallel or self.parallel.rank == 0
        return self.down_proj.bias if is_own else None


class SparseMLP(nn.Module):
    """A router and the experts that it chooses from."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, build: Build) -> None:
        super().__init__()
        self.gate = Router(config, hidden_size, build / "gate")
        self.experts = Experts(config, hidden_size, build / "experts")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x))
