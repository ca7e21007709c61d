"""Each GPU kernel against the ceiling of the GPU it runs on, and against torch.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --kernel "decode attention" --json decode.json

Ceilings are measured first. A kernel's floor is what its bytes take at the measured bandwidth, or
its arithmetic at the measured speed of a large matrix product, whichever is longer; the share is
that floor over its time. Results are compared with the reference before anything is timed. Calls
run inside CUDA graphs, on inputs that change until the L2 cache cannot hold them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness import markdown_table, require_gpu, say, write_json

if TYPE_CHECKING:
    from ceilings import Ceilings
    from kernel_cases import Case

HEADER = ["size", "us", "TB/s", "TFLOP/s", "share of ceiling", "torch, us", "torch / Quire"]


def measure(case: Case, ceilings: Ceilings) -> dict[str, Any]:
    """Check, then time both sides. What torch cannot do is reported with its reason."""
    import torch

    from ceilings import seconds_of

    sides = case.make()
    sides.check()
    seconds, torch_s, refusal = seconds_of(sides.ours), None, None
    try:
        torch_s = seconds_of(sides.torchs)
    except RuntimeError as error:
        refusal = str(error).splitlines()[0]
    del sides
    torch.cuda.empty_cache()
    bandwidth = ceilings.copy_bytes_per_s if case.writes else ceilings.read_bytes_per_s
    floor_s = max(case.num_bytes / bandwidth, case.flops / ceilings.matmul_flops_per_s)
    return {
        "size": case.size,
        "us": 1e6 * seconds,
        "floor_us": 1e6 * floor_s,
        "share": floor_s / seconds,
        "tb_per_s": case.num_bytes / seconds / 1e12,
        "tflop_per_s": case.flops / seconds / 1e12,
        "torch_us": None if torch_s is None else 1e6 * torch_s,
        "torch_refuses": refusal,
    }


def row(figures: dict[str, Any]) -> list[str]:
    torch_us = figures["torch_us"]
    return [
        figures["size"],
        f"{figures['us']:,.1f}",
        f"{figures['tb_per_s']:.2f}",
        f"{figures['tflop_per_s']:.0f}" if figures["tflop_per_s"] else "",
        f"{100 * figures['share']:.0f} %",
        "" if torch_us is None else f"{torch_us:,.1f}",
        "" if torch_us is None else f"{torch_us / figures['us']:.2f}",
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernel", nargs="+", metavar="NAME", help="these alone; default: all")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args(words)
    require_gpu()
    # They import triton, which a machine without a GPU may not have.
    from ceilings import measure_ceilings
    from kernel_cases import KERNELS

    wanted = arguments.kernel or list(KERNELS)
    unknown = [name for name in wanted if name not in KERNELS]
    if unknown:
        parser.error(f"--kernel {unknown[0]!r}: choose from {', '.join(map(repr, KERNELS))}")
    started = time.perf_counter()
    ceilings = measure_ceilings()
    say(f"Ceilings: {ceilings.describe()}")
    results: dict[str, list[dict[str, Any]]] = {}
    for name in wanted:
        results[name] = [measure(case, ceilings) for case in KERNELS[name]]
        say(f"\n### {name}\n\n{markdown_table(HEADER, [row(one) for one in results[name]])}")
        for one in results[name]:
            if one["torch_refuses"]:
                say(f"torch, {one['size']}: {one['torch_refuses']}")
    say(f"\n{time.perf_counter() - started:.0f} s in all")
    write_json(arguments.json, {"ceilings": vars(ceilings), "kernels": results})


if __name__ == "__main__":
    main()
