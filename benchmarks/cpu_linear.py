"""Linear layers from packed weights on the CPU next to torch's, on the shapes of SmolLM2-135M.

    python benchmarks/cpu_linear.py --threads 2
    python benchmarks/cpu_linear.py --isa avx2 --kinds Q8_0 Q4_1 --tokens 1 32
    python benchmarks/cpu_linear.py --kinds Q4_1 GPTQ AWQ MXFP4 FP8 --planes 2 --tokens 1 32

What is compared runs in turns; a time is the fastest of many short turns, because other work on the
machine only adds to it. Each call takes the next of
several copies of its weights, together larger than the caches, as a step through a model would.
GB/s counts weights as stored, GOP/s two operations per weight and token. "read" is the machine's
own bandwidth: the sum of a large tensor, in the same turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.cpu import linear as packed
from quire.kernels.cpu.quantized import pack_weights
from quire.kernels.torch import linear as reference
from quire.kernels.torch.gguf_blocks import BLOCK_SIZES
from quire.kernels.torch.quantized_weights import (
    GroupedWeights,
    InputRounding,
    QuantizedWeights,
    ScaledWeights,
)

SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "lm_head": (49152, 576),
}
SUPER_SHAPES = {"down, K formats": (2048, 8192)}
# Where the float16 scales of a block lie; all other bytes are random.
SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}


@dataclass
class Contender:
    """One way to compute a layer, with its copies of the weights."""

    name: str
    weight_bytes: int
    calls: Iterator[Callable[[Tensor], Any]]

    def time(self, x: Tensor, repeats: int) -> float:
        """Seconds per call."""
        start = time.perf_counter()
        for _ in range(repeats):
            next(self.calls)(x)
        return (time.perf_counter() - start) / repeats


def random_rows(kind: str, outputs: int, inputs: int) -> Tensor:
    """Stored rows with random numbers and small scales."""
    elements, size = BLOCK_SIZES[kind]
    blocks = torch.randint(0, 256, (outputs * inputs // elements, size), dtype=torch.uint8)
    for start in SCALES[kind]:
        scales = torch.rand(len(blocks), 1).mul_(1e-3).half()
        blocks[:, start : start + 2] = scales.view(torch.uint8)
    return blocks.view(outputs, -1)


def random_weights(name: str, outputs: int, inputs: int) -> QuantizedWeights:
    """As a checkpoint of this format has them."""
    if name in ("W8A8", "FP8"):
        floats = torch.randn(outputs, inputs)
        values = floats.mul(40).to(torch.int8) if name == "W8A8" else floats.to(torch.float8_e4m3fn)
        rounding = InputRounding(values.dtype)
        return ScaledWeights(values, torch.rand(outputs).mul(1e-3), rounding=rounding)
    size = 32 if name == "MXFP4" else 128
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales = torch.rand(outputs, -(-inputs // size)).mul(1e-3)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if name == "AWQ" else None
    return GroupedWeights(codes, 4, scales, size, zeros, is_e2m1=name == "MXFP4")


CHECKPOINTS = ("GPTQ", "AWQ", "MXFP4", "W8A8", "FP8")
"""Formats of checkpoints; those of 4 bits with groups of 128, or 32 in MXFP4."""


def make_packed(name: str, outputs: int, inputs: int, planes: int) -> packed.BlockMatrix | None:
    """A random matrix, checked against the reference; None if it cannot have this shape."""
    x = torch.randn(8, inputs)
    if name in CHECKPOINTS:
        weights = random_weights(name, outputs, inputs)
        matrix = pack_weights(weights)
        assert isinstance(matrix, packed.BlockMatrix)
        matrix = replace(matrix, input_planes=planes)
        expected = F.linear(x, weights.dequantize())
        tolerance = 2e-2
    else:
        if inputs % BLOCK_SIZES[name][0]:
            return None
        rows = random_rows(name, outputs, inputs)
        matrix = packed.pack_blocks(name, rows, inputs, planes)
        expected = reference.pack_blocks(name, rows, inputs, planes).multiply(x)
        tolerance = 1e-5
    error = (matrix.multiply(x) - expected).norm() / expected.norm()
    assert error < tolerance, f"{name} {outputs} x {inputs}: relative error {error}"
    return matrix


def packed_call(matrix: packed.BlockMatrix) -> Callable[[Tensor], Tensor]:
    return matrix.multiply


def fp32_call(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, weight)


def onednn_call(weight: Tensor, num_tokens: int) -> Callable[[Tensor], Tensor]:
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, num_tokens)
    linear = torch.ops.mkldnn._linear_pointwise
    return lambda x: linear(x, reordered, None, "none", [], "")


def int8_call(weight: Tensor) -> Callable[[Tensor], Tensor]:
    scale = weight.abs().amax().item() / 127
    quantized = torch.quantize_per_tensor(weight, scale, 0, torch.qint8)
    prepacked = torch.ops.quantized.linear_prepack(quantized, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, prepacked)


def contenders(
    outputs: int, inputs: int, num_tokens: int, kinds: list[str], planes: int, cache_bytes: int
) -> list[Contender]:
    """Every way to compute a layer of this shape."""
    found = []

    def add(name: str, weight_bytes: int, make: Callable[[], Callable[[Tensor], Any]]) -> None:
        copies = max(1, min(64, -(-cache_bytes // weight_bytes)))
        found.append(Contender(name, weight_bytes, cycle([make() for _ in range(copies)])))

    for kind in kinds:
        matrix = make_packed(kind, outputs, inputs, planes)
        if matrix is None:
            continue
        add(
            kind,
            matrix.data.numel(),
            lambda matrix=matrix: packed_call(  # type: ignore[misc]
                replace(matrix, data=matrix.data.clone())
            ),
        )
    weight = torch.randn(outputs, inputs)
    fp32_bytes = weight.numel() * 4
    add("torch fp32", fp32_bytes, lambda: fp32_call(weight.clone()))
    add("oneDNN fp32", fp32_bytes, lambda: onednn_call(weight.clone(), num_tokens))
    add("torch int8", weight.numel(), lambda: int8_call(weight))
    return found


def measure(
    shape: tuple[int, int], num_tokens: int, options: argparse.Namespace
) -> list[tuple[Contender, float]]:
    """Seconds per call of every contender, and of reading memory."""
    ways = contenders(*shape, num_tokens, options.kinds, options.planes, options.cache_mb << 20)
    x = torch.randn(num_tokens, shape[1])
    memory = torch.randn(64 << 20 >> 2)
    ways.append(Contender("read", memory.numel() * 4, cycle([lambda _: memory.sum()])))
    repeats = [max(1, int(options.turn_ms / 1e3 / max(way.time(x, 3), 1e-7))) for way in ways]
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(options.turns):
        for way, count, seconds in zip(ways, repeats, times, strict=True):
            way.time(x, 1)
            seconds.append(way.time(x, count))
    return [(way, min(seconds)) for way, seconds in zip(ways, times, strict=True)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", help="one of " + ", ".join(cpu.isas()))
    parser.add_argument(
        "--kinds", nargs="+", default=list(packed.KINDS), choices=(*packed.KINDS, *CHECKPOINTS)
    )
    parser.add_argument("--planes", type=int, default=1, help="bytes of an input: 1 or 2")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 512])
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES, *SUPER_SHAPES])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--turn-ms", type=float, default=2, help="least time of one turn")
    parser.add_argument("--cache-mb", type=int, default=128, help="size of all copies of a matrix")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cpu.set_isa(options.isa)
    print(f"{cpu.available()[1]}; isa {options.isa or cpu.isas()[-1]}; {options.threads} threads")
    print(f"{'shape':24} {'tokens':>6} {'':12} {'us':>9} {'GB/s':>7} {'GOP/s':>8} {'x torch':>8}")
    for name in options.shapes:
        outputs, inputs = {**SHAPES, **SUPER_SHAPES}[name]
        for num_tokens in options.tokens:
            results = measure((outputs, inputs), num_tokens, options)
            (torch_time,) = [seconds for way, seconds in results if way.name == "torch fp32"]
            for way, seconds in results:
                speed = 2 * outputs * inputs * num_tokens / seconds / 1e9
                is_layer = way.name != "read"
                print(
                    f"{f'{name} {outputs} x {inputs}':24} {num_tokens:6} {way.name:12} "
                    f"{seconds * 1e6:9.1f} {way.weight_bytes / seconds / 1e9:7.1f} "
                    + (f"{speed:8.1f} {torch_time / seconds:8.2f}" if is_layer else "")
                )


if __name__ == "__main__":
    main()
