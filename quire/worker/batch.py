"""`Batch`: the flat inputs of one step, gathered from rows and thrown away after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.attention.backend import AttentionInputs
from quire.protocol.plan import StepPlan
from quire.worker.request_table import RequestTable


@dataclass(slots=True)
class Batch:
    rows: Tensor
    """Rows that compute in this step."""
    token_ids: Tensor
    """All new tokens of the step, row after row."""
    positions: Tensor
    sample_rows: Tensor
    sample_indices: Tensor
    """Where the last tokens of `sample_rows` are in the flat arrays."""
    attention: AttentionInputs


def gather_batch(table: RequestTable, plan: StepPlan) -> Batch:
    rows, counts = table.index(plan.rows), table.index(plan.num_new_tokens)
    num_tokens = plan.num_tokens
    ends = counts.cumsum(0)
    starts = ends - counts
    row_of = torch.repeat_interleave(rows, counts, output_size=num_tokens)
    computed = table.num_computed[rows].long()
    first = torch.repeat_interleave(computed - starts, counts, output_size=num_tokens)
    positions = torch.arange(num_tokens, device=table.device) + first
    size = table.block_size
    blocks = table.block_tables[0, row_of, positions // size].long()
    samples = torch.from_numpy(plan.samples).to(table.device)
    context_lens = (computed + counts).to(torch.int32)
    query_start = torch.zeros(len(rows) + 1, dtype=torch.int32, device=table.device)
    query_start[1:] = ends
    return Batch(
        rows=rows,
        token_ids=table.token_ids[row_of, positions].long(),
        positions=positions,
        sample_rows=rows[samples],
        sample_indices=ends[samples] - 1,
        attention=AttentionInputs(
            query_start=query_start,
            context_lens=context_lens,
            block_tables=table.block_tables[0, rows],
            slots=blocks * size + positions % size,
            max_query_len=int(plan.num_new_tokens.max()),
            max_context_len=int(context_lens.max()),
        ),
    )
