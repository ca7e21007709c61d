"""`ModelRunner`: carries out a plan on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.decoding.sampler import Sampler
from quire.layers.attention.backend import AttentionBackend
from quire.models.registry import CausalLM
from quire.protocol.plan import AddedRow, Int32Array, PromptLogprobs, StepPlan
from quire.worker.batch import gather_batch
from quire.worker.kv_tensors import KVTensors
from quire.worker.pending import PendingStep
from quire.worker.request_table import RequestTable, StagedRows

if TYPE_CHECKING:
    from quire.worker.graphs import DecodeGraphs


@dataclass(slots=True)
class _PromptLogprobRow:
    """A row whose prompt tokens are to be scored, and how far its KV is computed."""

    added: AddedRow
    num_computed: int


@dataclass(slots=True)
class _Executed:
    """A step whose forward pass is launched: logits of the rows that sample, hidden states."""

    plan: StepPlan
    staged: StagedRows
    logits: Tensor
    hidden: Tensor | None


class ModelRunner:
    """Updates rows, gathers the batch, runs the model, samples."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv: KVTensors,
        table: RequestTable,
        sampler: Sampler,
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv = kv
        self.table = table
        self.sampler = sampler
        self.graphs: DecodeGraphs | None = None
        self._prompt_logprob_rows: dict[int, _PromptLogprobRow] = {}
        self._executed: _Executed | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Launch the forward pass of a step."""
        staged = self._update_rows(plan)
        if len(plan.copy_sources):
            self.kv.copy_blocks(staged.copy_sources, staged.copy_targets)
        if self._has_graph(plan):
            assert self.graphs is not None
            logits = self.graphs.run(plan.rows)
            if not plan.samples.all():
                logits = logits[staged.samples]
            self._executed = _Executed(plan, staged, logits, None)
            return
        batch = gather_batch(self.table, plan, staged)
        step = self.attention.plan(batch.attention)
        hidden = self.model(batch.token_ids, batch.positions, step)
        logits = self.model.logits(hidden[batch.sample_indices])
        self._executed = _Executed(plan, staged, logits, hidden)

    def _has_graph(self, plan: StepPlan) -> bool:
        return (
            self.graphs is not None
            and plan.num_tokens == len(plan.rows)
            and self.graphs.fits(len(plan.rows))
            and not self._prompt_logprob_rows
        )

    def _update_rows(self, plan: StepPlan) -> StagedRows:
        for row in plan.freed_rows.tolist():
            self.sampler.remove(row)
            self._prompt_logprob_rows.pop(row, None)
        staged = self.table.update(plan)
        for added in plan.added_rows:
            self.sampler.add(added, self._known_tokens(added))
            if added.num_prompt_logprobs >= 0:
                entry = _PromptLogprobRow(added, added.num_computed_tokens)
                self._prompt_logprob_rows[added.row] = entry
        return staged

    def _known_tokens(self, added: AddedRow) -> Int32Array:
        if not added.num_forked_tokens:
            return added.token_ids
        total = added.num_forked_tokens + len(added.token_ids)
        known: Int32Array = self.table.token_ids[added.row, :total].cpu().numpy()
        return known

    @torch.inference_mode()
    def sample(self) -> PendingStep:
        """Choose the next tokens of the executed step; they also stay in the rows."""
        assert self._executed is not None
        executed, self._executed = self._executed, None
        plan, rows = executed.plan, executed.staged.sample_rows
        prompt_logprobs = self._score_prompts(plan, executed.hidden)
        host_rows = plan.rows[plan.samples]
        if not len(host_rows):
            return PendingStep(plan.step, rows, None, prompt_logprobs)
        sampled = self.sampler.sample(executed.logits, rows, host_rows)
        self.table.append_sampled(rows, sampled.tokens)
        self.sampler.appended(rows, sampled.tokens)
        return PendingStep(plan.step, sampled.tokens, sampled.logprobs, prompt_logprobs)

    def _score_prompts(self, plan: StepPlan, hidden: Tensor | None) -> list[PromptLogprobs]:
        """Logprobs of prompt tokens: position p is scored by the hidden state at p - 1."""
        scored: list[PromptLogprobs] = []
        if not self._prompt_logprob_rows or hidden is None:
            return scored
        starts = np.cumsum(plan.num_new_tokens) - plan.num_new_tokens
        for row, start, count in zip(
            plan.rows.tolist(), starts.tolist(), plan.num_new_tokens.tolist(), strict=True
        ):
            entry = self._prompt_logprob_rows.get(row)
            if entry is None:
                continue
            first, last = entry.num_computed, entry.num_computed + count
            entry.num_computed = last
            num_scored = min(last, entry.added.num_prompt_tokens - 1) - first
            if num_scored <= 0:
                del self._prompt_logprob_rows[row]
                continue
            positions = np.arange(first + 1, first + 1 + num_scored, dtype=np.int32)
            logits = self.model.logits(hidden[start : start + num_scored])
            targets = self.table.token_ids[row, first + 1 : first + 1 + num_scored].long()
            arrays = self.sampler.prompt_logprobs(row, logits, targets, positions)
            scored.append(PromptLogprobs(row, arrays))
        return scored
