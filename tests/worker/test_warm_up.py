"""Warm-up steps meet every kernel that a step of a running engine can need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.protocol.plan import StepPlan
from quire.worker.warm_up import (
    adapter_prompts,
    batch_sizes,
    drafted_counts,
    largest_step,
    warm_up_plans,
)
from tests.tiny import save_tiny, tiny_llm

pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.triton.decode_attention import padded_splits
from quire.layers.attention.triton import TritonBackend


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("max_rows", [1, 5, 16, 200, 1024])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8, 32])
def test_all_decode_variants_are_met(max_rows: int, num_kv_heads: int, queries: int) -> None:
    """Splits and warps are compiled into the decode kernels and follow from the number of rows."""
    kv = torch.empty(1, 2, 1, num_kv_heads, 16, 64)
    backend = TritonBackend(kv, 4 * num_kv_heads, num_kv_heads, 64, 16)

    def variant(num_rows: int) -> tuple[bool, int, int]:
        splits = backend.num_splits(num_rows)
        padded = padded_splits(splits) if splits > 1 else 0
        return splits > 1, padded, backend.num_warps(num_rows, queries)

    sizes = batch_sizes(max_rows, has_graphs=False)
    assert max(sizes) <= max_rows
    assert {variant(size) for size in sizes} == {variant(n) for n in range(1, max_rows + 1)}


@pytest.mark.parametrize(
    ("max_queries", "counts"), [(1, []), (2, [2]), (5, [2, 4, 5]), (8, [2, 4, 8])]
)
def test_steps_with_drafts_are_met(max_queries: int, counts: list[int]) -> None:
    """One for each kernel of decode attention, which has a power of two queries, and none where
    there is no speculation."""
    assert drafted_counts(max_queries) == counts


def test_many_heads_limit_the_queries() -> None:
    """Queries times heads of a KV head are rows of one matrix product."""
    most = [
        TritonBackend(torch.empty(1, 2, 1, 1, 16, dim), heads, 1, dim, 16).max_decode_queries
        for heads, dim in ((1, 64), (8, 64), (32, 64), (8, 256), (64, 256))
    ]
    assert most == [8, 8, 4, 4, 1]


@pytest.mark.usefixtures("native")
def test_steps_with_drafts_run(tmp_path: Path) -> None:
    """Those of the warm-up and the memory profile: the rows have no drafts, so none is accepted."""
    save_tiny(tmp_path)
    with tiny_llm(tmp_path, max_model_len=64, max_num_seqs=9) as llm:
        runner = llm._core.executor.runner
        assert len([*warm_up_plans(16, 64, [1], False, 1, 64)]) == 2, "a row has no such room"
        *others, prompt = warm_up_plans(16, 64, [1, 9], False, 5, 37)
        assert prompt.num_new_tokens.tolist() == [37]
        plans = [prompt, *others, largest_step(9, 40, 64, 8)]
        for plan in plans:
            runner.execute(plan)
            assert runner.sample().result().counts.tolist() == [1] * len(plan.rows)
            runner.update_rows(StepPlan(step=0, freed_rows=plan.rows))
    assert {int(plan.num_samples.max()) for plan in plans[:-1]} == {1, 2, 4, 5}
    assert plans[-1].num_samples.tolist() == plans[-1].num_new_tokens.tolist() == [5] * 4 + [4] * 5


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("has_adapters", [False, True])
def test_steps_with_adapters_are_met(has_adapters: bool, tmp_path: Path) -> None:
    """All kinds of steps, and prompts of all sizes, with and without the empty slot 0."""
    save_tiny(tmp_path)
    tokens: dict[bool, set[int]] = {False: set(), True: set()}
    with tiny_llm(tmp_path, max_model_len=64, max_num_seqs=9, enable_lora=has_adapters) as llm:
        runner = llm._core.executor.runner
        plans = [
            *runner._warm_up_plans([1, 9], 256),
            largest_step(9, 40, 64, slot=has_adapters - 1),
        ]
        for plan in plans:
            runner.execute(plan)
            uses = runner.adapters is not None and runner.adapters.layers.tokens is not None
            tokens[uses].add(plan.num_tokens)
            assert runner.sample().result().counts.tolist() == [1] * len(plan.rows)
            runner.update_rows(StepPlan(step=0, freed_rows=plan.rows))
    assert uses == has_adapters
    assert (tokens[True] >= tokens[False] | {16, 32, 64, 126, 255}) == has_adapters
    assert not tokens[True] or has_adapters


def test_prompts_with_adapters_fit_into_a_step() -> None:
    plans = [*adapter_prompts(4, 100, 9), *adapter_prompts(2, 100, 9), *adapter_prompts(1, 8, 9)]
    assert [(len(plan.rows), plan.num_tokens) for plan in plans] == [(2, 16), (4, 32), (2, 16)]
