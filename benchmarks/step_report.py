"""What a profiled decode step is compared with, and the tables that show it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness import BYTES_PER_ELEMENT, Shape, markdown_table

if TYPE_CHECKING:
    from ceilings import Ceilings

Kernels = dict[str, dict[str, float]]
"""Microseconds and launches per step by kernel name."""

LINEAR, ATTENTION, EXPERTS = "linear layers", "attention", "experts"
KERNEL_KINDS = {
    EXPERTS: r"^_(gate_vectors|sum_vectors|grouped_tile|tile|sum)_kernel",
    "routing": r"^_(route|sort)_kernel",
    LINEAR: r"gemv|gemm|nvjet|cutlass|cublas|splitk|product"
    r"|^_?(scaled_tile|dequantize|vectors?|stream|round)_kernel",
    ATTENTION: r"^_(decode|prefill|prefix|shared|latent|expanded)_kernel|attention",
    "merge of splits": r"merge",
    "norm": r"_norm_",
    "rotation and cache write": r"rotary|rotate|latent_cache",
    "activation": r"silu",
    "sampling": r"argmax|softmax|sort|top_?[kp]"
    r"|^_(choose|start|weigh|collect|finish|penalize|count)_kernel",
    "embedding, rows and copies": r"gather|index|append|memcpy|memset|copy|scatter|embedding",
}
"""Kinds by parts of kernel names; the first that fits counts."""
OTHER, IDLE = "other", "no kernel runs"


def kind_of(kernel: str) -> str:
    for kind, pattern in KERNEL_KINDS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return OTHER


@dataclass(frozen=True)
class Floor:
    """Microseconds that no kernel can go below."""

    linear_us: float
    attention_us: float
    expert_us: float = 0.0

    @property
    def total_us(self) -> float:
        return self.linear_us + self.attention_us + self.expert_us

    @classmethod
    def of(
        cls,
        shape: Shape,
        batch: int,
        cached_tokens: float,
        ceilings: Ceilings,
        experts_used: float | None = None,
    ) -> Floor:
        """`cached_tokens` are those of all requests together, `experts_used` the distinct experts
        that a layer with experts reads, as they were counted."""
        linear_s = 0.0
        for layer, (outputs, inputs, count) in shape.linears().items():
            read_s = shape.bytes_per_weight(layer) * outputs * inputs / ceilings.read_bytes_per_s
            speed = ceilings.matmul_flops_per_s * shape.speed(layer)
            compute_s = 2 * batch * outputs * inputs / speed
            linear_s += count * max(read_s, compute_s)
        kv_bytes = cached_tokens * shape.kv_bytes_per_token
        expert_s = 0.0
        if shape.sparse is not None:
            assert experts_used is not None, "experts must be counted"
            weights = shape.expert_weights
            read_s = BYTES_PER_ELEMENT * experts_used * weights / ceilings.read_bytes_per_s
            compute_s = 2 * batch * shape.sparse.top_k * weights / ceilings.matmul_flops_per_s
            expert_s = shape.num_sparse * max(read_s, compute_s)
        return cls(1e6 * linear_s, 1e6 * kv_bytes / ceilings.read_bytes_per_s, 1e6 * expert_s)


def gpu_by_kind(kernels: Kernels, step_us: float) -> dict[str, float]:
    """Microseconds of each kind; what is left of the step passes between kernels."""
    kinds = dict.fromkeys([*KERNEL_KINDS, OTHER], 0.0)
    for name, one in kernels.items():
        kinds[kind_of(name)] += one["us"]
    return {**kinds, IDLE: step_us - sum(kinds.values())}


def other_kernels(steps: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, float]]]:
    """Kernels of the last step that belong to no kind, so that none of them hides."""
    return [(name, one) for name, one in steps[-1]["kernels"].items() if kind_of(name) == OTHER]


def gpu_table(steps: Sequence[dict[str, Any]]) -> str:
    floors = {LINEAR: "linear_us", ATTENTION: "attention_us", EXPERTS: "expert_us"}
    rows = [
        [kind, *(_cell(s["gpu_us"][kind], s["floor"].get(floors.get(kind, ""))) for s in steps)]
        for kind in steps[0]["gpu_us"]
    ]
    total = [_cell(s["step_us"], sum(s["floor"].values())) for s in steps]
    launches = [f"{step['launches']:.0f}" for step in steps]
    return markdown_table(
        _header("GPU time", steps), [*rows, ["step", *total], ["kernels launched", *launches]]
    )


def host_table(steps: Sequence[dict[str, Any]]) -> str:
    phases = steps[0]["host_us"]
    rows = [[phase, *(f"{step['host_us'][phase]:,.0f}" for step in steps)] for phase in phases]
    return markdown_table(_header("host time", steps), rows)


def functions_table(step: dict[str, Any]) -> str:
    rows = [[f"`{name}`", f"{us:,.0f}"] for name, us in step["host_functions_us"].items()]
    return markdown_table(["function", "us per step, with the profiler's overhead"], rows)


def _header(first: str, steps: Sequence[dict[str, Any]]) -> list[str]:
    return [first, *(f"batch {step['batch']:,}, context {step['context']:.0f}" for step in steps)]


def _cell(us: float, floor_us: float | None) -> str:
    return f"{us:,.0f}" if floor_us is None else f"{us:,.0f} ({floor_us:,.0f})"
