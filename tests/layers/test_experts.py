"""The experts of a layer: one call of the native library, or one by one where it lacks a matrix.

Compared with: the reference over the same weights. A rank that takes another's experts, or a
fallback that nothing tells of, turns these red.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.config.experts import ExpertsConfig
from quire.kernels.torch.experts import Routing, expert_mlp
from quire.layers.experts import Experts
from quire.layers.parallel import Parallel
from quire.layers.quantization.matrices import DenseMatrix
from quire.layers.quantization.packed import Packed, PackFloats
from quire.layers.weights import Build

pytestmark = pytest.mark.usefixtures("native")
CONFIG = ExpertsConfig(5, 2, 12, (True,))
HIDDEN = 20


class Sums:
    """A rank's group that leaves sums to the test."""

    is_capturable = False

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        raise NotImplementedError


def load(parallel: Parallel, gate_up: Tensor, down: Tensor) -> Experts:
    build = Build(torch.float32, torch.device("cpu"), parallel, lambda path: Packed(PackFloats()))
    experts = Experts(CONFIG, HIDDEN, build / "experts")
    for expert in experts.kept:
        for part, weight in zip(("gate", "up"), gate_up[expert].chunk(2), strict=True):
            experts.gate_up_proj.load("weight", (expert, part), weight)
        experts.down_proj.load("weight", (expert,), down[expert])
    for layer in (experts.gate_up_proj, experts.down_proj):
        layer.finish_loading()
    return experts


def case() -> tuple[Tensor, Tensor, Tensor, Routing]:
    torch.manual_seed(0)
    gate_up = torch.randn(CONFIG.count, 2 * CONFIG.intermediate_size, HIDDEN)
    down = torch.randn(CONFIG.count, HIDDEN, CONFIG.intermediate_size)
    chosen = torch.rand(9, CONFIG.count).topk(CONFIG.top_k).indices.int()
    return gate_up, down, torch.randn(9, HIDDEN), Routing(chosen, torch.rand(9, CONFIG.top_k))


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_share_the_experts(size: int, expert_parallel: bool) -> None:
    gate_up, down, x, routing = case()
    total = torch.zeros(9, HIDDEN)
    for rank in range(size):
        parallel = Parallel(rank, size, Sums(), expert_parallel=expert_parallel)
        experts = load(parallel, gate_up, down)
        assert experts.native is not None and not experts.gate_up_proj.why_slower
        total += experts(x, routing)
    expected = expert_mlp(x, routing, gate_up, down)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_a_rank_may_have_no_expert() -> None:
    gate_up, down, x, routing = case()
    parallel = Parallel(0, 7, Sums(), expert_parallel=True)
    experts = load(parallel, gate_up, down)
    assert len(experts.kept) == 0 and not experts.gate_up_proj.why_slower
    assert torch.equal(experts(x, routing), torch.zeros(9, HIDDEN))
    experts._device = torch.device("cuda")
    assert not experts.waits_for_device


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_experts_that_the_library_lacks_are_called_one_by_one(name: str) -> None:
    gate_up, down, x, routing = case()
    experts = load(Parallel(), gate_up, down)
    layer = getattr(experts, name)
    layer.by_expert[3] = [DenseMatrix((gate_up if name == "gate_up_proj" else down)[3])]
    del layer.handles  # asked for while loading
    layer.finish_loading()
    assert ["one by one" in reason for reason in layer.why_slower] == [True]
    assert experts.native is None
    expected = expert_mlp(x, routing, gate_up, down)
    torch.testing.assert_close(experts(x, routing), expected, rtol=1e-4, atol=1e-4)
