"""Steps on made-up requests before the engine is ready: nothing compiles while real ones wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.protocol.plan import MIN_PREFIX_GROUP, AddedRow, Int32Array, StepPlan
from quire.protocol.sampling import SamplingParams
from quire.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from quire.worker.graphs import StepGraphs

COMPILE_SIZES = (1, 2, 64, 256)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=0),
    SamplingParams(seed=0, top_k=4, top_p=0.9, min_p=0.01, repetition_penalty=1.1),
    SamplingParams(temperature=0.0, logit_bias={0: 1.0}, logprobs=1, min_tokens=1),
)


def compile_kernels(
    runner: ModelRunner,
    graphs: StepGraphs | None,
    shares_prefixes: bool,
    num_threads: int,
    max_queries: int = 1,
) -> None:
    """Compile most kernels side by side, which a cold start would otherwise do one by one.

    Forward passes of each kind are gone through and compute nothing. Nothing is sampled from them:
    tokens that were not chosen must not be looked up.
    """
    from quire.kernels.triton.compile import CompilingTogether

    max_rows = len(runner.table.num_tokens)
    sizes = sorted({min(size, max_rows) for size in COMPILE_SIZES})
    with CompilingTogether(num_threads):
        runner.sampler.warm_up(runner.kv.data.dtype)
        for plan in warm_up_plans(runner, sizes, shares_prefixes, max_queries):
            runner.execute(plan)
            runner.update_rows(StepPlan(step=0, freed_rows=plan.rows))
        if graphs is not None:
            with torch.inference_mode():
                graphs.compile()


def warm_up(runner: ModelRunner, shares_prefixes: bool, max_queries: int = 1) -> None:
    """Run steps of each kind. Their rows have no blocks of their own: all write to the first block
    of the cache, which holds nothing yet."""
    runner.sampler.warm_up(runner.kv.data.dtype)
    sizes = batch_sizes(len(runner.table.num_tokens), runner.graphs is not None)
    for plan in warm_up_plans(runner, sizes, shares_prefixes, max_queries):
        runner.execute(plan)
        runner.sample().result()
        runner.update_rows(StepPlan(step=0, freed_rows=plan.rows))


def batch_sizes(max_rows: int, has_graphs: bool) -> list[int]:
    """Rows of the steps. Which kernels decode depends on their number by powers of two; graphs have
    met those already."""
    if has_graphs:
        return sorted({min(size, max_rows) for size in (1, 2, 64)})
    return [*(1 << i for i in range(max_rows.bit_length())), max_rows]


def drafted_counts(max_queries: int) -> list[int]:
    """Tokens of each row in steps that verify drafts, of which there are up to `max_queries` - 1:
    one for each kernel of decode attention."""
    return sorted({*(count for count in (2, 4, 8) if count < max_queries), max_queries} - {1})


def warm_up_plans(
    runner: ModelRunner, sizes: list[int], shares_prefixes: bool, max_queries: int = 1
) -> Iterator[StepPlan]:
    """Single tokens alone and next to prompts, and with drafts, for each number of rows."""
    block_size, max_len = runner.table.block_size, runner.table.token_ids.shape[1]
    length = min(block_size + 4, max_len - 1)
    if length < 2:
        return
    for count in sizes:
        groups = shares_prefixes and count >= MIN_PREFIX_GROUP and length > block_size
        for grouped in (False, True)[: 1 + groups]:
            for num_prompts in (0, 1):
                computed = np.full(count, length - 1, np.int32)
                computed[:num_prompts] = 0
                plan = _plan(computed, length)
                if grouped:
                    plan.prefix_groups = np.zeros(count, np.int32)
                    plan.prefix_blocks = np.ones(1, np.int32)
                yield plan
        for tokens in drafted_counts(max_queries):
            if length + tokens <= max_len:
                yield _plan(np.full(count, length - 1, np.int32), length, tokens - 1)


def _plan(computed: Int32Array, length: int, num_drafts: int = 0) -> StepPlan:
    """Each row has so many of its `length` tokens computed and computes the others, and drafts."""
    added = [
        AddedRow(
            row=row,
            token_ids=np.zeros(length, np.int32),
            num_prompt_tokens=length,
            num_computed_tokens=done,
            params=PARAMS[row % len(PARAMS)],
            seed=row,
            num_logprobs=PARAMS[row % len(PARAMS)].logprobs or -1,
        )
        for row, done in enumerate(computed.tolist())
    ]
    return StepPlan(
        step=0,
        added_rows=added,
        rows=np.arange(len(computed), dtype=np.int32),
        num_new_tokens=length - computed + num_drafts,
        num_samples=np.full(len(computed), 1 + num_drafts, np.int32),
    )
