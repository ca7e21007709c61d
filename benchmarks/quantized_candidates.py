"""Ways to compute the quantised linear layers of an 8B model, by layer and size of batch, next to
what the engine takes: which of them is worth taking instead.

    python benchmarks/quantized_candidates.py
    python benchmarks/quantized_candidates.py --formats int4 --tokens 1 8 --json FILE

Each is compared with the dequantised weights before it is timed; one that fails or differs is named
and has no time. Calls run inside CUDA graphs, on weights that change until the L2 cache cannot hold
them. Gate and up are also measured as the engine computes them for a few tokens, silu(gate) * up in
the same kernel. The floor is the bytes of the weights at the bandwidth of reading, or the
arithmetic at the speed of a large bf16 product (twice that with inputs of 8 bits), whichever is
longer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from harness import SHAPES, markdown_table, require_gpu, say, write_json
from quantized_linear import BOUND, MAX_COPIES, ROTATED_BYTES, makers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.kernels.triton.grouped_matrix import GroupedMatrix
    from quire.kernels.triton.scaled_linear import ScaledMatrix
    from quire.layers.quantization.matrices import DenseMatrix

FORMATS = ("int4", "int4-zeros", "fp8", "fp8-block", "bf16")
TOKENS = (1, 8, 64, 256, 2048)
ENGINE = "engine"
STREAMS = (
    # Spans at a time, stages, programs of a multiprocessor, registers.
    (4, 3, 3, None),
    (4, 4, 3, None),
    (4, 3, 4, 128),
    (4, 2, 99, None),
    (2, 4, 6, None),
    (2, 6, 4, None),
    (8, 2, 1, None),
    (8, 2, 2, 128),
)
VECTORS = ((16, 4, 8, 4, 2), (16, 8, 8, 8, 2), (16, 2, 8, 2, 2))
PRODUCTS = (
    # Groups, tokens, fields and stages of inputs, stages of weights.
    (1, 64, 4, 2, 2),
    (2, 128, 2, 3, 2),
    (2, 256, 1, 4, 2),
)
GEMVS = ((8, 256, 2, 5), (8, 512, 2, 4), (4, 512, 2, 4), (4, 1024, 2, 4), (8, 256, 1, 5))
"""Outputs, inputs, warps, stages."""
VECTOR_STREAMS = ((8, 4, 3), (8, 3, 4), (8, 6, 2), (8, 2, 99), (4, 6, 4), (16, 3, 2))
"""Outputs, stages, programs of a multiprocessor."""

Multiply = Callable[[Any, "Tensor"], "Tensor"]


def gated_candidates(name: str, num_tokens: int) -> Mapping[str, Multiply]:
    """The same with gates in the kernel; none where the engine applies them by one of its own."""
    found: dict[str, Multiply] = {}
    if name.startswith("int4") and num_tokens <= 8:
        found[ENGINE] = _gated_few
        found |= {_named("stream", one): partial(_stream, one, gated=True) for one in STREAMS}
        found |= {_named("vectors", one): partial(_vectors, one, gated=True) for one in VECTORS}
    elif name != "bf16" and num_tokens == 1:
        found[ENGINE] = partial(_gemv, None, gated=True)
        found |= {_named("gemv", one): partial(_gemv, one, gated=True) for one in GEMVS}
    return found


def candidates(name: str, num_tokens: int) -> Mapping[str, Multiply]:
    """By name, the ways to multiply a matrix of the format with as many tokens."""
    found: dict[str, Multiply] = {ENGINE: lambda matrix, x: matrix.multiply(x, None, None)}
    if name.startswith("int4"):
        if num_tokens <= 8:
            found |= {_named("stream", one): partial(_stream, one) for one in STREAMS}
            found |= {_named("vectors", one): partial(_vectors, one) for one in VECTORS}
        elif num_tokens <= 1024:
            for one in PRODUCTS:
                for splits in (1, 2, 4):
                    found[_named("product", (*one, splits))] = partial(_product, (*one, splits))
        if num_tokens > 64:
            found["dequantise, cuBLAS"] = _dequantise
    elif num_tokens == 1:
        found |= {_named("stream", one): partial(_vector, one) for one in VECTOR_STREAMS}
        if name != "bf16":
            found |= {_named("gemv", one): partial(_gemv, one) for one in GEMVS}
    elif name == "fp8-block" and num_tokens >= 64:
        found["tile"] = _tile
        for parts in (2, 4):
            found[f"cuBLAS, {parts} slices"] = partial(_slices, parts)
    return found


def _named(name: str, numbers: Sequence[object]) -> str:
    return f"{name} {' '.join('-' if one is None else str(one) for one in numbers)}"


def _out(matrix: Any, x: Tensor, gated: bool = False) -> Tensor:
    return x.new_empty((len(x), matrix.num_outputs // 2 if gated else matrix.num_outputs))


def _gated_few(matrix: GroupedMatrix, x: Tensor) -> Tensor:
    from quire.kernels.triton.grouped_matrix import FEWEST_TOKENS

    out = _out(matrix, x, True)
    matrix.multiply_few(x, None, out, FEWEST_TOKENS, True)
    return out


def _stream(sizes: Sequence[Any], matrix: GroupedMatrix, x: Tensor, gated: bool = False) -> Tensor:
    from quire.kernels.triton.grouped_matrix import StreamTile

    out = _out(matrix, x, gated)
    matrix.multiply_streamed(x, None, out, StreamTile(*sizes), gated)
    return out


def _vectors(sizes: Sequence[int], matrix: GroupedMatrix, x: Tensor, gated: bool = False) -> Tensor:
    from quire.kernels.triton.grouped_matrix import VectorTile

    out = _out(matrix, x, gated)
    matrix.multiply_vectors(x, None, out, VectorTile(*sizes), gated)
    return out


def _product(sizes: Sequence[int], matrix: GroupedMatrix, x: Tensor) -> Tensor:
    from quire.kernels.triton.grouped_matrix import HopperTile

    out, tile = _out(matrix, x), HopperTile(*sizes)
    room = matrix.workspace.memory.nbytes
    assert tile.splits * tile.sum_bytes(len(x), matrix.num_outputs) <= room, "sums do not fit"
    matrix.multiply_on_hopper(x, None, out, tile)
    return out


def _dequantise(matrix: GroupedMatrix, x: Tensor) -> Tensor:
    out = _out(matrix, x)
    matrix.multiply_dequantized(x, None, out)
    return out


def _gemv(
    sizes: Sequence[int] | None, matrix: ScaledMatrix, x: Tensor, gated: bool = False
) -> Tensor:
    from quire.kernels.triton.gemv import Tile, gemv

    weight, scales, block = matrix.values, matrix.scales, matrix.block
    tile = None if sizes is None else Tile(*sizes)
    return gemv(x, weight, None, None, gated, None, scales, block, tile)[0]


def _vector(sizes: Sequence[int], matrix: ScaledMatrix | DenseMatrix, x: Tensor) -> Tensor:
    from quire.kernels.hopper.vector_stream import Streams, multiply_vector, why_not
    from quire.layers.quantization.matrices import DenseMatrix

    if isinstance(matrix, DenseMatrix):
        weight, scales, block = matrix.weight, None, None
    else:
        weight, scales, block = matrix.values, matrix.scales, matrix.block
    reason = why_not(x, weight, block, Streams(*sizes))
    assert reason is None, reason
    out = _out(matrix, x)
    multiply_vector(x, weight, None, out, scales, block, Streams(*sizes))
    return out


def _tile(matrix: ScaledMatrix, x: Tensor) -> Tensor:
    from quire.kernels.triton.rounding import round_inputs
    from quire.kernels.triton.scaled_tile import scaled_product

    out, rounding = _out(matrix, x), matrix.rounding
    assert rounding is not None
    rounded = round_inputs(x, rounding)
    values = rounded.values[: len(x)]
    scales, size = rounded.scales, rounded.group_size
    scaled_product(values, scales, size, matrix.values, matrix.scales, matrix.block, None, out)
    return out


@cache
def _streams(count: int) -> list[torch.cuda.Stream]:
    import torch

    return [torch.cuda.Stream() for _ in range(count)]


def _slices(parts: int, matrix: ScaledMatrix, x: Tensor) -> Tensor:
    """By cuBLAS, slices of the inputs side by side: it does not divide inputs among processors
    where they have scales."""
    import torch

    from quire.kernels.triton.finish_product import finish_product
    from quire.kernels.triton.rounding import round_inputs

    rounding = matrix.rounding
    assert rounding is not None
    rounded = round_inputs(x, rounding)
    steps = matrix.values.shape[1] // 128
    # Scales of a slice start at a multiple of 16 bytes.
    cuts = [steps * part // parts // 4 * 4 for part in range(parts)] + [steps]
    sums = x.new_empty((parts, len(rounded.values), matrix.num_outputs))
    main = torch.cuda.current_stream()
    ready = main.record_event()
    for part, stream in enumerate(_streams(parts)):
        first, last = cuts[part], cuts[part + 1]
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            torch._scaled_mm(
                rounded.values[:, first * 128 : last * 128],
                matrix.values[:, first * 128 : last * 128].t(),
                rounded.scales[first:last].t(),
                matrix.scales[:, first:last].t(),
                out_dtype=x.dtype,
                out=sums[part],
            )
            done = stream.record_event()
        main.wait_event(done)
    out = _out(matrix, x)
    finish_product(sums[:, : len(x)], None, None, None, out)
    return out


def make_matrices(
    name: str, outputs: int, inputs: int, count: int
) -> tuple[list[Any], torch.Tensor]:
    """Random matrices of the format, and the numbers of the first."""
    import torch

    from quire.layers.quantization.matrices import DenseMatrix, make_matrix

    if name == "bf16":
        floats = [
            torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(count)
        ]
        return [DenseMatrix(one) for one in floats], floats[0]
    make = makers()[name]
    weights = make(outputs, inputs)
    dtype = torch.float16 if name.startswith("int4") else torch.bfloat16
    dense = weights.dequantize(dtype)
    others = [make_matrix(make(outputs, inputs)) for _ in range(count - 1)]
    return [make_matrix(weights), *others], dense


def measure(
    name: str, layer: str, outputs: int, inputs: int, batches: Sequence[int], gated: bool = False
) -> list[dict[str, Any]]:
    """A layer at each size of batch, by each candidate."""
    import torch
    import torch.nn.functional as F

    from ceilings import seconds_of

    copies = min(MAX_COPIES, -(-ROTATED_BYTES // (outputs * inputs)))
    matrices, dense = make_matrices(name, outputs, inputs, copies)
    found = []
    for tokens in batches:
        known = (gated_candidates if gated else candidates)(name, tokens)
        if not known:
            continue
        x = torch.randn(tokens, inputs, device="cuda", dtype=dense.dtype)
        expected = F.linear(x, dense).float()
        if gated:
            gate, up = expected.chunk(2, 1)
            expected = F.silu(gate) * up
        times: dict[str, float] = {}
        failed: dict[str, str] = {}
        for label, multiply in known.items():
            try:
                for _ in range(3):
                    result = multiply(matrices[0], x).float()
                    error = float((result - expected).norm() / expected.norm())
                    assert error < BOUND, f"differs by {error:.1e}"
                calls = [partial(multiply, matrix, x) for matrix in matrices]
                times[label] = 1e6 * seconds_of(calls)
            except (AssertionError, RuntimeError, ValueError) as problem:
                failed[label] = str(problem).splitlines()[0]
        found.append(
            {
                "layer": f"{layer}, gated" if gated else layer,
                "gated": gated,
                "tokens": tokens,
                "bytes": matrices[0].nbytes,
                "flops": 2 * tokens * outputs * inputs,
                "us": times,
                "failed": failed,
            }
        )
    return found


def row(one: Mapping[str, Any], floor: float) -> list[str]:
    times: dict[str, float] = one["us"]
    ranked = sorted(times, key=lambda label: times[label])
    others = [label for label in ranked if label != ENGINE][:3]
    shown = [f"{times[label]:.1f} ({label})" for label in others]
    engine = f"{times[ENGINE]:.1f}" if ENGINE in times else "fails"
    return [one["layer"], f"{one['tokens']:,}", f"{floor:.1f}", engine, *shown] + [""] * (
        3 - len(shown)
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="NAME")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="sizes of batches")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args(words)
    require_gpu()
    from ceilings import measure_ceilings

    started = time.perf_counter()
    ceilings = measure_ceilings()
    say(f"Ceilings: {ceilings.describe()}")
    layers = {name: size for name, size in SHAPES["llama-8b"].linears().items() if name != "head"}
    results: dict[str, list[dict[str, Any]]] = {}
    for name in arguments.formats:
        rows: list[list[str]] = []
        sums: dict[int, list[float]] = {}
        results[name] = []
        speed = ceilings.matmul_flops_per_s * (2 if name in ("fp8", "fp8-block") else 1)
        ways = [(*item, is_gated) for item in layers.items() for is_gated in (False, True)]
        for layer, (outputs, inputs, count), is_gated in ways:
            if is_gated and layer != "gate and up":
                continue
            for one in measure(name, layer, outputs, inputs, arguments.tokens, is_gated):
                read = one["bytes"] / ceilings.read_bytes_per_s
                floor = 1e6 * max(read, one["flops"] / speed)
                results[name].append({**one, "floor_us": floor})
                rows.append(row(one, floor))
                now = one["us"].get(ENGINE, float("nan"))
                best = min(one["us"].values(), default=float("nan"))
                known = sums.setdefault(one["tokens"], [0.0, 0.0, 0.0])
                # A step takes one of both.
                is_other = layer == "gate and up" and not is_gated
                if not (is_other and gated_candidates(name, one["tokens"])):
                    for place, value in enumerate((floor, now, best)):
                        known[place] += value * count / 1000
                for label, problem in one["failed"].items():
                    say(f"{name}, {layer}, {one['tokens']} tokens: {label}: {problem}")
        header = ["layer", "tokens", "floor, us", ENGINE, "best of others", "second", "third"]
        say(f"\n### {name}\n\n{markdown_table(header, rows)}\n")
        header = ["tokens", "floor, ms", ENGINE, "best"]
        lines = [
            [f"{tokens:,}", *(f"{value:.3f}" for value in known)] for tokens, known in sums.items()
        ]
        say(f"All layers of a step:\n\n{markdown_table(header, lines)}")
    say(f"\n{time.perf_counter() - started:.0f} s in all")
    write_json(arguments.json, {"ceilings": vars(ceilings), "formats": results})


if __name__ == "__main__":
    main()
