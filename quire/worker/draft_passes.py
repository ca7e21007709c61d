"""`DraftPasses`: the passes in which a model drafts one token after the other, as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.decoding.sampler import Sampler
from quire.kernels.torch.sampling import Kinds
from quire.layers.attention.backend import AttentionInputs, GroupedAttention
from quire.layers.attention.layer import StepContext
from quire.layers.parallel import Parallel
from quire.models.registry import CausalLM
from quire.protocol.plan import Int32Array
from quire.worker.graphs import DRAFTED_ROWS, PREFIX_SIZES, CapturedGraphs, graph_bytes
from quire.worker.rows import RowTable, aligned

KINDS = (Kinds(False, False, False), Kinds(True, False, False), Kinds(True, True, True))
"""How rows draw, as graphs are captured for it."""


class PassesKey(NamedTuple):
    """The shape of a graph of all passes of a step, each with its draw."""

    num_rows: int
    num_drafts: int
    kinds: Kinds


class PassKey(NamedTuple):
    """The shape of a graph of one pass, which ends with logits."""

    num_rows: int
    is_first: bool


GraphKey = PassesKey | PassKey


class DraftPasses:
    """Owns what passes work on, and their graphs.

    The first pass of a row computes its last two known tokens: all that can be new since the passes
    of the step before, in which drafts were computed too, but for the last. Each further pass
    computes the draft of the one before it. All write to the blocks that the row has been given;
    what lies beyond these goes to a block that no row has, and what is drafted from there is none.
    So a row with few blocks, or near its end, takes part like any other.

    The host is asked for nothing in between. Where logits of a row are edited (penalties, bias), a
    graph has one pass, as the sampler has to be asked.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: GroupedAttention,
        table: RowTable,
        blocks: Tensor,
        sampler: Sampler,
        parallel: Parallel,
        counts: list[int],
        vocab_size: int,
        longest: int,
        spare_block: int,
    ) -> None:
        """`blocks` are the tables of the rows, `counts` how many drafts may be asked for,
        `vocab_size` is the target's, `longest` the tokens of a text that are drafted for."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=table.device)

        max_rows, max_blocks = blocks.shape
        self._model, self._attention, self._parallel = model, attention, parallel
        self._table, self._blocks, self._sampler = table, blocks, sampler
        self._counts, self._vocab_size = counts, vocab_size
        self._longest, self._spare_block = longest, spare_block
        self._inputs = ints(2, aligned(max_rows))
        """Rows, and the tokens that their blocks have room for: -1 in padding."""
        self._lens, self._tokens = ints(2, max_rows)
        """Known tokens and drafts so far, and the last draft."""
        self._drafts = ints(max(counts), max_rows)
        self._block_starts = torch.arange(max_blocks, device=table.device) * table.block_size
        starts = torch.arange(max_rows + 1, dtype=torch.int32, device=table.device)
        self._query_starts = {1: starts, 2: 2 * starts}
        sizes = {size for size in (*DRAFTED_ROWS, *PREFIX_SIZES) if size < max_rows}
        self._sizes = sorted({*sizes, max_rows})
        self._graphs: CapturedGraphs[GraphKey] = CapturedGraphs()
        self._logits: Tensor | None = None
        """One for all graphs, as in `StepGraphs`."""

    # --- a step -----------------------------------------------------------------------------------

    def propose(self, rows: Int32Array, room: Int32Array, count: int) -> Tensor:
        """Drafts of rows whose blocks have room for so many tokens: int32 [rows, count], negative
        behind the last of each."""
        num_rows, kinds = len(rows), self._sampler.begin_drafts(rows)
        size = next(size for size in self._sizes if size >= num_rows) if self._graphs else num_rows
        self._send(rows, room, size)
        if self._graphs and kinds is not None:
            self._graphs[PassesKey(size, count, kinds)].replay()
        else:
            for index in range(count):
                self._pass_and_draw(size, rows, index)
        return self._drafts[:count, :num_rows].t().contiguous()

    def _send(self, rows: Int32Array, room: Int32Array, size: int) -> None:
        shape, is_pinned = self._inputs.shape, self._inputs.is_cuda
        packed = torch.zeros(shape, dtype=torch.int32, pin_memory=is_pinned)
        host = packed.numpy()
        host[1, len(rows) :] = -1
        host[0, : len(rows)], host[1, : len(rows)] = rows, room
        self._inputs.copy_(packed, non_blocking=True)

    def _pass_and_draw(self, size: int, host_rows: Int32Array, index: int) -> None:
        """One pass, in a graph or not, and what the sampler makes of its logits."""
        graph = self._graphs.get(PassKey(size, index == 0))
        if graph is None:
            logits = self._forward(size, index == 0)
        else:
            graph.replay()
            assert self._logits is not None
            logits = self._logits[:size]
        num_rows, table = len(host_rows), self._table
        rows, lens = self._inputs[0, :num_rows], self._lens[:num_rows]
        tokens = self._everywhere(
            logits[:num_rows],
            lambda logits: self._sampler.draft(logits, rows, host_rows, index),
        )
        # What bars words looks at the tokens before.
        last = table.token_ids.shape[1] - 1
        at = lens.clamp(max=last)
        current = table.token_ids[rows, at]
        table.token_ids[rows, at] = torch.where(lens <= last, tokens, current)
        self._take(num_rows, index, tokens)

    # --- what graphs have in them -----------------------------------------------------------------

    def _run(self, key: GraphKey) -> None:
        size = key.num_rows
        if isinstance(key, PassKey):
            self._forward(size, key.is_first)
            return
        rows, lens = self._inputs[0, :size], self._lens[:size]
        for index in range(key.num_drafts):
            logits = self._forward(size, index == 0)
            tokens = self._everywhere(
                logits, lambda logits: self._sampler.draw(logits, rows, lens, key.kinds)
            )
            self._take(size, index, tokens)

    def _forward(self, size: int, is_first: bool) -> Tensor:
        """Logits behind the tokens so far; this rank's share."""
        table, queries = self._table, 2 if is_first else 1
        (rows, room), lens = self._inputs[:, :size], self._lens[:size]
        if is_first:  # rows that draft have two tokens at least; padding is as short as can be
            lens.copy_(table.num_tokens.index_select(0, rows).masked_fill_(room < 0, 2))
        back = torch.arange(-queries, 0, device=table.device)
        positions = (lens[:, None] + back).clamp_(0, self._longest - 1)
        known = table.token_ids[rows[:, None], positions] if is_first else self._tokens[:size]
        tables = self._blocks.index_select(0, rows)
        tables.masked_fill_(self._block_starts >= room[:, None], self._spare_block)
        slots = tables.gather(1, positions // table.block_size).long() * table.block_size
        slots += positions % table.block_size
        inputs = AttentionInputs(
            query_start=self._query_starts[queries][: size + 1],
            context_lens=(positions[:, -1] + 1).int(),
            block_tables=tables,
            slots=slots.flatten(),
            query_lens=np.full(size, queries, np.int32),
            send=table.staging.send,
            decode_queries=queries,
        )
        attention = self._attention.plan([inputs])
        step = StepContext(positions.flatten(), attention, known.flatten().long())
        hidden = self._model(step)
        if is_first:
            hidden = hidden[1::2].contiguous()
        out = None if self._logits is None else self._logits[:size]
        return self._model.logits(hidden, out=out)

    def _take(self, size: int, index: int, tokens: Tensor) -> None:
        """Go on behind these drafts, which count as far as there was room for what they follow."""
        room, lens = self._inputs[1, :size], self._lens[:size]
        counts = (lens <= room) & (lens < self._longest)
        self._drafts[index, :size] = torch.where(counts, tokens, -1)
        self._tokens[:size] = tokens
        lens += 1

    def _everywhere(self, logits: Tensor, sample: Callable[[Tensor], Tensor]) -> Tensor:
        """Ranks have the same logits; the first samples, and tells the others."""
        logits = self._of_target(self._model.lm_head.gather(logits))
        if self._parallel.size == 1:
            return sample(logits)
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        if self._parallel.rank == 0:
            tokens.copy_(sample(logits))
        self._parallel.broadcast(tokens)
        return tokens

    def _of_target(self, logits: Tensor) -> Tensor:
        """Logits of the target's tokens; of what the model does not have, none is drafted."""
        num_missing = self._vocab_size - logits.shape[1]
        if num_missing > 0:
            return F.pad(logits, (0, num_missing), value=-torch.inf)
        return logits[:, : self._vocab_size]

    # --- capture ----------------------------------------------------------------------------------

    def all_keys(self) -> list[GraphKey]:
        """What to capture, the largest first so that the others fit into its memory."""
        counts = sorted(self._counts, reverse=True)
        found: list[GraphKey] = []
        for size in reversed(self._sizes):
            found += [PassesKey(size, *rest) for rest in product(counts, reversed(KINDS))]
            found += [PassKey(size, True), PassKey(size, False)]
        return found

    @torch.inference_mode()
    def capture(self, keys: Sequence[GraphKey]) -> None:
        if self._logits is None:
            self._logits = self._model.new_logits(len(self._lens))
        self._graphs.capture(keys, self._pad, self._run)

    def _pad(self, key: GraphKey) -> None:
        """No row drafts."""
        self._inputs[0], self._inputs[1] = 0, -1

    def measure(self) -> int:
        """Bytes that capturing all graphs takes; some are captured for it, and given up again."""
        found = graph_bytes(self.all_keys(), self.capture)
        self._graphs.clear()
        return found
