"""`Batch`: the flat inputs of one step, gathered from rows and thrown away after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.layers.attention.backend import AttentionInputs
from quire.layers.attention.shared_prefix import HostPrefixTiles, PrefixTiles
from quire.protocol.plan import Int32Array, StepPlan
from quire.worker.rows import RowTable, StagedRows


@dataclass(slots=True)
class Batch:
    token_ids: Tensor
    """All new tokens of the step, row after row."""
    positions: Tensor
    sample_indices: Tensor
    """Tokens whose logits are wanted: of each row that samples, its last `num_samples`."""
    attention: tuple[AttentionInputs, ...]
    """Of each KV group."""
    adapter_slots: Tensor | None
    """Of each token, -1 for no adapter; None: no token uses one."""


def gather_batch(
    table: RowTable,
    plan: StepPlan,
    staged: StagedRows,
    prefixes: HostPrefixTiles | None = None,
    uses_adapters: bool = False,
) -> Batch:
    """Gathers the step's inputs; its tokens count as computed from then on."""
    rows, counts = staged.rows, staged.counts
    num_tokens = plan.num_tokens
    ends = counts.cumsum(0)
    starts = ends - counts
    computed = table.num_computed[rows]
    if num_tokens == len(plan.rows):  # a token each, as in most steps
        row_of, positions = rows, computed.long()
    else:
        row_of = torch.repeat_interleave(rows, counts, output_size=num_tokens)
        first = torch.repeat_interleave(computed - starts, counts, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=table.device) + first
    context_lens = computed + counts
    table.num_computed[rows] = context_lens
    query_start = torch.zeros(len(rows) + 1, dtype=torch.int32, device=table.device)
    query_start[1:] = ends
    return Batch(
        token_ids=table.token_ids[row_of, positions].long(),
        positions=positions,
        sample_indices=(
            (ends - 1)[staged.samples] if staged.lines is None else staged.lines.tokens
        ),
        attention=tuple(
            AttentionInputs(
                query_start=query_start,
                context_lens=context_lens,
                block_tables=blocks[rows],
                slots=slots_of(blocks, row_of, positions, table.block_size),
                query_lens=plan.num_new_tokens,
                max_context_lens=table.max_computed[plan.rows],
                send=table.staging.send,
                prefixes=_send_tiles(table, prefixes) if prefixes is not None else None,
                decode_queries=int(plan.num_samples.max(initial=1)),
            )
            for blocks in table.block_tables
        ),
        adapter_slots=table.adapter_slots[row_of] if uses_adapters else None,
    )


@dataclass(slots=True)
class StepTokens:
    """What rows compute in a step, for a model that goes over it a second time: where the tokens
    lie, as lengths were before the step."""

    rows: Tensor
    row_of: Tensor
    """Of each token."""
    positions: Tensor
    query_start: Tensor
    context_lens: Tensor
    host_rows: Int32Array
    query_lens: Int32Array

    @classmethod
    def gather(
        cls, table: RowTable, rows: Int32Array, counts: Int32Array, *others: Int32Array
    ) -> tuple[StepTokens, list[Tensor]]:
        """Of the next `counts` tokens of `rows`; what else there is to send goes with them."""
        ends = np.cumsum(counts, dtype=np.int32)
        sent = table.staging.send(rows, counts, np.append(np.int32(0), ends), *others)
        on_device, lens, query_start = sent[:3]
        computed, num_tokens = table.num_computed[on_device], int(ends[-1])
        row_of = torch.repeat_interleave(on_device, lens, output_size=num_tokens)
        first = torch.repeat_interleave(computed - query_start[:-1], lens, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=table.device) + first
        lens = computed + lens
        return cls(on_device, row_of, positions, query_start, lens, rows, counts), sent[3:]

    def attention(
        self, table: RowTable, blocks: Tensor, decode_queries: int = 1
    ) -> AttentionInputs:
        """Over keys and values that lie in the group whose tables are `blocks`."""
        return AttentionInputs(
            query_start=self.query_start,
            context_lens=self.context_lens,
            block_tables=blocks[self.rows],
            slots=slots_of(blocks, self.row_of, self.positions, table.block_size),
            query_lens=self.query_lens,
            max_context_lens=table.max_computed[self.host_rows],
            send=table.staging.send,
            decode_queries=decode_queries,
        )


def slots_of(blocks: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Where tokens at these positions of these rows are stored in a KV group whose tables are
    `blocks`."""
    found = blocks[rows, positions // block_size].long()
    return found * block_size + positions % block_size


def _send_tiles(table: RowTable, tiles: HostPrefixTiles) -> PrefixTiles:
    starts, lens, members = table.staging.send(*tiles)
    return PrefixTiles(starts, lens, members.view(tiles.members.shape))
