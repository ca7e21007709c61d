"""Steps on made-up requests before the engine is ready: they show how much memory is needed, and
nothing compiles while real ones wait."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quire.protocol.plan import MIN_PREFIX_GROUP, AddedRow, Int32Array, StepPlan
from quire.protocol.sampling import SamplingParams

COMPILE_SIZES = (1, 2, 64, 256)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=0),
    SamplingParams(seed=0, top_k=4, top_p=0.9, min_p=0.01, repetition_penalty=1.1),
    SamplingParams(temperature=0.0, logit_bias={0: 1.0}, logprobs=1, min_tokens=1),
)


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
    block_size: int,
    max_len: int,
    sizes: list[int],
    shares_prefixes: bool,
    max_queries: int = 1,
    expanded_queries: int | None = None,
    slot: int = -1,
) -> Iterator[StepPlan]:
    """Single tokens alone and next to prompts, and with drafts, for each number of rows; and a
    prompt of `expanded_queries` tokens. All use the adapter in `slot`, if there is one."""
    length = min(block_size + 4, max_len - 1)
    if length < 2:
        return
    for count in sizes:
        groups = shares_prefixes and count >= MIN_PREFIX_GROUP and length > block_size
        for grouped in (False, True)[: 1 + groups]:
            for num_prompts in (0, 1):
                computed = np.full(count, length - 1, np.int32)
                computed[:num_prompts] = 0
                plan = _plan(computed, length, slot=slot)
                if grouped:
                    plan.prefix_groups = np.zeros(count, np.int32)
                    plan.prefix_blocks = np.ones(1, np.int32)
                yield plan
        for tokens in drafted_counts(max_queries):
            if length + tokens <= max_len:
                yield _plan(np.full(count, length - 1, np.int32), length, tokens - 1, slot)
    if expanded_queries is not None and expanded_queries < max_len:
        yield _plan(np.zeros(1, np.int32), expanded_queries, slot=slot)


def adapter_prompts(max_rows: int, max_tokens: int, max_len: int) -> Iterator[StepPlan]:
    """Prompts with the adapter in slot 0. Which kernels add it depends on the tokens of a step."""
    for size in [1 << i for i in range(4, max_tokens.bit_length())]:
        count = -(-size // (max_len - 1))
        if count <= max_rows:
            yield _plan(np.zeros(count, np.int32), size // count, slot=0)


def _plan(computed: Int32Array, length: int, num_drafts: int = 0, slot: int = -1) -> StepPlan:
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
            adapter_slot=slot,
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


def largest_step(
    num_rows: int, num_tokens: int, max_len: int, max_queries: int = 1, slot: int = -1
) -> StepPlan:
    """As many tokens and rows as a step may have; all rows sample with edited, filtered logits, and
    from as many lines as drafts allow, and use the adapter in `slot`, if there is one."""
    counts = np.full(num_rows, num_tokens // num_rows, np.int32)
    counts[: num_tokens % num_rows] += 1
    counts = counts.clip(1, max_len)
    params = SamplingParams(seed=0, top_p=0.9, logit_bias={0: 1.0}, logprobs=1)
    added = [
        AddedRow(
            row=row,
            token_ids=np.zeros(count, np.int32),
            num_prompt_tokens=count,
            num_computed_tokens=0,
            params=params,
            seed=row,
            num_logprobs=1,
            adapter_slot=slot,
            appends_sampled=False,  # a row of the longest length has no room for more
        )
        for row, count in enumerate(counts.tolist())
    ]
    return StepPlan(
        step=0,
        added_rows=added,
        rows=np.arange(num_rows, dtype=np.int32),
        num_new_tokens=counts,
        num_samples=np.minimum(counts, max_queries),
    )
