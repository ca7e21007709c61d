"""Routers and experts of real sizes as a GPU runs them: alone, and inside a CUDA graph.

That tiles fill shared memory, loads run ahead and no launch waits for the host can be seen natively
only.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.config.experts import ExpertsConfig
from quire.kernels import dispatch
from quire.kernels.torch import experts as references
from quire.kernels.torch.experts import Routing
from quire.kernels.torch.quantized_weights import (
    GroupedWeights,
    QuantizedWeights,
    ScaledWeights,
)

pytestmark = pytest.mark.gpu

SIZES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "deepseek-v2-lite": (64, 6, 2048, 1408)}
"""Experts, how many of them a token has, hidden size, width."""
TOKENS = (1, 2, 4, 5, 16, 63, 64, 256, 600, 1500)
BOUND = 1.2e-2


def check(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < BOUND, f"differs by {error:.2e}"


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def random_routing(num_tokens: int, count: int, top_k: int) -> Routing:
    scores = torch.rand(num_tokens, count, device="cuda")
    chosen = scores.topk(top_k).indices.int()
    return Routing(chosen, torch.rand(chosen.shape, device="cuda"))


@pytest.mark.parametrize("size", SIZES)
def test_float_experts(size: str) -> None:
    count, top_k, hidden, width = SIZES[size]
    gate_up = random(count, 2 * width, hidden) / hidden**0.5
    down = random(count, hidden, width) / width**0.5
    for num_tokens in TOKENS:
        x, chosen = random(num_tokens, hidden), random_routing(num_tokens, count, top_k)
        found = dispatch.expert_mlp(x, chosen, gate_up, down)
        check(found, references.expert_mlp(x, chosen, gate_up, down))
        # No sum depends on which program comes first.
        assert torch.equal(found, dispatch.expert_mlp(x, chosen, gate_up, down))


def make_weights(kind: str, outputs: int, inputs: int) -> QuantizedWeights:
    if kind.startswith("fp8"):
        block = (128, 128) if kind == "fp8 blocks" else None
        shape = (outputs // 128, inputs // 128) if block else (outputs,)
        scales = torch.rand(shape, device="cuda").add(0.5) / inputs**0.5
        return ScaledWeights(random(outputs, inputs).to(torch.float8_e4m3fn), scales, block)
    group_size = 32 if kind == "mxfp4" else 128
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    scales = torch.rand(outputs, inputs // group_size, device="cuda") / 4 / inputs**0.5
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device="cuda")
    return GroupedWeights(
        codes,
        4,
        scales.half(),
        group_size,
        zeros=zeros if kind == "awq" else None,
        is_e2m1=kind == "mxfp4",
    )


@pytest.mark.parametrize("kind", ["fp8", "fp8 blocks", "gptq", "awq", "mxfp4"])
def test_quantised_experts(kind: str) -> None:
    from quire.layers.quantization.matrices import make_matrix, stack_experts

    count, top_k, hidden, width = 16, 4, 2048, 768
    shapes = ((2 * width, hidden), (hidden, width))
    layers = [[make_weights(kind, *shape) for _ in range(count)] for shape in shapes]
    numbers = [torch.stack([w.dequantize(torch.bfloat16) for w in layer]) for layer in layers]
    gate_up, down = (
        stack_experts([[make_matrix(w, torch.bfloat16)] for w in layer]) for layer in layers
    )
    assert gate_up is not None and down is not None
    for num_tokens in TOKENS:
        x, chosen = random(num_tokens, hidden), random_routing(num_tokens, count, top_k)
        found = dispatch.expert_mlp(x, chosen, gate_up, down)
        check(found, references.expert_mlp(x, chosen, *numbers))


@pytest.mark.parametrize("num_tokens", [1, 3, 40, 600])
def test_a_graph_chooses_anew_at_each_replay(num_tokens: int) -> None:
    """Nothing of the choice is in the shapes, and nothing is kept between replays."""
    count, top_k, hidden, width = SIZES["qwen3-30b-a3b"]
    config = ExpertsConfig(count, top_k, width, (True,))
    gate_up = random(count, 2 * width, hidden) / hidden**0.5
    down = random(count, hidden, width) / width**0.5
    x = random(num_tokens, hidden)
    logits = torch.randn(num_tokens, count, device="cuda")

    def layer() -> Tensor:
        chosen = dispatch.route(logits, config)
        return dispatch.expert_mlp(x, chosen, gate_up, down)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(3):
        x.copy_(random(num_tokens, hidden))
        logits.copy_(torch.randn(num_tokens, count, device="cuda"))
        graph.replay()
        chosen = references.softmax_then_top_k(logits, top_k, True)
        check(out, references.expert_mlp(x, chosen, gate_up, down))
