"""`HeadDrafter`: an EAGLE-3 or MTP head that drafts, whose KV lies in the target's blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from quire.config.draft import eagle3_config, mtp_config
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.speculative import Schedule, SpeculativeConfig, scheduled_drafts
from quire.decoding.sampler import Sampler
from quire.layers.attention.backend import AttentionInputs, GroupedAttention, select_backend
from quire.layers.attention.layer import StepContext
from quire.layers.decoder import BEHIND_NORM, KeptStreams
from quire.layers.parallel import Parallel
from quire.loading.weights import stored_tensors
from quire.models.draft_head import DraftHead, keep_streams
from quire.models.llama import LlamaForCausalLM
from quire.models.loader import check_tensors, count_weight_bytes, load_model
from quire.models.registry import CausalLM, model_class
from quire.protocol.errors import OptionError
from quire.protocol.kv_spec import FLOAT8, KVLayout, KVSpec
from quire.protocol.plan import Int32Array, StepPlan
from quire.worker.batch import StepTokens, slots_of
from quire.worker.draft_model import wants_drafts
from quire.worker.kv_tensors import KVTensors
from quire.worker.rows import RowTable


@dataclass
class HeadSource:
    """A head before it drafts: configuration, weights, and KV beside the target's."""

    config: ModelConfig
    layout: KVLayout
    options: EngineOptions
    quantization: str | None
    kv_group: int
    """Of the target: the one whose blocks have the head's KV too."""
    layers: tuple[int, ...]
    """Of the target, whose residual streams the head reads."""
    target_hidden_size: int
    num_drafts: int
    schedule: Schedule
    drafts_until: int | None
    """Tokens of a text that it drafts for."""
    parallel: Parallel
    heads: list[DraftHead] = field(default_factory=list)
    """The head, once it is loaded."""
    streams: list[KeptStreams] = field(default_factory=list)
    """What the target leaves for it."""

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        target: ModelConfig,
        layout: KVLayout,
        wanted: SpeculativeConfig,
        parallel: Parallel,
    ) -> HeadSource:
        """Refuses a head that cannot draft for the target; no weight is read."""
        name = target.source.name
        if not issubclass(model_class(target.architecture), LlamaForCausalLM):
            raise OptionError(
                f"speculative_config: method {wanted.method!r} needs the residual streams of "
                f"{name}, which {target.architecture} does not give; use method 'ngram' or 'auto'."
            )
        if None not in layout.windows:
            raise OptionError(
                f"speculative_config: all layers of {name} have windows, whose blocks are let go "
                "of; use method 'ngram' or 'auto'."
            )
        quantization, longest = wanted.quantization, options.model.max_model_len or 0
        layers: tuple[int, ...] = (BEHIND_NORM,)
        if wanted.method == "mtp":
            config = mtp_config(target)
            quantization = quantization or options.model.quantization
        else:
            config, eagle = eagle3_config(options, wanted, target)
            layers = eagle.layers_of(target.num_layers)
            # Positions of the target count, whatever the layer's configuration says.
            positions = max(config.max_position_tokens, longest)
            config = replace(config, max_position_tokens=positions)
            if options.model.load_format != "dummy":
                config = _with_own_embedding(config, options)
        dtype = options.cache.kv_cache_dtype
        kv_count = parallel.heads(config.num_heads, config.num_kv_heads).kv_count
        spec = KVSpec(
            kv_count,
            config.head_dim,
            options.model.dtype if dtype in FLOAT8 else dtype,
            is_latent=config.latent is not None,
        )
        if options.model.load_format != "dummy":
            check_tensors(
                config,
                dtype=getattr(torch, options.model.dtype),
                device=options.device.device,
                load_format=options.model.load_format,
                quantization=quantization,
            )
        return cls(
            config,
            KVLayout.of([spec], layout.block_size),
            options,
            quantization,
            layout.windows.index(None),
            layers,
            target.hidden_size,
            wanted.num_tokens,
            wanted.schedule,
            wanted.max_model_len,
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

    def load(self, dtype: torch.dtype, device: torch.device, target: CausalLM) -> None:
        """Read the head's weights, and have the loaded target keep what it reads."""
        head = load_model(
            self.config,
            dtype=dtype,
            device=device,
            load_format=self.options.model.load_format,
            parallel=self.parallel,
            seed=self.options.model.seed,
            quantization=self.quantization,
            max_model_len=self.options.model.max_model_len,
        )
        assert isinstance(head, DraftHead)
        head.bind()
        head.share(target)
        max_tokens = self.options.scheduler.max_num_batched_tokens
        assert max_tokens is not None
        streams = KeptStreams(self.layers, self.target_hidden_size, max_tokens, dtype, device)
        keep_streams(target, streams)
        self.heads, self.streams = [head], [streams]

    @property
    def blocks_ahead(self) -> int:
        """Blocks of its own that a row needs for the tokens that are drafted, the first of which
        has the last known tokens too."""
        num_ahead = self.num_drafts - 1
        return 0 if num_ahead == 0 else -(-(num_ahead - 1) // self.layout.block_size) + 1

    def count_ahead_bytes(self, max_rows: int) -> int:
        """KV of drafts of so many rows, beside that of the blocks of the cache."""
        return max_rows * self.blocks_ahead * self.layout.bytes_per_block

    def build(self, table: RowTable, sampler: Sampler, num_blocks: int) -> HeadDrafter:
        """The drafter for these rows, whose cache has so many blocks."""
        (head,), spec = self.heads, self.layout.specs[0]
        num_ahead = self.blocks_ahead * len(table.num_tokens)
        kv = KVTensors(self.layout, num_blocks + num_ahead, table.device)
        backend, _ = select_backend(
            table.device.type,
            head.dtype,
            spec.head_dim,
            self.layout.block_size,
            wanted=self.options.device.attention_backend,
            cache_dtype=getattr(torch, spec.torch_dtype),
            is_latent=spec.is_latent,
        )
        attention = backend(
            kv.data,
            self.parallel.heads(self.config.num_heads, self.config.num_kv_heads).count,
            spec.num_kv_heads,
            spec.head_dim,
            self.layout.block_size,
            None,
            self.config.latent,
        )
        return HeadDrafter(self, GroupedAttention([attention]), kv, num_blocks, table, sampler)


def _with_own_embedding(config: ModelConfig, options: EngineOptions) -> ModelConfig:
    """Says whether the head's files have an embedding; otherwise the target's is used."""
    rename = model_class(config.architecture).weight_map.rename
    stored = stored_tensors(config.source, options.model.load_format)
    has_own = any(rename(name) == "embed_tokens.weight" for name in stored)
    return replace(config, raw={**config.raw, "has_own_embedding": has_own})


@dataclass(slots=True)
class _Step:
    """The tokens of a step before its forward pass, on the device."""

    plan: StepPlan
    tokens: StepTokens
    first_lines: Tensor
    """Of each row that samples, which token its first line follows."""


class HeadDrafter:
    """Drafts by sampling, as `DraftModel` does: with the settings and the random numbers that the
    target samples the same position with.

    Behind each step the head computes what the target has computed, drafts wanted or not: its KV at
    a position, made of the target's hidden state there and the token behind it, lies in the block
    that has the target's. So it is there whenever the target's is: shared, forked, copied, and
    found again. Of a prefix that was found the last position was made with the token behind it in
    the text that it was found from, which may be another one: that costs agreement, not truth.

    KV of drafts is not kept: it lies in blocks behind those of the cache, some for each row that
    drafts, of which the first begins as a copy of the block that the row's last tokens are in.
    Nothing here waits for the device.
    """

    def __init__(
        self,
        source: HeadSource,
        attention: GroupedAttention,
        kv: KVTensors,
        num_blocks: int,
        table: RowTable,
        sampler: Sampler,
    ) -> None:
        """Blocks from `num_blocks` on are for drafts."""
        (self._head,), (self._streams,) = source.heads, source.streams
        self._parallel, self._num_drafts = source.parallel, source.num_drafts
        self._schedule = source.schedule
        self._blocks_ahead, self._num_blocks = source.blocks_ahead, num_blocks
        self._attention, self.kv = attention, kv
        self._table, self._sampler = table, sampler
        self._blocks = table.block_tables[source.kv_group]
        max_rows, self._longest = table.token_ids.shape
        self._drafts_until = source.drafts_until or self._longest
        self._wanted = np.zeros(max_rows, np.bool_)
        self._step: _Step | None = None
        self._hidden: Tensor | None = None
        """Of each row that sampled, the head's state behind its last known token."""

    def settle(self, plan: StepPlan) -> None:
        """All is computed behind the step that computes it."""

    def update(self, plan: StepPlan) -> None:
        """Follow the rows of a plan, before its step moves their lengths."""
        for added in plan.added_rows:
            self._wanted[added.row] = wants_drafts(added)
        self._step = self._gather(plan) if plan.num_tokens else None

    def _gather(self, plan: StepPlan) -> _Step:
        ends = np.cumsum(plan.num_new_tokens, dtype=np.int32)
        first_lines = (ends - plan.num_samples)[plan.samples]
        tokens, (lines,) = StepTokens.gather(
            self._table, plan.rows, plan.num_new_tokens, first_lines
        )
        return _Step(plan, tokens, lines)

    def accepted(self, rows: Tensor, counts: Tensor | None) -> None:
        """Compute what the target has computed in this step. Behind drafts that were rejected that
        is of no use, and is overwritten before it is read."""
        step, table = self._step, self._table
        if step is None:
            return
        plan, tokens = step.plan, step.tokens
        behind = (tokens.positions + 1).clamp(max=self._longest - 1)
        most = int(plan.num_samples.max(initial=1))
        hidden = self._forward(
            tokens.attention(table, self._blocks, most),
            tokens.positions,
            table.token_ids[tokens.row_of, behind].long(),
            self._head.combine(self._streams.first(plan.num_tokens)),
        )
        if len(step.first_lines):
            lines = step.first_lines if counts is None else step.first_lines + counts - 1
            self._hidden = hidden[lines.long()]

    def propose(self, rows: Tensor) -> Tensor:
        shape, device = (len(rows), self._num_drafts), rows.device
        drafts = torch.full(shape, -1, dtype=torch.int32, device=device)
        step, hidden = self._step, self._hidden
        assert step is not None and hidden is not None, "rows that sample have computed"
        host_rows = step.plan.rows[step.plan.samples]
        places = np.flatnonzero(self._wanted[host_rows]).astype(np.int32)
        count = scheduled_drafts(self._schedule, len(host_rows), self._num_drafts)
        if not len(places) or not count:
            return drafts
        host_rows = host_rows[places]
        chosen = self._table.staging.send(places)[0].long()
        drafts[chosen, :count] = self._draft(rows[chosen], host_rows, hidden[chosen], count)
        return drafts

    def _draft(self, rows: Tensor, host_rows: Int32Array, hidden: Tensor, count: int) -> Tensor:
        """Of rows whose state behind the last known token is `hidden`: int32 [R, count]."""
        table, last = self._table, self._longest - 1
        known = table.num_tokens[rows].long()
        blocks = self._blocks_for_drafts(rows, known)
        ones = np.ones(len(host_rows), np.int32)
        index = torch.arange(len(host_rows), device=rows.device)
        query_start = torch.arange(len(host_rows) + 1, dtype=torch.int32, device=rows.device)
        found: list[Tensor] = []
        for i in range(count):
            if i:
                # Near its end a row has fewer drafts than are made here.
                positions = (known + i - 2).clamp(max=last)
                inputs = AttentionInputs(
                    query_start=query_start,
                    context_lens=(positions + 1).int(),
                    block_tables=blocks,
                    slots=slots_of(blocks, index, positions, table.block_size),
                    query_lens=ones,
                    max_context_lens=np.minimum(table.max_computed[host_rows] + i, last + 1),
                    send=table.staging.send,
                )
                hidden = self._forward(inputs, positions, found[-1].long(), hidden)
            tokens = self._sample(hidden, rows, host_rows, i)
            found.append(tokens)
            # What bars words looks at the tokens before.
            at = (known + i).clamp(max=last)
            current = table.token_ids[rows, at]
            table.token_ids[rows, at] = torch.where(known + i <= last, tokens, current)
        drafts = torch.stack(found, dim=1)
        if self._drafts_until <= last:
            drafts.masked_fill_((known + count > self._drafts_until)[:, None], -1)
        return drafts

    def _sample(self, hidden: Tensor, rows: Tensor, host_rows: Int32Array, index: int) -> Tensor:
        """Ranks have the same logits; the first samples, and tells the others."""
        logits = self._head.target_logits(hidden)
        if self._parallel.size == 1:
            return self._sampler.draft(logits, rows, host_rows, index)
        tokens = torch.empty(len(host_rows), dtype=torch.int32, device=rows.device)
        if self._parallel.rank == 0:
            tokens.copy_(self._sampler.draft(logits, rows, host_rows, index))
        self._parallel.broadcast(tokens)
        return tokens

    def _blocks_for_drafts(self, rows: Tensor, known: Tensor) -> Tensor:
        """Block tables in which what follows the computed tokens lies in blocks for drafts; the
        first of them begins as a copy of the block that it stands for."""
        tables = self._blocks[rows]
        if not self._blocks_ahead:
            return tables
        count, ahead = len(rows), self._blocks_ahead
        own = torch.arange(count * ahead, dtype=torch.int32, device=rows.device) + self._num_blocks
        own = own.view(count, ahead)
        first = (known - 1) // self._table.block_size
        tables = torch.cat((tables, own), dim=1)  # room behind the last block of a full row
        self.kv.copy_blocks(tables.gather(1, first[:, None])[:, 0].long(), own[:, 0].long())
        places = first[:, None] + torch.arange(ahead, device=rows.device)
        return tables.scatter(1, places, own)

    def _forward(
        self, inputs: AttentionInputs, positions: Tensor, token_ids: Tensor, hidden: Tensor
    ) -> Tensor:
        attention = self._attention.plan([inputs])
        return self._head(StepContext(positions, attention, token_ids, hidden=hidden))
