"""`StepGraphs`: forward passes as CUDA graphs, captured once at start-up; `CapturedGraphs`: graphs
and their memory, of whatever shapes.

Launching the kernels of a step one by one takes the host longer than a GPU needs for some hundred
tokens. So steps of one token for each row are graphs, one per batch size, and so are steps in which
rows have several tokens, of several shapes each: requests that decode next to prompts would wait
for the launches otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.layers.attention.backend import AttentionInputs, DividedRows, GroupedAttention
from quire.layers.attention.layer import AttentionStep, StepContext
from quire.layers.attention.shared_prefix import HostPrefixTiles, PrefixTiles, max_tiles
from quire.layers.attention.triton import query_tiles
from quire.layers.expert_counts import ExpertCounter
from quire.layers.lora import AdapterLayers
from quire.layers.parallel import ONE_STAGE, Stage
from quire.models.registry import CausalLM
from quire.protocol.plan import Int32Array, StepPlan
from quire.worker.batch import slots_of
from quire.worker.memory import used_bytes
from quire.worker.rows import RowTable, StagedRows, aligned
from quire.worker.warm_up import drafted_counts

if TYPE_CHECKING:
    from quire.kernels.triton.rows import TokenTensors

PREFIX_SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Batch sizes of graphs that read a shared prefix once."""
TOKENS = (64, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Numbers of tokens to capture. From there on the GPU takes longer than the launches."""
MAX_ROWS = 256
MAX_PROMPTS = 16
"""Rows with more new tokens than decode attention takes."""
DRAFTED_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows to capture for steps in which each has a few tokens, and none has more."""
GRAPHS_MEASURED = 4
"""The largest one, and some more to learn what each further one adds."""


class DecodeKey(NamedTuple):
    """The shape of a graph for one token of each row."""

    num_tokens: int
    """One for each row."""
    shares_prefixes: bool
    """Whether a shared prefix is read once."""
    uses_adapters: bool = False


class MixedKey(NamedTuple):
    """The shape of a graph for rows with several tokens."""

    num_tokens: int
    num_rows: int
    queries: int
    """Rows with up to so many tokens are for decode attention."""
    num_prompts: int
    """Most rows with more."""
    uses_adapters: bool = False

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step. Where decode attention takes single ones, the last belongs to no
        row, and padding names it."""
        return self.num_tokens - 1 if self.queries == 1 else self.num_tokens

    @property
    def num_lines(self) -> int:
        """Most lines of logits."""
        return min(self.num_tokens, self.num_rows * self.queries)


GraphKey = DecodeKey | MixedKey
Key = TypeVar("Key", bound=Hashable)


class CapturedGraphs(dict[Key, torch.cuda.CUDAGraph]):
    """Graphs by their shapes. They share a pool of memory, which the largest one fills; the driver
    adds some for each."""

    def __init__(self) -> None:
        super().__init__()
        self._pool: Any = None

    @torch.inference_mode()
    def capture(
        self, keys: Sequence[Key], prepare: Callable[[Key], None], run: Callable[[Key], None]
    ) -> None:
        """Graphs of `run`, the largest first so that the others fit into its memory."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        for key in keys:
            prepare(key)
            run(key)  # compiles kernels and sets up libraries outside of the graph
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                run(key)
            self[key] = graph
        torch.cuda.synchronize()


def graph_bytes(keys: Sequence[Key], capture: Callable[[Sequence[Key]], None]) -> int:
    """Bytes that capturing all of `keys` takes; some are captured for it."""
    before = used_bytes()
    capture(keys[:1])
    largest = used_bytes() - before
    others = keys[1:GRAPHS_MEASURED]
    if not others:
        return largest
    capture(others)
    each = (used_bytes() - before - largest) / len(others)
    return largest + int(each * (len(keys) - 1))


def decode_keys(max_rows: int, shares_prefixes: bool) -> list[DecodeKey]:
    """What to capture, the smallest first: dense where padding would cost most, up to all rows."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)}
    sizes |= set(range(576, max_rows + 1, 64)) | {max_rows}
    keys = [DecodeKey(size, False) for size in sorted(sizes) if size <= max_rows]
    if shares_prefixes:
        sizes = {*(size for size in PREFIX_SIZES if size < max_rows), max_rows}
        keys += [DecodeKey(size, True) for size in sorted(sizes)]
    return keys


def mixed_keys(
    max_rows: int, max_tokens: int, max_queries: int, max_decode_queries: int
) -> list[MixedKey]:
    """What to capture. Steps with prompts are there twice: where many rows have a few tokens
    (drafts, tokens that a grammar forces), decode attention takes as many as it can, and the others
    cost the same. Rows have up to `max_queries` tokens when drafts are verified."""
    max_rows = min(max_rows, MAX_ROWS)
    keys = [
        MixedKey(size, min(max_rows, size // 2), queries, MAX_PROMPTS)
        for queries in sorted({1, max_decode_queries})
        for size in TOKENS
    ]
    rows = sorted({*(count for count in DRAFTED_ROWS if count < max_rows), max_rows})
    for each in drafted_counts(max_queries):
        queries = 1 << (each - 1).bit_length()
        keys += [MixedKey(count * each, count, queries, 0) for count in rows]
    return [key for key in keys if key.num_tokens // 2 < max_tokens]


class StepGraphs:
    """Owns the graphs of steps and what they work on: captures them, pads a step to the shape of
    one, and replays it.

    A graph gathers the batch from the rows itself. What it is told, row numbers and how the step is
    cut, lies in one buffer and takes one copy per replay; each graph uses the beginning of it. The
    logits that a replay leaves are valid until the next one.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: GroupedAttention,
        table: RowTable,
        max_rows: int,
        max_tokens: int,
        shares_prefixes: bool = False,
        max_queries: int = 1,
        stage: Stage = ONE_STAGE,
        expert_counter: ExpertCounter | None = None,
        adapters: AdapterLayers | None = None,
        has_logits: bool = True,
    ) -> None:
        """`max_queries` is one more than the most drafts of a row. With `adapters` each graph is
        there twice, so that steps without any have nothing of them. Without logits, all that comes
        of a step are keys and values."""
        from quire.kernels.triton.rows import RowTensors, TokenTensors

        self._model, self._attention, self._table = model, attention, table
        self._stage, self._expert_counter, self._adapters = stage, expert_counter, adapters
        decode = decode_keys(max_rows, shares_prefixes)
        most = attention.max_decode_queries
        mixed = mixed_keys(max_rows, max_tokens, min(max_queries, most), most)
        if adapters is not None:
            decode += [key._replace(uses_adapters=True) for key in decode]
            mixed += [key._replace(uses_adapters=True) for key in mixed]
        both: list[GraphKey] = [*decode, *mixed]
        self.keys = sorted(both, key=lambda key: key.num_tokens, reverse=True)
        """All graphs, the largest first so that the others fit into its memory."""
        self._decode_order = {
            kind: [key for key in decode if key[1:] == kind]
            for kind in product((False, True), repeat=2)
        }
        """By whether prefixes are shared and adapters used."""
        # The smallest first; steps that verify drafts leave graphs for single tokens to others.
        by_size = sorted(mixed, key=lambda key: (key.num_tokens, key.num_prompts, key.queries))
        self._plain_order = sorted(by_size, key=lambda key: key.queries > 1)
        self._draft_order = sorted(by_size, key=lambda key: key.queries == 1)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=table.device)

        self._parts = {key: _in_a_row(self._part_lengths(key)) for key in self.keys}
        self._inputs = ints(max(parts[-1].stop for parts in self._parts.values()))
        self._leading, *self._others = table.block_tables
        self._rows = RowTensors(table.token_ids, table.num_computed, self._leading)
        self._decode_tokens = TokenTensors.zeros(max_rows, table.device)
        self._decode_lens = ints(max_rows)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=table.device)
        most_tokens = max((key.num_tokens for key in mixed), default=0)
        most_rows = max((key.num_rows for key in mixed), default=0)
        self._mixed_tokens = TokenTensors.zeros(most_tokens, table.device)
        self._mixed_lens, self._single_tokens, self._single_lens = ints(3, aligned(most_rows + 1))
        # One for all graphs: each would keep logits of its own alive, gigabytes in all.
        self._logits: Tensor | None = None
        if stage.is_last and has_logits:
            self._logits = model.new_logits(max([max_rows, *(key.num_lines for key in mixed)]))
        # What stages send to each other does so outside of graphs, which read and leave it here.
        most = self.keys[0].num_tokens
        self._received = None if stage.is_first else model.new_hidden(most)
        self._sent = None if stage.is_last else model.new_hidden(most)
        self._graphs: CapturedGraphs[GraphKey] = CapturedGraphs()

    @property
    def max_mixed_tokens(self) -> int:
        """Most tokens of a step with prompts that is one replay."""
        mixed = (key for key in self._plain_order if key.queries == 1)
        return max((key.max_tokens for key in mixed), default=0)

    # --- capture ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def compile(self) -> None:
        """Go through one graph of each kind, so that its kernels are compiled."""
        kinds: dict[tuple[int, ...], GraphKey] = {}
        for key in self.keys:
            if isinstance(key, DecodeKey):
                kinds[key.shares_prefixes, key.uses_adapters] = key
            else:
                kinds[key.queries, key.num_prompts, key.uses_adapters] = key
        for key in kinds.values():
            self._pad(key, StepPlan(step=0))
            self._forward(key)

    @torch.inference_mode()
    def capture(self, keys: Sequence[GraphKey]) -> None:
        self._graphs.capture(keys, lambda key: self._pad(key, StepPlan(step=0)), self._forward)
        if self._adapters is not None:
            self._adapters.begin_step(None)  # it names tensors of the last graph

    def measure(self) -> int:
        """Bytes that capturing all graphs takes; some are captured for it."""
        return graph_bytes(self.keys, self.capture)

    # --- pad --------------------------------------------------------------------------------------

    def _part_lengths(self, key: GraphKey) -> tuple[int, ...]:
        """Of what a graph is told; see `_pad`."""
        if isinstance(key, DecodeKey):
            size, width = key.num_tokens, self._attention.prefix_members
            if not key.shares_prefixes:
                return (size,)
            tiles = max_tiles(size, width)
            return size, size, tiles, tiles * width
        rows, tiles = key.num_rows, 0
        if key.num_prompts:
            tiles = -(-key.num_tokens // self._attention.tile_queries) + key.num_prompts
        return rows + 1, rows + 2, key.num_lines, tiles, tiles

    def _pad(self, key: GraphKey, plan: StepPlan, prefixes: HostPrefixTiles | None = None) -> None:
        """Send what a graph is told of a step, padded with what does nothing."""
        length = self._parts[key][-1].stop
        packed = torch.empty(length, dtype=torch.int32, pin_memory=self._inputs.is_cuda)
        host = packed.numpy()
        rows, *others = (host[part] for part in self._parts[key])
        rows[: len(plan.rows)], rows[len(plan.rows) :] = plan.rows, -1
        if isinstance(key, MixedKey):
            self._pad_mixed(key, plan, *others)
        elif key.shares_prefixes:
            _pad_prefixes(prefixes, *others)
        self._inputs[:length].copy_(packed, non_blocking=True)

    def _pad_mixed(
        self,
        key: MixedKey,
        plan: StepPlan,
        starts: Int32Array,
        lines: Int32Array,
        tile_requests: Int32Array,
        tile_indices: Int32Array,
    ) -> None:
        """Of N requests and one more, which stands for unused tiles and has no query and a context
        of one token: the first tokens of N + 2 requests, the tokens whose logits are wanted, and
        tiles."""
        num_rows, counts, wanted = len(plan.rows), plan.num_new_tokens, plan.line_tokens
        starts[0] = 0
        starts[1 : num_rows + 1] = np.cumsum(counts)
        starts[num_rows + 1 :] = counts.sum()
        lines[: len(wanted)], lines[len(wanted) :] = wanted, key.num_tokens - 1
        if key.num_prompts:
            requests, indices = query_tiles(counts, self._attention.tile_queries, key.queries)
            tile_requests[: len(requests)] = requests
            tile_requests[len(requests) :] = key.num_rows
            tile_indices[: len(indices)], tile_indices[len(indices) :] = indices, 0

    # --- forward ----------------------------------------------------------------------------------

    def _forward(self, key: GraphKey) -> None:
        if isinstance(key, DecodeKey):
            self._forward_decode(key)
        else:
            self._forward_mixed(key)

    def _forward_decode(self, key: DecodeKey) -> None:
        from quire.kernels.triton.rows import gather_decode

        size, block_size = key.num_tokens, self._table.block_size
        tokens, lens = self._decode_tokens.first(size), self._decode_lens[:size]
        rows, *tiles = (self._inputs[part] for part in self._parts[key])
        gather_decode(rows, self._rows, block_size, tokens, lens)
        used = rows.clamp(min=0)
        slots = [tokens.slots]
        for blocks in self._others:
            found = slots_of(blocks, used, tokens.positions, block_size)
            slots.append(torch.where(tokens.slots < 0, tokens.slots, found))
        prefixes = None
        if key.shares_prefixes:
            starts, shared, members = tiles
            width = self._attention.prefix_members
            prefixes = PrefixTiles(starts, shared, members.view(len(shared), width))
        attention = self._attention.plan(
            [
                AttentionInputs(
                    query_start=self._query_start[:size],
                    context_lens=lens,
                    block_tables=blocks.index_select(0, used),
                    slots=own,
                    query_lens=np.ones(size, np.int32),
                    send=self._table.staging.send,
                    prefixes=prefixes,
                )
                for blocks, own in zip((self._leading, *self._others), slots, strict=True)
            ]
        )
        if self._adapters is not None:
            adapters = self._adapter_slots(key, used, tokens)
            self._adapters.begin_step(adapters, adapters)
        hidden = self._run_model(tokens, attention, size)
        if self._logits is not None:
            self._model.logits(hidden, out=self._logits[:size])

    def _forward_mixed(self, key: MixedKey) -> None:
        from quire.kernels.triton.rows import gather_mixed

        tokens, num_rows = self._mixed_tokens.first(key.num_tokens), key.num_rows
        rows, starts, lines, *tiles = (self._inputs[part] for part in self._parts[key])
        gather_mixed(
            rows[:num_rows],
            starts,
            self._rows,
            self._table.block_size,
            tokens,
            self._mixed_lens,
            (self._single_tokens, self._single_lens) if key.queries == 1 else None,
        )
        inputs = [self._attention_inputs(key, self._leading, tokens.slots, rows, starts, tiles)]
        if self._others or key.uses_adapters:
            places = torch.arange(key.num_tokens, dtype=torch.int32, device=rows.device)
            requests = torch.searchsorted(starts[1 : num_rows + 1], places, right=True)
            rows_of = rows[:num_rows].index_select(0, requests.clamp(max=num_rows - 1)).clamp(min=0)
            for blocks in self._others:
                found = slots_of(blocks, rows_of, tokens.positions, self._table.block_size)
                slots = torch.where(tokens.slots < 0, tokens.slots, found)
                inputs.append(self._attention_inputs(key, blocks, slots, rows, starts, tiles))
        attention = self._attention.plan(inputs)
        if self._adapters is not None:
            adapters = self._adapter_slots(key, rows_of, tokens) if key.uses_adapters else None
            self._adapters.begin_step(
                adapters, None if adapters is None else adapters.index_select(0, lines)
            )
        hidden = self._run_model(tokens, attention, key.num_tokens)
        if self._logits is not None:
            self._model.logits(hidden.index_select(0, lines), out=self._logits[: len(lines)])

    def _adapter_slots(self, key: GraphKey, rows_of: Tensor, tokens: TokenTensors) -> Tensor | None:
        """Of each token, given its row; -1 also for tokens that only fill the graph up."""
        if not key.uses_adapters:
            return None
        slots = self._table.adapter_slots.index_select(0, rows_of)
        return torch.where(tokens.slots < 0, -1, slots)

    def _run_model(
        self, tokens: TokenTensors, attention: tuple[AttentionStep, ...], num_tokens: int
    ) -> Tensor:
        given = None if self._received is None else self._received[:num_tokens]
        step = StepContext(tokens.positions, attention, tokens.ids, hidden=given)
        hidden: Tensor = self._model(step)
        if self._expert_counter is not None:
            self._expert_counter.take(tokens.slots >= 0)
        if self._sent is not None:
            self._sent[:num_tokens] = hidden
        return hidden

    def _attention_inputs(
        self,
        key: MixedKey,
        blocks: Tensor,
        slots: Tensor,
        rows: Tensor,
        starts: Tensor,
        tiles: list[Tensor],
    ) -> AttentionInputs:
        count, divided = key.num_rows, None
        if key.queries == 1:
            single = (self._single_tokens[:count], self._single_lens[:count])
            divided = DividedRows(*single, *tiles)
        elif key.num_prompts:
            divided = DividedRows(starts[: count + 1], self._mixed_lens[:count], *tiles)
        num_requests = count + (divided is not None)  # with the one for unused tiles
        rows = rows[:num_requests]
        return AttentionInputs(
            query_start=starts[: num_requests + 1],
            context_lens=self._mixed_lens[:num_requests],
            block_tables=blocks.index_select(0, rows.clamp(min=0)),
            slots=slots,
            query_lens=np.full(count, key.queries, np.int32),
            send=self._table.staging.send,
            divided=divided,
            decode_queries=key.queries,
        )

    # --- replay -----------------------------------------------------------------------------------

    def replay(
        self,
        plan: StepPlan,
        staged: StagedRows,
        prefixes: HostPrefixTiles | None,
        uses_adapters: bool = False,
    ) -> Tensor | None:
        """The step's lines of logits, or before the last stage the hidden states that were sent;
        None where no graph fits."""
        if uses_adapters and self._adapters is None:
            return None
        key = self.launch(plan, prefixes, uses_adapters)
        if key is None:
            return None
        if self._sent is not None:
            sent = self._sent[: plan.num_tokens]
            self._stage.send(sent)
            return sent
        assert self._logits is not None
        if isinstance(key, MixedKey):
            return self._logits[: int(plan.num_samples.sum())]
        logits = self._logits[: len(plan.rows)]
        return logits if plan.samples.all() else logits[staged.samples]

    def launch(
        self,
        plan: StepPlan,
        prefixes: HostPrefixTiles | None = None,
        uses_adapters: bool = False,
    ) -> GraphKey | None:
        """Replay the graph that a step fits into, if any."""
        key = self.find(plan, prefixes, uses_adapters)
        if key is None:
            return None
        self._pad(key, plan, prefixes)
        if self._received is not None:
            self._stage.receive(self._received[: plan.num_tokens])
        self._graphs[key].replay()
        return key

    def find(
        self,
        plan: StepPlan,
        prefixes: HostPrefixTiles | None = None,
        uses_adapters: bool = False,
    ) -> GraphKey | None:
        """The graph that a step fits into, if any."""
        num_rows = len(plan.rows)
        if plan.num_tokens == num_rows:
            keys = self._decode_order[prefixes is not None, uses_adapters]
            return next((key for key in keys if key.num_tokens >= num_rows), None)
        return self._find_mixed(plan, uses_adapters) if prefixes is None else None

    def _find_mixed(self, plan: StepPlan, uses_adapters: bool) -> MixedKey | None:
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        num_lines = int(plan.num_samples.sum())
        prompts: dict[int, int] = {}
        for key in self._draft_order if plan.has_drafts else self._plain_order:
            if key.uses_adapters != uses_adapters:
                continue
            if num_tokens > key.max_tokens or num_rows > key.num_rows or num_lines > key.num_lines:
                continue
            if key.queries not in prompts:
                prompts[key.queries] = int((plan.num_new_tokens > key.queries).sum())
            if prompts[key.queries] <= key.num_prompts:
                return key
        return None


def _in_a_row(lengths: tuple[int, ...]) -> list[slice]:
    """Parts of a buffer, aligned as `Staging` aligns them, so that graphs and other steps run the
    same kernels."""
    parts, start = [], 0
    for length in lengths:
        parts.append(slice(start, start + length))
        start += aligned(length)
    return parts


def _pad_prefixes(
    prefixes: HostPrefixTiles | None, starts: Int32Array, lens: Int32Array, members: Int32Array
) -> None:
    """Where rows begin behind what they share, and the tiles of that: the beginning of each part
    is used, and a tile without length does nothing."""
    starts[:] = 0
    lens[:] = 0
    for part, values in zip((starts, lens, members), prefixes or (), strict=False):
        part[: values.size] = values.ravel()
