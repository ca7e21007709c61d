"""A trial of the largest step before there is a KV cache: what an engine needs beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.protocol.plan import AddedRow, StepPlan
from quire.protocol.sampling import SamplingParams
from quire.worker.model_runner import ModelRunner
from quire.worker.warm_up import compile_kernels

if TYPE_CHECKING:
    from quire.worker.graphs import StepGraphs

GRAPHS_TRIED = 4
"""The largest one, and some more to learn what each further one adds."""


@dataclass(frozen=True)
class TrialBytes:
    """Memory of a GPU, weights loaded, and what will be needed beside weights and KV cache."""

    total: int
    used: int
    """By everybody, before the trial."""
    step: int
    """Rows and the largest step: activations, logits, sampling, libraries, kernels; inputs and
    logits of CUDA graphs."""
    graphs: int
    """What capturing all CUDA graphs adds."""


def used_bytes() -> int:
    """Memory of the GPU that is in use by any program; cached blocks are given back first."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def run_trial(
    build_runner: Callable[[], ModelRunner],
    num_rows: int,
    num_tokens: int,
    with_graphs: bool,
    shares_prefixes: bool,
    num_threads: int,
    max_queries: int = 1,
) -> TrialBytes:
    """Measure with a runner that has all it will have, but a cache of one block, which all rows
    share: what they compute is of no use."""
    used = used_bytes()
    runner = build_runner()
    runner.kv.data.zero_()
    graphs = None
    if with_graphs:
        graphs = _make_graphs(runner, num_rows, num_tokens, shares_prefixes, max_queries)
    compile_kernels(runner, graphs, shares_prefixes, num_threads, max_queries)
    max_len = runner.table.token_ids.shape[1]
    runner.execute(largest_step(num_rows, num_tokens, max_len, max_queries))
    runner.sample().result()
    torch.cuda.synchronize()
    # What torch has cached shows how far the memory was filled.
    free, total = torch.cuda.mem_get_info()
    step = total - free - used
    for_graphs = _graph_bytes(graphs) if graphs is not None else 0
    del runner, graphs
    used_bytes()
    return TrialBytes(total, used, step, for_graphs)


def largest_step(num_rows: int, num_tokens: int, max_len: int, max_queries: int = 1) -> StepPlan:
    """As many tokens and rows as a step may have; all rows sample with edited, filtered scores, and
    from as many lines as drafts allow."""
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


def _make_graphs(
    runner: ModelRunner, num_rows: int, num_tokens: int, shares_prefixes: bool, max_queries: int
) -> StepGraphs:
    from quire.worker.graphs import StepGraphs

    model, attention, table = runner.model, runner.attention, runner.table
    return StepGraphs(model, attention, table, num_rows, num_tokens, shares_prefixes, max_queries)


def _graph_bytes(graphs: StepGraphs) -> int:
    """Graphs share a pool of memory, which the largest one fills; the driver adds some for each."""
    before = used_bytes()
    first, *others = graphs.keys[:GRAPHS_TRIED]
    with torch.inference_mode():
        graphs.capture([first])
        largest = used_bytes() - before
        if not others:
            return largest
        graphs.capture(others)
    each = (used_bytes() - before - largest) / len(others)
    return largest + int(each * (len(graphs.keys) - 1))
