"""Experts on several ranks, as one stack of floats: parts of each, or whole ones.

The reference goes through tokens and their experts one by one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from quire.config.experts import ExpertsConfig
from quire.kernels.torch.experts import Routing
from quire.layers.experts import Experts
from quire.layers.parallel import Parallel
from tests.layers.ranks import build_for, on_ranks

HIDDEN, WIDTH, TOKENS, TOP_K = 12, 10, 7, 2


@pytest.mark.parametrize("is_whole", [False, True], ids=["parts", "whole"])
@pytest.mark.parametrize(("count", "size"), [(4, 2), (5, 2), (5, 4), (3, 4), (2, 4)])
def test_ranks_add_up_what_their_experts_make(count: int, size: int, is_whole: bool) -> None:
    """Numbers that do not divide, and ranks without any expert."""
    generator = torch.Generator().manual_seed(count)
    tensors = {
        (expert, name): torch.randn(shape, generator=generator)
        for expert in range(count)
        for name, shape in {
            "gate": (WIDTH, HIDDEN),
            "up": (WIDTH, HIDDEN),
            "down": (HIDDEN, WIDTH),
        }.items()
    }
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    chosen = torch.stack([torch.randperm(count, generator=generator)[:TOP_K] for _ in x])
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    expected = torch.zeros(TOKENS, HIDDEN)
    for token, experts in enumerate(chosen.tolist()):
        for place, expert in enumerate(experts):
            gate, up, down = (tensors[expert, name] for name in ("gate", "up", "down"))
            inner = F.silu(gate @ x[token]) * (up @ x[token])
            expected[token] += weights[token, place] * (down @ inner)

    def work(parallel: Parallel) -> torch.Tensor:
        build = build_for(replace(parallel, expert_parallel=is_whole))
        config = ExpertsConfig(count, TOP_K, WIDTH, (True,))
        layer = Experts(config, HIDDEN, build)
        for (expert, name), tensor in tensors.items():
            matrix = layer.down_proj if name == "down" else layer.gate_up_proj
            key = (expert,) if name == "down" else (expert, name)
            if matrix.keeps("weight", key):
                matrix.load("weight", key, tensor)
        return layer(x, Routing(chosen.int(), weights))

    for found in on_ranks(size, work):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
