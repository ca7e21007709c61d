"""`DraftModel`: another model that drafts, whose KV lies in the same blocks as the target's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.config.draft import draft_config
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.speculative import Schedule, SpeculativeConfig, scheduled_drafts
from quire.decoding.sampler import Sampler
from quire.decoding.speculative.ngram import NgramDrafter
from quire.layers.attention.backend import (
    AttentionBackend,
    GroupedAttention,
    select_backend,
)
from quire.layers.attention.layer import Attention, StepContext
from quire.layers.experts import Experts
from quire.layers.parallel import Parallel
from quire.models.loader import ONE_RANK, count_weight_bytes, held_weight_bytes, load_model
from quire.models.registry import CausalLM
from quire.protocol.errors import OptionError
from quire.protocol.kv_spec import FLOAT8, KVLayout, KVSpec
from quire.protocol.plan import AddedRow, BoolArray, Int32Array, StepPlan, empty_ints
from quire.worker.batch import StepTokens
from quire.worker.draft_passes import DraftPasses
from quire.worker.graphs import StepGraphs
from quire.worker.kv_tensors import KVTensors
from quire.worker.memory import MIB
from quire.worker.rows import RowTable

MAX_LAG = 16
"""Tokens that a request without speculation generates before they are computed together."""
MAX_TOTAL_LAG = 512
"""The same of all such requests."""


@dataclass
class DraftSource:
    """A draft model before it drafts: configuration, weights, and KV beside the target's."""

    config: ModelConfig
    layout: KVLayout
    options: EngineOptions
    quantization: str | None
    kv_group: int
    """Of the target: the one whose blocks have the drafts' KV too."""
    longest: int
    """Tokens of a text that it drafts for."""
    num_drafts: int
    schedule: Schedule
    vocab_size: int
    """Of the target; the model may know some tokens more or fewer."""
    target_ranks: Parallel
    parallel: Parallel
    """How it is divided: as the target is, or each rank has the whole."""
    models: list[CausalLM] = field(default_factory=list)
    """The model, once it is loaded."""

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        target: ModelConfig,
        layout: KVLayout,
        wanted: SpeculativeConfig,
        target_ranks: Parallel,
    ) -> DraftSource:
        """Refuses a model that cannot draft for the target; no weight is read."""
        config = draft_config(options, wanted)
        if None not in layout.windows:
            raise OptionError(
                f"speculative_config: all layers of {target.source.name} have windows, whose "
                "blocks are let go of; use method 'ngram', or 'auto' without a model."
            )
        quantization = wanted.quantization
        is_gguf = config.source.kind == "gguf"
        if quantization is None and is_gguf and options.device.device == "cpu":
            quantization = "gguf"
        parallel = ONE_RANK if wanted.num_ranks == 1 else target_ranks
        dtype = options.cache.kv_cache_dtype
        spec = KVSpec(
            parallel.heads(config.num_heads, config.num_kv_heads).kv_count,
            config.head_dim,
            options.model.dtype if dtype in FLOAT8 else dtype,
            is_latent=config.latent is not None,
        )
        longest = config.max_position_tokens
        return cls(
            config,
            KVLayout.of([spec] * config.num_layers, layout.block_size),
            options,
            quantization,
            layout.windows.index(None),
            min(wanted.max_model_len or longest, longest),
            wanted.num_tokens,
            wanted.schedule,
            target.vocab_size,
            target_ranks,
            parallel,
        )

    def count_weight_bytes(self, dtype: torch.dtype, device: torch.device) -> int:
        return count_weight_bytes(
            self.config,
            dtype=dtype,
            device=device,
            load_format=self.options.model.load_format,
            parallel=self.parallel,
            quantization=self.quantization,
        )

    def count_ahead_bytes(self, max_rows: int) -> int:
        """KV beside that of the blocks of the cache: a block for all that has none."""
        return self.layout.bytes_per_block

    def load(self, dtype: torch.dtype, device: torch.device) -> None:
        model = load_model(
            self.config,
            dtype=dtype,
            device=device,
            load_format=self.options.model.load_format,
            parallel=self.parallel,
            seed=self.options.model.seed,
            quantization=self.quantization,
            max_model_len=self.options.model.max_model_len,
        )
        for module in model.modules():
            if isinstance(module, Attention):  # what is behind a window is kept all the same
                index = module.layer_index
                module.bind(0, index, self.config.layer_window(index))
        if self.config.vocab_size < self.vocab_size:
            model.register_forward_pre_hook(partial(_name_known_tokens, self.config.vocab_size - 1))
        self.models = [model]

    @property
    def counts(self) -> list[int]:
        """How many drafts of a row may be asked for."""
        scheduled = {count for _, _, count in self.schedule}
        return sorted({self.num_drafts, *scheduled} - {0})

    def describe(self, num_blocks: int) -> str:
        """For the log."""
        (model,), ranks = self.models, self.target_ranks.size
        weights = held_weight_bytes(model) / MIB
        cache = (num_blocks + 1) * self.layout.bytes_per_block / MIB
        divided = "" if ranks == 1 else ", divided" if self.parallel.size > 1 else ", whole"
        where = "" if ranks == 1 else f" on each of {ranks} ranks{divided}"
        return (
            f"draft model: {self.config.source.name}, up to {self.num_drafts} drafts of texts of "
            f"up to {self.longest:,} tokens; {weights:,.0f} MiB of weights and {cache:,.0f} MiB of "
            f"KV in the target's blocks{where}"
        )

    def build(self, table: RowTable, sampler: Sampler, num_blocks: int) -> DraftModel:
        """The drafter for these rows, whose cache has so many blocks."""
        (model,) = self.models
        kv = KVTensors(self.layout, num_blocks + 1, table.device)
        heads = self.parallel.heads(self.config.num_heads, self.config.num_kv_heads)
        attention = self._select_backend(table.device, model.dtype)(
            kv.data,
            heads.count,
            heads.kv_count,
            self.config.head_dim,
            self.layout.block_size,
            None,
            self.config.latent,
        )
        return DraftModel(self, model, GroupedAttention([attention]), kv, table, sampler)

    def _select_backend(self, device: torch.device, dtype: torch.dtype) -> type[AttentionBackend]:
        spec = self.layout.specs[0]
        windows = (self.config.layer_window(layer) for layer in range(self.config.num_layers))
        backend, _ = select_backend(
            device.type,
            dtype,
            spec.head_dim,
            self.layout.block_size,
            next((window for window in windows if window is not None), None),
            wanted=self.options.device.attention_backend,
            cache_dtype=getattr(torch, spec.torch_dtype),
            is_latent=spec.is_latent,
        )
        return backend


class DraftModel:
    """Drafts by sampling: with the settings and the random numbers that the target samples the same
    position with, so that the two agree most often.

    Its keys and values lie in the row's blocks, as the target's do, up to the length that the
    target has computed: so they are there whenever the target's are, in blocks that are shared,
    forked, copied and found again. Where a row drafts in one step after the other, `DraftPasses`
    compute what it was given in between. Other tokens are computed behind the step in which the
    target has computed them, with two exceptions. Those that are generated without drafts are put
    off: some are computed together, at the latest before others can find them. Those of rows for
    which a plan has no blocks are left out, and others may find them without this model's KV: they
    are made up for when a later plan has blocks for the row. Nothing here waits for the device.
    """

    def __init__(
        self,
        source: DraftSource,
        model: CausalLM,
        attention: GroupedAttention,
        kv: KVTensors,
        table: RowTable,
        sampler: Sampler,
    ) -> None:
        """The last block of `kv` belongs to no row."""
        self._model, self._attention, self.kv = model, attention, kv
        self._table, self._own = table, table.beside(source.kv_group)
        (self._blocks,) = self._own.block_tables
        self._num_drafts, self._schedule = source.num_drafts, source.schedule
        self._target_ranks, self._is_whole = source.target_ranks, source.parallel.size == 1
        max_rows, longest = table.token_ids.shape
        self._last_position = source.config.max_position_tokens - 1
        self.passes = DraftPasses(
            model,
            attention,
            table,
            self._blocks,
            sampler,
            source.parallel,
            source.counts,
            source.vocab_size,
            min(longest, source.longest),
            kv.num_blocks - 1,
        )
        waits = any(isinstance(one, Experts) and one.waits_for_device for one in model.modules())
        ranks = source.parallel
        self.is_capturable = (
            all(backend.support.cuda_graphs for backend in attention.backends)
            and attention.max_decode_queries > 1
            and ranks.is_capturable
            and not waits
        )
        """Whether its work can be CUDA graphs."""
        self.graphs: StepGraphs | None = None
        """Of what no passes compute."""
        self._wanted = np.zeros(max_rows, np.bool_)
        self._has_passed = np.zeros(max_rows, np.bool_)
        """Whether the passes of the last step that a row was in computed it."""
        self._decodes = np.zeros(max_rows, np.bool_)
        """Whether a row has sampled: from then on others find what it computes when it has gone."""
        self._missing, self._least = np.zeros((2, max_rows), np.int32)
        """Tokens that the target has computed and this model has not, as if all drafts in these
        steps were accepted; and how many the target has computed at least."""
        self._is_put_off = np.zeros(max_rows, np.bool_)
        """Whether what a row lacks was put off, and not left out."""
        self.text: NgramDrafter | None = None
        """Drafts for rows that no passes draft for."""
        self.num_repeated: Tensor | None = None
        """How many drafts that has found for each row that sampled."""
        self._others: StepPlan | None = None
        """Of the step, what no passes compute."""
        self._rows, self._places, self._room = empty_ints(), empty_ints(), empty_ints()
        """Those that draft behind the step, which they are of the rows that sample, and the tokens
        that their blocks have room for; the host takes none of these back meanwhile."""
        self._count = 0

    # --- before the engine is ready ---------------------------------------------------------------

    def capture(self, max_tokens: int) -> None:
        self.passes.capture(self.passes.all_keys())
        if (graphs := self._build_graphs(max_tokens)) is not None:
            graphs.capture(graphs.keys)
            self.graphs = graphs

    def measure(self, max_tokens: int) -> int:
        """Bytes that `capture` takes."""
        graphs = self._build_graphs(max_tokens)
        return self.passes.measure() + (0 if graphs is None else graphs.measure())

    def _build_graphs(self, max_tokens: int) -> StepGraphs | None:
        """For steps of up to so many tokens; None where a text may have positions that the model
        does not know."""
        max_rows, longest = self._table.token_ids.shape
        if longest > self._last_position + 1:
            return None
        model, attention = self._model, self._attention
        return StepGraphs(model, attention, self._own, max_rows, max_tokens, has_logits=False)

    # --- a step -----------------------------------------------------------------------------------

    def settle(self, plan: StepPlan) -> None:
        """Compute what was put off of rows that others may go on from, or that are cut."""
        if not self._is_put_off.any():
            return
        forked = [added.fork_of for added in plan.added_rows if added.fork_of >= 0]
        going = plan.freed_rows, plan.drained_rows, plan.cut_rows
        rows = np.unique(np.concatenate((*going, forked)).astype(np.int32))
        rows = rows[self._is_put_off[rows]]
        if len(rows):
            self._compute(self._plan(rows, np.zeros_like(rows)))

    def update(self, plan: StepPlan) -> None:
        """Follow the rows of a plan, before its step moves their lengths."""
        for added in plan.added_rows:
            self._has_passed[added.row] = self._decodes[added.row] = False
            self._missing[added.row], self._least[added.row] = 0, added.num_computed_tokens
            self._is_put_off[added.row] = False
            self._wanted[added.row] = wants_drafts(added)
        # These have become shorter, or longer by more than what passes compute.
        self._has_passed[plan.cut_rows] = False
        self._has_passed[plan.append_rows] = False
        if len(cuts := plan.cut_rows):
            self._least[cuts] = np.minimum(self._least[cuts], plan.cut_lengths - 1)
        rows, samples, counts = plan.rows, plan.samples, plan.num_new_tokens
        num_sampling = int(np.count_nonzero(samples))
        self._count = scheduled_drafts(self._schedule, num_sampling, self._num_drafts)
        # Steps of the warm-up say nothing of blocks.
        num_blocks = plan.num_blocks if len(plan.num_blocks) else np.zeros_like(rows)
        left_out = (num_blocks == 0) & (len(plan.num_blocks) > 0)
        drafting = samples & self._wanted[rows] & (self._count > 0) & ~left_out
        put_off = self._put_off(plan, left_out)
        self._decodes[rows] |= samples
        now = np.where(left_out | put_off, 0, counts)
        # Of a row that is left out from now on, others may find what was put off before.
        others = (now > 0) & ~(drafting & self._has_passed[rows])
        others |= left_out & self._is_put_off[rows]
        self._others = self._plan(rows[others], now[others]) if others.any() else None
        self._missing[rows] += counts - now
        self._least[rows] += counts - np.maximum(plan.num_samples - 1, 0)
        self._is_put_off[rows] = put_off
        self._has_passed[rows] = drafting
        self._rows = rows[drafting]
        self._room = num_blocks[drafting] * self._table.block_size
        self._places = np.flatnonzero(drafting[samples]).astype(np.int32)

    def _put_off(self, plan: StepPlan, left_out: BoolArray) -> BoolArray:
        """Rows of a plan whose token is computed later, together with others of theirs."""
        rows = plan.rows
        may = self._decodes[rows] & ~self._wanted[rows] & ~left_out
        may &= plan.num_new_tokens == plan.samples
        lag = self._missing[rows[may]] + 1
        is_much = lag.max(initial=0) >= MAX_LAG or lag.sum() >= MAX_TOTAL_LAG
        return np.zeros_like(may) if is_much else may

    def accepted(self, rows: Tensor, counts: Tensor | None) -> None:
        """Behind drafts that were rejected nothing of use is computed, and it is overwritten before
        it is read. The same is true of all beyond the length that is drafted for."""
        if self._others is not None:
            self._compute(self._others)

    def _plan(self, rows: Int32Array, counts: Int32Array) -> StepPlan:
        """To compute so many next tokens of rows, and what they lack before these."""
        own, missing = self._own, np.minimum(self._missing[rows], self._least[rows])
        own.num_computed.copy_(self._table.num_computed)
        if missing.any():
            sent_rows, sent = own.staging.send(rows, missing)
            own.num_computed.index_add_(0, sent_rows, sent, alpha=-1)
        self._missing[rows], self._is_put_off[rows] = 0, False
        counts = missing + counts
        return StepPlan(0, rows=rows, num_new_tokens=counts, num_samples=np.zeros_like(rows))

    def _compute(self, plan: StepPlan) -> None:
        if self.graphs is not None and self.graphs.launch(plan):
            return
        table = self._own
        tokens, _ = StepTokens.gather(table, plan.rows, plan.num_new_tokens)
        attention = self._attention.plan([tokens.attention(table, self._blocks)])
        positions = tokens.positions.clamp(max=self._last_position)
        token_ids = table.token_ids[tokens.row_of, tokens.positions].long()
        self._model(StepContext(positions, attention, token_ids))

    def propose(self, rows: Tensor) -> Tensor:
        if self.text is None:
            shape = (len(rows), self._num_drafts)
            drafts = torch.full(shape, -1, dtype=torch.int32, device=rows.device)
        else:
            drafts = self.text.propose(rows)
            self.num_repeated = (drafts >= 0).sum(1, dtype=torch.int32)
        if not len(self._rows):
            return drafts
        found = self.passes.propose(self._rows, self._room, self._count)
        if self._is_whole:  # on each rank, which must not drift apart
            self._target_ranks.broadcast(found)
        places = self._table.staging.send(self._places)[0].long()
        drafts[places] = -1
        drafts[places, : self._count] = found
        return drafts


def wants_drafts(added: AddedRow) -> bool:
    """Whether the scheduler may verify drafts of a row."""
    params = added.params
    return params.speculation and added.appends_sampled and added.pooling is None


def _name_known_tokens(last: int, model: object, given: tuple[StepContext, ...]) -> Any:
    """In place of tokens that a model does not have its last one, which is padding as a rule."""
    (step,) = given
    assert step.token_ids is not None
    return (replace(step, token_ids=step.token_ids.clamp(max=last)),)
