"""Experts of a layer on the CPU: one call of the library next to two calls for each expert.

    python benchmarks/cpu_experts.py --threads 2
    python benchmarks/cpu_experts.py --formats int8 --tokens 1 32 --shape olmoe --isa avx2

Shapes are those of one layer. Both ways have the same matrices and run in turns; each turn takes
the next of several layers, together larger than the caches, as a step through a model would, and
tokens choose their experts at random. A time is the median of all turns, a ratio the median of the
turns' ratios. GB/s counts the experts in use as stored. "router" is the choice of experts alone,
in the library and in torch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.experts import ExpertsConfig
from quire.kernels import cpu
from quire.kernels.cpu import linear as packed
from quire.kernels.cpu.experts import NativeExperts, route
from quire.kernels.cpu.linear import BlockMatrix, FloatMatrix
from quire.kernels.cpu.quantized import pack_weights
from quire.kernels.torch.experts import Routing, softmax_then_top_k, weighted_sum
from quire.kernels.torch.quantize import to_groups

SHAPES = {  # experts, of which a token has, hidden size, width
    "olmoe": (64, 8, 2048, 1024),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "small": (64, 8, 1024, 512),
}
FORMATS: dict[str, Callable[[Tensor], BlockMatrix | FloatMatrix]] = {
    "float32": lambda weight: packed.pack_floats([weight]),
    "bfloat16": lambda weight: packed.pack_floats([weight.bfloat16()], dtype=torch.bfloat16),
    "int8": packed.quantize_int8,
    "int4": lambda weight: pack_weights(to_groups(weight, group_size=128)),
}


@dataclass
class Layer:
    """The matrices of all experts, and both ways to compute with them."""

    gate_up: list[BlockMatrix | FloatMatrix]
    down: list[BlockMatrix | FloatMatrix]
    native: NativeExperts

    @classmethod
    def random(cls, shape: tuple[int, int, int, int], kind: str) -> Layer:
        num_experts, _, hidden, width = shape
        make = FORMATS[kind]
        gate_up = [make(torch.randn(2 * width, hidden) * 0.02) for _ in range(num_experts)]
        down = [make(torch.randn(hidden, width) * 0.02) for _ in range(num_experts)]
        native = NativeExperts([one.handle for one in gate_up], [one.handle for one in down])
        return cls(gate_up, down, native)

    @property
    def expert_bytes(self) -> int:
        return self.gate_up[0].nbytes + self.down[0].nbytes

    def at_once(self, x: Tensor, routing: Routing) -> Tensor:
        return self.native.run(x, routing)

    def one_by_one(self, x: Tensor, routing: Routing) -> Tensor:
        top_k = routing.experts.shape[1]
        chosen = routing.experts.flatten()
        results = x.new_empty(len(chosen), x.shape[1])
        for expert in chosen.unique().tolist():
            pairs = (chosen == expert).nonzero().squeeze(1)
            inner = self.gate_up[expert].multiply(x[pairs // top_k])
            gate, up = inner.chunk(2, -1)
            results[pairs] = self.down[expert].multiply(F.silu(gate) * up)
        return weighted_sum(results, routing.weights)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(firsts: Sequence[float], seconds: Sequence[float]) -> float:
    return statistics.median(b / a for a, b in zip(firsts, seconds, strict=True))


def compare_experts(
    shape: str, kind: str, num_tokens: int, layers: list[Layer], turns: int
) -> None:
    num_experts, top_k, hidden, _ = SHAPES[shape]
    news, olds, used = [], [], []
    for turn in range(turns + 3):
        layer = layers[turn % len(layers)]
        x = torch.randn(num_tokens, hidden)
        chosen = torch.rand(num_tokens, num_experts).topk(top_k).indices.int()
        routing = Routing(chosen, torch.rand(num_tokens, top_k))
        if turn < 3:
            error = (layer.at_once(x, routing) - layer.one_by_one(x, routing)).abs().max()
            assert error < 1e-3 * layer.at_once(x, routing).abs().max(), error
            continue
        # The other way first in every other turn; neither finds the other's layer in the cache.
        other = layers[(turn + len(layers) // 2) % len(layers)]
        calls = [partial(layer.at_once, x, routing), partial(other.one_by_one, x, routing)]
        order = (0, 1) if turn % 2 else (1, 0)
        taken = {which: timed(calls[which]) for which in order}
        news.append(taken[0])
        olds.append(taken[1])
        used.append(len(chosen.unique()))
    new, old, mean = statistics.median(news), statistics.median(olds), statistics.mean(used)
    rate = mean * layers[0].expert_bytes / new / 1e9
    print(
        f"{shape:14} {kind:9} {num_tokens:4} tokens, {mean:5.1f} experts: {1e3 * new:8.3f} ms, "
        f"one by one {1e3 * old:8.3f} ms, {ratio(news, olds):5.2f} x; {rate:5.1f} GB/s",
        flush=True,
    )


def compare_routers(shape: str, num_tokens: int, turns: int) -> None:
    num_experts, top_k, _, _ = SHAPES[shape]
    config = ExpertsConfig(num_experts, top_k, 1, (True,))
    news, olds = [], []
    for _ in range(turns):
        logits = torch.randn(num_tokens, num_experts)
        news.append(timed(partial(route, logits, config)))
        olds.append(timed(partial(softmax_then_top_k, logits, top_k, True)))
    new, old = statistics.median(news), statistics.median(olds)
    print(
        f"{shape:14} router    {num_tokens:4} tokens: {1e6 * new:8.1f} us, "
        f"torch {1e6 * old:8.1f} us, {ratio(news, olds):5.2f} x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="olmoe")
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=["float32", "int8", "int4"]
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--isa", choices=("generic", "avx2", "avx512"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    # As in an engine: the library has the threads, torch has one.
    torch.set_num_threads(1)
    cpu.set_num_threads(arguments.threads)
    cpu.set_isa(arguments.isa)
    with torch.inference_mode():
        for num_tokens in arguments.tokens:
            compare_routers(arguments.shape, num_tokens, 20 * arguments.turns)
        for kind in arguments.formats:
            shape = SHAPES[arguments.shape]
            layers = [Layer.random(shape, kind) for _ in range(arguments.layers)]
            for num_tokens in arguments.tokens:
                compare_experts(arguments.shape, kind, num_tokens, layers, arguments.turns)


if __name__ == "__main__":
    main()
