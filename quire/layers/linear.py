"""Linear layers that keep one rank's share of their weight and combine the ranks' results."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol, cast

import torch
from torch import nn

from quire.kernels import cpu
from quire.kernels.cpu.linear import FloatMatrices, pack_matrices
from quire.layers.activation import GatedActivation
from quire.layers.norm import Norm, RMSNorm
from quire.layers.weights import Axis, Build, GatedMatrix, MatrixLayer, Shard, divided, whole


class DenseMatrix(Protocol):
    """A matrix that is kept as floats."""

    weight: torch.Tensor


ThreeTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Linear(MatrixLayer):
    """x W^T + b over the given axes. Used as it is where every rank keeps the whole weight."""

    bias: nn.Parameter | None

    def __init__(self, inputs: Axis, outputs: Axis, bias: bool, build: Build) -> None:
        super().__init__(build)
        self.parallel = build.parallel
        self.method.create_weights(self, outputs, inputs, build)
        if bias:
            self.add_weight("bias", (outputs,), build)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x, self.bias)

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        activation: GatedActivation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(activation(forward(norm(x + residual))), x + residual), in few kernels where possible;
        the residual may be overwritten. Outputs are joined also where `forward` splits them."""
        is_known = activation is None or activation.is_silu
        if isinstance(norm, RMSNorm) and is_known:
            gated = activation is not None
            return self.method.apply_after_norm(self, x, residual, norm, self.bias, gated)
        normal, total = norm.add_and_normalize(x, residual)
        out = self.method.apply(self, normal, self.bias)
        return activation(out) if activation is not None else out, total


def width(size: int, build: Build, name: str | None = None) -> Axis:
    """A rank's share of the width of a network: outputs of one layer and inputs of the next."""
    return divided(size, build.parallel, name, build.block)


class ColumnLinear(Linear):
    """Each rank computes its share of the outputs."""

    def __init__(self, in_features: int, out_features: int, bias: bool, build: Build) -> None:
        outputs = width(out_features, build)
        super().__init__(whole(in_features), outputs, bias, build)


class MergedLinear(Linear):
    """Several column-parallel layers over one input at once; their outputs are joined in order."""

    def __init__(
        self, in_features: int, out_features: Mapping[str, int], bias: bool, build: Build
    ) -> None:
        outputs: Axis = ()
        for name, size in out_features.items():
            outputs += width(size, build, name)
        super().__init__(whole(in_features), outputs, bias, build)


class QKVLinear(Linear):
    """Query, key and value projections at once, divided by heads.

    KV heads are kept by several ranks where there are fewer of them than ranks.
    """

    def __init__(
        self,
        in_features: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        build: Build,
    ) -> None:
        own = build.parallel.heads(num_heads, num_kv_heads)
        outputs = (
            Shard(num_heads, own.first, own.count, "q").times(head_dim),
            Shard(num_kv_heads, own.kv_first, own.kv_count, "k").times(head_dim),
            Shard(num_kv_heads, own.kv_first, own.kv_count, "v").times(head_dim),
        )
        super().__init__(whole(in_features), outputs, bias, build)
        self.head_dim = head_dim
        self.heads = (own.count, own.kv_count, own.kv_count)

    def forward(self, x: torch.Tensor) -> ThreeTensors:  # type: ignore[override]
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim]; views of one tensor."""
        return self.split(super().forward(x))

    def split(self, joined: torch.Tensor) -> ThreeTensors:
        by_head = joined.view(joined.shape[0], sum(self.heads), self.head_dim)
        q, k, v = by_head.split_with_sizes(self.heads, dim=1)
        return q, k, v


class RowLinear(Linear):
    """Each rank multiplies its share of the inputs; the results are summed over ranks."""

    def __init__(self, inputs: int | Axis, out_features: int, bias: bool, build: Build) -> None:
        if isinstance(inputs, int):
            inputs = width(inputs, build)
        super().__init__(inputs, whole(out_features), bias, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parallel.all_reduce(self.method.apply(self, x, self._own_bias))

    def gated_matrix(self, num_tokens: int) -> GatedMatrix | None:
        """What `after_gates` multiplies; None where gates are better applied before."""
        if len(self.matrices) != 1 or self.method.tokens is not None:
            return None
        matrix = cast(GatedMatrix, self.matrices[0])
        # `isinstance` would take as long as a launch, in each layer of each step.
        is_gated = hasattr(matrix, "takes_gates") and matrix.takes_gates(num_tokens)
        return matrix if is_gated else None

    def after_gates(self, matrix: GatedMatrix, gate_up: torch.Tensor) -> torch.Tensor:
        """forward(silu(gate) * up)."""
        return self.parallel.all_reduce(matrix.multiply_gates(gate_up, self._own_bias))

    @property
    def _own_bias(self) -> nn.Parameter | None:
        return self.bias if self.parallel.rank == 0 else None


class OutputLinear(RowLinear):
    """The projection behind attention, divided by heads as `QKVLinear` is."""

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        out_features: int,
        bias: bool,
        build: Build,
    ) -> None:
        own = build.parallel.heads(num_heads, num_kv_heads)
        inputs = (Shard(num_heads, own.first, own.count).times(head_dim),)
        super().__init__(inputs, out_features, bias, build)


class LatentLinear(MatrixLayer):
    """Keys and values of all heads from a latent, divided by heads. It may be multiplied on the
    other side instead, so that attention is over latents: with queries, and with what comes of
    it."""

    def __init__(
        self, rank: int, key_dim: int, value_dim: int, num_heads: int, build: Build
    ) -> None:
        super().__init__(build)
        own = build.parallel.heads(num_heads, 1)
        self.sizes, self.num_heads = (key_dim, value_dim), own.count
        outputs = (Shard(num_heads, own.first, own.count).times(key_dim + value_dim),)
        self.method.create_weights(self, outputs, whole(rank), build)
        self.native: tuple[FloatMatrices, FloatMatrices] | None = None
        """The halves as the native library takes them, in place of the weight."""

    def finish_loading(self) -> None:
        super().finish_loading()
        weight = self.dense_weight
        if not weight.is_cpu or weight.dtype != torch.float32 or not cpu.available()[0]:
            return
        keys, values = self.halves
        self.native = pack_matrices(keys.transpose(1, 2)), pack_matrices(values)
        for name, half in zip(("packed_keys", "packed_values"), self.native, strict=True):
            self.register_buffer(name, half.packed, persistent=False)
        del self.dense_weight, self.halves
        self.matrices.clear()
        self.register_parameter("weight", None)

    @cached_property
    def dense_weight(self) -> torch.Tensor:
        """[heads * (key_dim + value_dim), rank], in each head the rows of keys first."""
        if self.matrices:
            return cast(DenseMatrix, self.matrices[0]).weight
        return self.get_parameter("weight")

    @cached_property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of keys [heads, key_dim, rank] and of values [heads, value_dim, rank]."""
        by_head = self.dense_weight.view(self.num_heads, sum(self.sizes), -1)
        keys, values = by_head.split_with_sizes(self.sizes, dim=1)
        return keys, values

    def to_latent(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [T, heads, key_dim] as they meet latents, [T, heads, rank]."""
        if self.native is not None:
            return self.native[0].multiply(q)
        return _by_head(q, self.halves[0])

    def from_latent(self, x: torch.Tensor) -> torch.Tensor:
        """Sums of latents [T, heads, rank] as sums of values, [T, heads, value_dim]."""
        if self.native is not None:
            return self.native[1].multiply(x)
        return _by_head(x, self.halves[1].transpose(1, 2))


def _by_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """x [T, heads, inputs] times a matrix [inputs, outputs] of each head."""
    out = x.new_empty(len(x), len(matrices), matrices.shape[2])
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
    return out
