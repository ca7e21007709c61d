"""Linear layers of an 8B model from quantised weights, by format and batch, next to cuBLAS in 16
bits: float16 for groups of 4 bits, as such checkpoints have it, else bfloat16.

    python benchmarks/quantized_linear.py
    python benchmarks/quantized_linear.py --formats fp8 fp8-block --tokens 1 64 --json FILE

Matrices are made as an engine makes them (`make_matrix`), and compared with their dequantised
weights before they are timed. The rounding of inputs is part of the time. Calls run inside CUDA
graphs, on weights that change until the L2 cache cannot hold them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from harness import SHAPES, markdown_table, require_gpu, say, write_json

if TYPE_CHECKING:
    from quire.kernels.torch.quantized_weights import QuantizedWeights

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 8192)
ROTATED_BYTES = 256 << 20
MAX_COPIES = 16
BOUND = 5e-2
"""Of the relative error against inputs that are not rounded."""
HEADER = ["layer", "tokens", "us", "TB/s", "TFLOP/s", "16 bits, us", "16 bits / this", "error"]

Maker = Callable[[int, int], "QuantizedWeights"]


def makers() -> dict[str, Maker]:
    """Random weights by the name of their format."""
    import torch

    from quire.kernels.torch.quantized_weights import GroupedWeights, InputRounding, ScaledWeights

    def scaled(
        dtype: torch.dtype, block: tuple[int, int] | None, outputs: int, inputs: int
    ) -> ScaledWeights:
        values = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 32
        values = values.clamp(-127, 127)
        if block is None:
            scales = torch.rand(outputs, device="cuda")
        else:
            scales = torch.rand(-(-outputs // block[0]), -(-inputs // block[1]), device="cuda")
        rounding = InputRounding(dtype, group_size=None if block is None else block[1])
        return ScaledWeights(values.to(dtype), scales / 32 / inputs**0.5, block, rounding)

    def grouped(has_zeros: bool, outputs: int, inputs: int) -> GroupedWeights:
        codes = torch.randint(0, 16, (outputs, inputs), device="cuda", dtype=torch.uint8)
        scales = torch.rand(outputs, inputs // 128, device="cuda") / 4 / inputs**0.5
        zeros = torch.randint(0, 16, scales.shape, device="cuda", dtype=torch.uint8)
        return GroupedWeights(codes, 4, scales.half(), 128, zeros if has_zeros else None)

    return {
        "int4": partial(grouped, False),
        "int4-zeros": partial(grouped, True),
        "fp8": partial(scaled, torch.float8_e4m3fn, None),
        "fp8-block": partial(scaled, torch.float8_e4m3fn, (128, 128)),
        "int8": partial(scaled, torch.int8, None),
    }


def measure(
    make: Maker, layer: str, outputs: int, inputs: int, batches: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A layer at each size of batch: checked, then timed next to 16 bits."""
    import torch
    import torch.nn.functional as F

    from ceilings import seconds_of
    from quire.layers.quantization.matrices import make_matrix

    copies = min(MAX_COPIES, -(-ROTATED_BYTES // (outputs * inputs)))
    weights = make(outputs, inputs)
    dtype = torch.float16 if weights.scales.dtype == torch.float16 else torch.bfloat16
    dense = weights.dequantize(dtype)
    floats = [dense] + [torch.randn_like(dense) for _ in range(copies // 2)]
    matrices = [make_matrix(weights)]
    matrices += [make_matrix(make(outputs, inputs)) for _ in range(copies - 1)]
    for tokens in batches:
        x = torch.randn(tokens, inputs, device="cuda", dtype=dtype)
        expected = F.linear(x, dense).float()
        found = matrices[0].multiply(x, None, None).float()
        error = float((found - expected).norm() / expected.norm())
        assert error < BOUND, f"{layer} of {tokens} tokens differs by {error:.1e}"
        seconds = seconds_of([partial(matrix.multiply, x, None, None) for matrix in matrices])
        yield {
            "layer": layer,
            "tokens": tokens,
            "us": 1e6 * seconds,
            "tb_per_s": matrices[0].nbytes / seconds / 1e12,
            "tflop_per_s": 2 * tokens * outputs * inputs / seconds / 1e12,
            "dense_us": 1e6 * seconds_of([partial(F.linear, x, one) for one in floats]),
            "error": error,
        }


def row(figures: dict[str, Any]) -> list[str]:
    return [
        figures["layer"],
        f"{figures['tokens']:,}",
        f"{figures['us']:,.1f}",
        f"{figures['tb_per_s']:.2f}",
        f"{figures['tflop_per_s']:.0f}",
        f"{figures['dense_us']:,.1f}",
        f"{figures['dense_us'] / figures['us']:.2f}",
        f"{figures['error']:.1e}",
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", metavar="NAME", help="these alone; default: all")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="sizes of batches")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args(words)
    require_gpu()
    from ceilings import measure_ceilings

    known = makers()
    wanted = arguments.formats or list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"--formats {unknown[0]!r}: choose from {', '.join(known)}")
    started = time.perf_counter()
    ceilings = measure_ceilings()
    say(f"Ceilings: {ceilings.describe()}")
    layers = {name: size for name, size in SHAPES["llama-8b"].linears().items() if name != "head"}
    results: dict[str, list[dict[str, Any]]] = {}
    for name in wanted:
        results[name] = [
            figures
            for layer, (outputs, inputs, _) in layers.items()
            for figures in measure(known[name], layer, outputs, inputs, arguments.tokens)
        ]
        say(f"\n### {name}\n\n{markdown_table(HEADER, [row(one) for one in results[name]])}")
    say(f"\n{time.perf_counter() - started:.0f} s in all")
    write_json(arguments.json, {"ceilings": vars(ceilings), "formats": results})


if __name__ == "__main__":
    main()
