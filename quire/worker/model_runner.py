"""`ModelRunner`: carries out a plan on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.decoding.logprobs import LogprobTensors
from quire.decoding.masks import MaskTensors
from quire.decoding.rows import upload
from quire.decoding.sampler import Sampled, Sampler
from quire.decoding.speculative.drafter import Drafter
from quire.layers.attention.backend import GroupedAttention
from quire.layers.attention.layer import StepContext
from quire.layers.attention.shared_prefix import HostPrefixTiles, prefix_tiles
from quire.layers.expert_counts import ExpertCounter
from quire.layers.experts import Experts
from quire.layers.parallel import Parallel
from quire.models.loader import ONE_RANK
from quire.models.registry import CausalLM
from quire.protocol.plan import (
    Int32Array,
    PooledRows,
    PromptLogprobs,
    StepPlan,
    StepResult,
    TokenMasks,
    WaitingDrafts,
)
from quire.worker.adapters import HostAdapters
from quire.worker.batch import gather_batch
from quire.worker.draft_model import DraftModel
from quire.worker.graphs import StepGraphs
from quire.worker.kv_tensors import KVTensors
from quire.worker.pooling import PooledRow, PooledTensors, pool
from quire.worker.prompt_logprobs import PromptLogprobRows
from quire.worker.rows import RowTable, StagedLines, StagedRows
from quire.worker.warm_up import COMPILE_SIZES, adapter_prompts, batch_sizes, warm_up_plans


@dataclass(slots=True)
class _Executed:
    """A step whose forward pass is launched: its lines of logits, and hidden states."""

    plan: StepPlan
    staged: StagedRows
    logits: Tensor | None
    """This rank's share; None before the last stage."""
    hidden: Tensor | None


class ModelRunner:
    """Updates rows, gathers the batch, runs the model, samples."""

    def __init__(
        self,
        model: CausalLM,
        attention: GroupedAttention,
        kv: KVTensors,
        table: RowTable,
        sampler: Sampler,
        shares_prefixes: bool,
        max_queries: int,
        parallel: Parallel = ONE_RANK,
    ) -> None:
        """`max_queries` is one more than the most drafts of a row."""
        self.model = model
        self.attention = attention
        self.kv = kv
        self.table = table
        self.sampler = sampler
        self._shares_prefixes, self._max_queries = shares_prefixes, max_queries
        self._parallel, self._stage = parallel, parallel.stage
        self.expert_counter = ExpertCounter.of(model, table.device)
        """None for models without experts."""
        self.graphs: StepGraphs | None = None
        self.drafter: Drafter | None = None
        self.draft_kv: KVTensors | None = None
        """What a head or model that drafts has in the same blocks, and copies of them."""
        self.adapters: HostAdapters | None = None
        """None: requests have none."""
        self.prompt_logprobs = PromptLogprobRows(model, table, parallel)
        self._pooled_rows: dict[int, PooledRow] = {}
        self._executed: _Executed | None = None
        self._masks: MaskTensors | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Launch the forward pass of a step."""
        if self.adapters is not None:
            self.adapters.carry_out(plan)
        if self.drafter is not None:
            self.drafter.settle(plan)
        staged = self.update_rows(plan)
        if self.drafter is not None:
            self.drafter.update(plan)
        if len(plan.copy_sources):
            self.kv.copy_blocks(staged.copy_sources, staged.copy_targets)
            if self.draft_kv is not None:
                self.draft_kv.copy_blocks(staged.copy_sources, staged.copy_targets)
        prefixes = self._shared_prefixes(plan)
        used: list[int] = []
        is_eager = bool(self.prompt_logprobs.rows or self._pooled_rows)
        if self.adapters is not None:
            used = self.table.used_adapters(plan)
            is_eager = is_eager or self.adapters.layers.needs_eager_step(used)
        if self.graphs is not None and not is_eager:
            replayed = self.graphs.replay(plan, staged, prefixes, bool(used))
            if replayed is not None:
                logits = replayed if self._stage.is_last else None
                self._executed = _Executed(plan, staged, logits, None)
                return
        batch = gather_batch(self.table, plan, staged, prefixes, bool(used))
        if self.adapters is not None:
            self.adapters.begin_step(batch, used)
        attention = self.attention.plan(batch.attention)
        given: Tensor | None = None
        if not self._stage.is_first:
            given = self.model.new_hidden(plan.num_tokens)
            self._stage.receive(given)
        hidden = self.model(StepContext(batch.positions, attention, batch.token_ids, hidden=given))
        if self.expert_counter is not None and plan.num_tokens:
            self.expert_counter.take()
        if self._stage.is_last:
            logits = self.model.logits(hidden[batch.sample_indices])
            self._executed = _Executed(plan, staged, logits, hidden)
        else:
            self._stage.send(hidden)
            self._executed = _Executed(plan, staged, None, None)

    def _shared_prefixes(self, plan: StepPlan) -> HostPrefixTiles | None:
        """What the rows with one new token share, where no others decode."""
        if not len(plan.prefix_groups) or plan.has_drafts:
            return None
        tiles = prefix_tiles(
            plan.prefix_groups[plan.num_new_tokens == 1],
            plan.prefix_blocks * self.table.block_size,
            self.attention.prefix_members,
        )
        return tiles if len(tiles.lens) else None

    def update_rows(self, plan: StepPlan) -> StagedRows:
        """Bring the rows up to the plan: all that a step sends to the device."""
        if not self._stage.is_last:
            return self.table.update(plan)
        for row in plan.freed_rows.tolist():
            self.sampler.remove(row)
            self.prompt_logprobs.rows.pop(row, None)
            self._pooled_rows.pop(row, None)
        staged = self.table.update(plan)
        for added in plan.added_rows:
            # A plan that failed may have been the one to free the row.
            self.prompt_logprobs.rows.pop(added.row, None)
            self._pooled_rows.pop(added.row, None)
            self.sampler.add(added, added.token_ids)
            if added.pooling is not None:
                self._pooled_rows[added.row] = PooledRow(added)
            if added.num_prompt_logprobs >= 0:
                self.prompt_logprobs.add(added)
        for row, length in zip(plan.cut_rows.tolist(), plan.cut_lengths.tolist(), strict=True):
            self.sampler.cut(row, length)
        if len(plan.append_rows):
            self.sampler.appended(staged.append_rows, staged.append_tokens)
        return staged

    def token_masks(self, lines: Int32Array, num_words: int) -> TokenMasks:
        """Masks to fill in for `sample` of the executed step."""
        if self._masks is None or not self._masks.serve(lines, num_words):
            self._masks = MaskTensors(lines, num_words, self.table.device)
        return self._masks

    @property
    def executed_step(self) -> int | None:
        """The step that is to be sampled next."""
        return None if self._executed is None else self._executed.plan.step

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None = None) -> PendingStep:
        """Sample the next tokens of the executed step, among those that `masks` (made by
        `token_masks`; the first rank's count) allow; they also stay in the rows. Only the last
        stage samples, and where there are several, rows are told by a later plan."""
        assert self._executed is not None
        assert masks is None or isinstance(masks, MaskTensors)
        executed, self._executed = self._executed, None
        plan, rows = executed.plan, executed.staged.sample_rows
        if executed.logits is None:
            return PendingStep(plan.step, rows[:0], None, [])
        prompt_logprobs: list[tuple[int, LogprobTensors]] = []
        if self.prompt_logprobs.rows:
            prompt_logprobs = self.prompt_logprobs.apply(plan, executed.hidden, self.adapters)
        pooled = pool(self._pooled_rows, plan, executed.hidden) if self._pooled_rows else None
        host_rows = plan.rows[plan.samples]
        if not len(host_rows):
            if self.drafter is not None:
                self._begin_drafts()
                self.drafter.accepted(rows, None)
            return PendingStep(plan.step, rows, None, prompt_logprobs)
        verified: Verified | None = None
        drafted: Drafted | None = None
        if executed.staged.lines is None:
            sampled = self._sample(executed.logits, rows, host_rows, masks)
            if self._stage.count == 1:
                self.table.append_sampled(rows, sampled.tokens)
                self.sampler.appended(rows, sampled.tokens)
        else:
            sampled, verified = self._verify(executed, executed.staged.lines, masks)
        if self.drafter is not None:
            self._begin_drafts()
            self.drafter.accepted(rows, None if verified is None else verified.counts)
            proposed = self.drafter.propose(rows)
            waiting = self.table.write_drafts(rows, proposed)
            drafted = self._drafted(waiting, host_rows, proposed.shape[1])
        return PendingStep(
            plan.step, sampled.tokens, sampled.logprobs, prompt_logprobs, pooled, verified, drafted
        )

    def _begin_drafts(self) -> None:
        """What a head shares with the target it uses without any adapter."""
        if self.adapters is not None:
            self.adapters.layers.begin_step(None)

    def _drafted(self, num_drafts: Tensor, host_rows: Int32Array, most: int) -> Drafted:
        """What the host must know of the drafts that wait now."""
        places, token_ids = self.sampler.constrained(host_rows), None
        if len(places):
            rows = upload(host_rows[places].astype(np.int64), self.table.device)
            token_ids = self.table.drafts(rows, most)
        repeated = self.drafter.num_repeated if isinstance(self.drafter, DraftModel) else None
        return Drafted(num_drafts, places, token_ids, repeated)

    def _sample(
        self,
        logits: Tensor,
        rows: Tensor,
        host_rows: NDArray[Any],
        masks: MaskTensors | None,
        offsets: Tensor | None = None,
    ) -> Sampled:
        """Ranks that share the vocabulary find its highest logit together; where more than that is
        asked for, the first samples and tells the others."""
        if self._parallel.size == 1:
            return self.sampler.sample(logits, rows, host_rows, masks, offsets)
        if self.sampler.takes_argmax(host_rows):
            assert masks is None, "rows without a grammar have no masks"
            return Sampled(self.model.lm_head.gather_argmax(logits), None)
        logits = self.model.lm_head.gather(logits)
        if self._parallel.answers:
            sampled = self.sampler.sample(logits, rows, host_rows, masks, offsets)
        else:
            tokens = torch.empty(len(host_rows), dtype=torch.int32, device=rows.device)
            sampled = Sampled(tokens, None)
        self._parallel.broadcast(sampled.tokens)
        return sampled

    def _verify(
        self, executed: _Executed, lines: StagedLines, masks: MaskTensors | None
    ) -> tuple[Sampled, Verified]:
        """Sample in every line as if the drafts before it were known; accept while they agree."""
        plan, rows = executed.plan, executed.staged.sample_rows
        assert executed.logits is not None
        assert self._stage.count == 1, "other stages would not know which drafts were accepted"
        line_rows = rows.index_select(0, lines.index)
        host_rows = np.repeat(plan.rows, plan.num_samples)
        sampled = self._sample(executed.logits, line_rows, host_rows, masks, lines.offsets)
        counts = self.table.accept(rows, lines, sampled.tokens)
        is_accepted = lines.offsets < counts.index_select(0, lines.index)
        self.sampler.appended(line_rows, sampled.tokens, is_accepted)
        return sampled, Verified(counts, plan.num_samples[plan.samples], plan.line_offsets)

    # --- before the engine is ready ---------------------------------------------------------------

    def build_graphs(self, max_tokens: int) -> StepGraphs:
        """Graphs for steps of up to so many tokens, not captured yet."""
        return StepGraphs(
            self.model,
            self.attention,
            self.table,
            len(self.table.num_tokens),
            max_tokens,
            self._shares_prefixes,
            self._max_queries,
            self._stage,
            self.expert_counter,
            None if self.adapters is None else self.adapters.layers,
        )

    def compile_kernels(self, graphs: StepGraphs | None, num_threads: int, max_tokens: int) -> None:
        """Compile most kernels side by side, which a cold start would otherwise do one by one.

        Forward passes of each kind are gone through and compute nothing. Nothing is sampled from
        them: tokens that were not sampled must not be looked up. Steps have at most `max_tokens`.
        """
        from quire.kernels.triton.compile import CompilingTogether

        max_rows = len(self.table.num_tokens)
        sizes = sorted({min(size, max_rows) for size in COMPILE_SIZES})
        with CompilingTogether(num_threads):
            if self._stage.is_last:
                self.sampler.warm_up(self.model.dtype)
            for plan in self._warm_up_plans(sizes, max_tokens):
                self.execute(plan)
                self.update_rows(StepPlan(step=0, freed_rows=plan.rows))
            if graphs is not None:
                graphs.compile()
            experts = [one for one in self.model.modules() if isinstance(one, Experts)]
            for layer in {one.kernels: one for one in experts}.values():
                layer.warm_up(max_tokens)

    def warm_up(self, max_tokens: int) -> None:
        """Run steps of each kind, of up to so many tokens. Their rows have no blocks of their own:
        all write to the first block of the cache, which holds nothing yet."""
        if self._stage.is_last:
            self.sampler.warm_up(self.model.dtype)
        sizes = batch_sizes(len(self.table.num_tokens), self.graphs is not None)
        for plan in self._warm_up_plans(sizes, max_tokens):
            self.execute(plan)
            self.sample().result()
            self.update_rows(StepPlan(step=0, freed_rows=plan.rows))

    def _warm_up_plans(self, sizes: list[int], max_tokens: int) -> Iterator[StepPlan]:
        """Where there may be adapters, all steps with one too: slot 0, which is empty yet."""
        max_rows, max_len = self.table.token_ids.shape
        for slot in (-1,) if self.adapters is None else (-1, 0):
            yield from warm_up_plans(
                self.table.block_size,
                max_len,
                sizes,
                self._shares_prefixes,
                self._max_queries,
                self.attention.expanded_queries,
                slot,
            )
        if self.adapters is not None:
            yield from adapter_prompts(max_rows, max_tokens, max_len)


@dataclass(slots=True)
class Verified:
    """What became of the lines of a step that verified drafts."""

    counts: Tensor
    """Lines that each row that samples accepts, its first ones."""
    num_lines: Int32Array
    """Lines that each of these rows has."""
    offsets: Int32Array
    """Of each line, how many lines of its row are before it."""


@dataclass(slots=True)
class Drafted:
    """The drafts that wait after a step."""

    counts: Tensor
    """In each row that samples."""
    constrained: Int32Array
    """Which of these rows have a grammar."""
    token_ids: Tensor | None
    """[constrained, most drafts]"""
    repeated: Tensor | None = None
    """What the text would have given, where a model may draft instead."""


class PendingStep:
    """A step's result on its way from the device: the copies to the host start when it is made, and
    `result` waits for those and nothing else."""

    def __init__(
        self,
        step: int,
        tokens: Tensor,
        logprobs: LogprobTensors | None,
        prompt_logprobs: list[tuple[int, LogprobTensors]],
        pooled: PooledTensors | None = None,
        verified: Verified | None = None,
        drafted: Drafted | None = None,
    ) -> None:
        """`prompt_logprobs` are given with their rows; all lines are accepted where `verified` does
        not say otherwise."""
        self._step = step
        self._tokens = _to_host(tokens)
        self._logprobs = None if logprobs is None else _logprobs_to_host(logprobs)
        self._prompt_logprobs = [(row, _logprobs_to_host(one)) for row, one in prompt_logprobs]
        self._pooled = pooled
        if pooled is not None:
            self._pooled = PooledTensors(pooled.rows, _to_host(pooled.vectors))
        self._verified = verified
        if verified is not None:
            self._verified = replace(verified, counts=_to_host(verified.counts))
        self._drafted = drafted
        if drafted is not None:
            ids = None if drafted.token_ids is None else _to_host(drafted.token_ids)
            repeated = None if drafted.repeated is None else _to_host(drafted.repeated)
            self._drafted = Drafted(_to_host(drafted.counts), drafted.constrained, ids, repeated)
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def result(self) -> StepResult:
        if self._done is not None:
            self._done.synchronize()
        logprobs = self._logprobs.to_host() if self._logprobs is not None else None
        pooled, tokens = self._pooled, self._tokens.numpy()
        counts = np.ones(len(tokens), np.int32)
        if self._verified is not None:
            counts = self._verified.counts.numpy()
            accepted = self._verified.offsets < np.repeat(counts, self._verified.num_lines)
            tokens = tokens[accepted]
            logprobs = logprobs.select(accepted) if logprobs is not None else None
        drafted, drafts = self._drafted, None
        if drafted is not None and drafted.token_ids is not None:
            drafts = WaitingDrafts(drafted.constrained, drafted.token_ids.numpy())
        return StepResult(
            self._step,
            tokens,
            counts,
            logprobs,
            [PromptLogprobs(row, one.to_host()) for row, one in self._prompt_logprobs],
            None if pooled is None else PooledRows(pooled.rows, pooled.vectors.numpy()),
            None if drafted is None else drafted.counts.numpy(),
            drafts,
            None if drafted is None or drafted.repeated is None else drafted.repeated.numpy(),
        )


def _logprobs_to_host(logprobs: LogprobTensors) -> LogprobTensors:
    return LogprobTensors(logprobs.index, *map(_to_host, logprobs.tensors))


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
