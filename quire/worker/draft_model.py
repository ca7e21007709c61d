"""`DraftModel`: another model that drafts, whose KV lies in the same blocks as the target's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.config.model import ModelConfig, load_model_config
from quire.config.options import EngineOptions
from quire.config.speculative import SpeculativeConfig
from quire.decoding.sampler import Sampler
from quire.layers.attention.backend import AttentionInputs, GroupedAttention, select_backend
from quire.layers.attention.layer import StepContext, bind_kv_groups
from quire.models.loader import count_weight_bytes, load_model
from quire.models.registry import CausalLM
from quire.protocol.errors import OptionError
from quire.protocol.kv_spec import KVLayout, KVSpec
from quire.protocol.plan import AddedRow, Int32Array, Int64Array, StepPlan
from quire.worker.batch import slots_of
from quire.worker.kv_tensors import KVTensors
from quire.worker.rows import RowTable


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
    models: list[CausalLM] = field(default_factory=list)
    """The model, once it is loaded."""

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        target: ModelConfig,
        layout: KVLayout,
        wanted: SpeculativeConfig,
    ) -> DraftSource:
        """Refuses a model that cannot draft for the target; no weight is read."""
        config = load_model_config(
            wanted.model,
            token=options.model.hf_token,
            load_format=options.model.load_format,
            download_dir=options.model.download_dir,
        )
        if config.vocab_size != target.vocab_size:
            raise OptionError(
                f"speculative_config['model']={wanted.model!r} has a vocabulary of "
                f"{config.vocab_size} tokens, {target.source.name} one of {target.vocab_size}; use "
                "a smaller model of the same family."
            )
        if None not in layout.windows:
            raise OptionError(
                f"speculative_config: all layers of {target.source.name} have windows, whose "
                "blocks are let go of; use method 'ngram' or 'auto'."
            )
        quantization = wanted.quantization
        is_gguf = config.source.kind == "gguf"
        if quantization is None and is_gguf and options.device.device == "cpu":
            quantization = "gguf"
        spec = KVSpec(config.num_kv_heads, config.head_dim, options.cache.kv_cache_dtype)
        own = KVLayout.of([spec] * config.num_layers, layout.block_size)
        longest = min(
            wanted.max_model_len or config.max_position_tokens, config.max_position_tokens
        )
        return cls(config, own, options, quantization, layout.windows.index(None), longest)

    def count_weight_bytes(self, dtype: torch.dtype, device: torch.device) -> int:
        return count_weight_bytes(
            self.config,
            dtype=dtype,
            device=device,
            load_format=self.options.model.load_format,
            quantization=self.quantization,
        )

    def load(self, dtype: torch.dtype, device: torch.device) -> None:
        model = load_model(
            self.config,
            dtype=dtype,
            device=device,
            load_format=self.options.model.load_format,
            seed=self.options.model.seed,
            quantization=self.quantization,
            max_model_len=self.options.model.max_model_len,
        )
        bind_kv_groups(model, self.layout.groups)
        self.models = [model]

    def build(
        self, table: RowTable, sampler: Sampler, num_blocks: int, num_drafts: int, max_tokens: int
    ) -> DraftModel:
        """The drafter for these rows, whose cache has so many blocks."""
        (model,), spec = self.models, self.layout.specs[0]
        kv = KVTensors(self.layout, num_blocks, table.device)
        backend, _ = select_backend(
            table.device.type,
            model.dtype,
            spec.head_dim,
            self.layout.block_size,
            wanted=self.options.device.attention_backend,
            cache_dtype=getattr(torch, spec.torch_dtype),
        )
        heads = self.config.num_heads
        attention = backend(
            kv.data, heads, spec.num_kv_heads, spec.head_dim, self.layout.block_size
        )
        return DraftModel(
            model, GroupedAttention([attention]), table, sampler, self, num_drafts, max_tokens
        )


class DraftModel:
    """Drafts by sampling: with the settings and the random numbers that the target samples the same
    position with, so that the two agree most often. On a CPU.

    It has a computed length of its own for each row, 0 at first, and catches up when it is asked;
    it writes the same into blocks that rows share. Rows that are too far behind for a step's tokens
    have no drafts yet. Tokens that it drafted are computed again once they are known: the host may
    have taken their blocks back.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: GroupedAttention,
        table: RowTable,
        sampler: Sampler,
        source: DraftSource,
        num_drafts: int,
        max_tokens: int,
    ) -> None:
        """Drafts for the rows of `table`, computing `max_tokens` in a step at most."""
        self._model, self._attention = model, attention
        self._table, self._sampler = table, sampler
        self._kv_group = source.kv_group
        self._num_drafts, self._max_tokens = num_drafts, max_tokens
        max_rows, longest = table.token_ids.shape
        self._longest = min(longest, source.longest)
        self._num_computed = np.zeros(max_rows, np.int32)
        self._num_blocks = np.zeros(max_rows, np.int32)
        """Blocks that the host has given to each row; it takes none back that drafts are written
        to."""
        self._wanted = np.zeros(max_rows, np.bool_)

    def update(self, plan: StepPlan) -> None:
        """Follow the rows of a plan, before its step."""
        for added in plan.added_rows:
            self._num_computed[added.row] = 0
            self._num_blocks[added.row] = added.num_forked_tokens // self._table.block_size
            self._wanted[added.row] = wants_drafts(added)
        own = plan.block_groups == self._kv_group
        np.maximum.at(self._num_blocks, plan.block_rows[own], plan.block_indices[own] + 1)
        rows, lengths = plan.cut_rows, plan.cut_lengths
        self._num_computed[rows] = np.minimum(self._num_computed[rows], lengths - 1)

    def accepted(self, rows: Tensor, counts: Tensor | None) -> None:
        """What was accepted is computed when the next drafts are."""

    def propose(self, rows: Tensor) -> Tensor:
        drafts = torch.full((len(rows), self._num_drafts), -1, dtype=torch.int32)
        host_rows = rows.numpy()
        places = np.flatnonzero(self._wanted[host_rows])
        known = self._table.num_tokens.numpy()[host_rows[places]]
        # What is drafted is computed too, but for the last token. Where blocks are short, a row has
        # none for that.
        room = self._num_blocks[host_rows[places]] * self._table.block_size
        fits = known + self._num_drafts <= np.minimum(room + 1, self._longest)
        places, known = places[fits], known[fits]
        missing = known - self._num_computed[host_rows[places]]
        granted = np.clip(self._max_tokens - (np.cumsum(missing) - missing), 0, missing)
        behind = granted < missing
        self._compute(host_rows[places[behind]], granted[behind])
        places, granted = places[~behind], granted[~behind]
        drafting, counts = host_rows[places], granted.astype(np.int32)
        if not len(drafting):
            return drafts
        logits = self._compute(drafting, counts)
        self._num_computed[drafting] -= 1  # the target has no block for the last one yet
        on_device = torch.from_numpy(drafting)
        known_tokens = self._table.num_tokens[on_device].long()
        ones = np.ones(len(drafting), np.int32)
        for i in range(self._num_drafts):
            tokens = self._sampler.draft(logits, on_device, drafting, i)
            drafts[places, i] = tokens
            self._table.token_ids[on_device, known_tokens + i] = tokens
            if i + 1 < self._num_drafts:
                logits = self._forward(drafting, ones, known_tokens.numpy() + i)
        return drafts

    def _compute(self, rows: Int32Array, counts: Int32Array) -> Tensor:
        """Compute the next `counts` known tokens of `rows`; logits behind the last of each."""
        rows, counts = rows[counts > 0], counts[counts > 0].astype(np.int32)
        if not len(rows):
            return torch.empty(0)
        first = self._num_computed[rows].astype(np.int64)
        self._num_computed[rows] += counts
        return self._forward(rows, counts, first)

    def _forward(self, host_rows: Int32Array, counts: Int32Array, first: Int64Array) -> Tensor:
        """The model over `counts` tokens of each row from place `first` on."""
        table, ends = self._table, np.cumsum(counts)
        row_of = torch.from_numpy(np.repeat(host_rows, counts).astype(np.int64))
        offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        positions = torch.from_numpy(np.repeat(first, counts) + offsets)
        blocks = table.block_tables[self._kv_group]
        query_start = torch.zeros(len(counts) + 1, dtype=torch.int32)
        query_start[1:] = torch.from_numpy(ends)
        inputs = AttentionInputs(
            query_start=query_start,
            context_lens=torch.from_numpy((first + counts).astype(np.int32)),
            block_tables=blocks[torch.from_numpy(host_rows)],
            slots=slots_of(blocks, row_of, positions, table.block_size),
            query_lens=counts,
            send=table.staging.send,
        )
        token_ids = table.token_ids[row_of, positions].long()
        step = StepContext(positions, self._attention.plan([inputs]), token_ids)
        hidden = self._model(step)
        return self._model.logits(hidden[torch.from_numpy(ends - 1)])


def wants_drafts(added: AddedRow) -> bool:
    """Whether the scheduler may verify drafts of a row."""
    params = added.params
    return params.speculation and added.appends_sampled and added.pooling is None
