"""`ModelRunner`: carries out a plan on one device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.decoding.sampler import Sampler
from quire.layers.attention.backend import AttentionBackend
from quire.models.registry import CausalLM
from quire.protocol.plan import AddedRow, Int32Array, PromptLogprobs, StepPlan, StepResult
from quire.worker.batch import Batch, gather_batch
from quire.worker.kv_tensors import KVTensors
from quire.worker.request_table import RequestTable


@dataclass(slots=True)
class _PromptLogprobRow:
    """A row whose prompt tokens are to be scored, and how far its KV is computed."""

    added: AddedRow
    num_computed: int


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
        self._prompt_logprob_rows: dict[int, _PromptLogprobRow] = {}
        self._executed: tuple[StepPlan, Batch, Tensor] | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """The forward pass of a step."""
        self._update_rows(plan)
        if len(plan.copy_sources):
            index = self.table.index
            self.kv.copy_blocks(index(plan.copy_sources), index(plan.copy_targets))
        batch = gather_batch(self.table, plan)
        hidden = self.model(batch.token_ids, batch.positions, self.attention.plan(batch.attention))
        self.table.num_computed[batch.rows] = batch.attention.context_lens
        self._executed = (plan, batch, hidden)

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.freed_rows.tolist():
            self.sampler.remove(row)
            self._prompt_logprob_rows.pop(row, None)
        self.table.update(plan)
        for added in plan.added_rows:
            self.sampler.add(added, self._known_tokens(added))
            if added.num_prompt_logprobs >= 0:
                entry = _PromptLogprobRow(added, added.num_computed_tokens)
                self._prompt_logprob_rows[added.row] = entry

    def _known_tokens(self, added: AddedRow) -> Int32Array:
        if not added.num_forked_tokens:
            return added.token_ids
        total = added.num_forked_tokens + len(added.token_ids)
        known: Int32Array = self.table.token_ids[added.row, :total].cpu().numpy()
        return known

    @torch.inference_mode()
    def sample(self) -> StepResult:
        """Choose the next tokens of the executed step; they also stay in the rows."""
        assert self._executed is not None
        plan, batch, hidden = self._executed
        self._executed = None
        prompt_logprobs = self._score_prompts(plan, hidden)
        host_rows = plan.rows[plan.samples]
        if not len(host_rows):
            return StepResult(plan.step, np.empty(0, np.int32), None, prompt_logprobs)
        logits = self.model.logits(hidden[batch.sample_indices])
        sampled = self.sampler.sample(logits, batch.sample_rows, host_rows)
        self.table.append_sampled(batch.sample_rows, sampled.tokens)
        self.sampler.appended(batch.sample_rows, sampled.tokens)
        logprobs = sampled.logprobs.to_host() if sampled.logprobs is not None else None
        return StepResult(plan.step, sampled.tokens.cpu().numpy(), logprobs, prompt_logprobs)

    def _score_prompts(self, plan: StepPlan, hidden: Tensor) -> list[PromptLogprobs]:
        """Logprobs of prompt tokens: position p is scored by the hidden state at p - 1."""
        scored: list[PromptLogprobs] = []
        if not self._prompt_logprob_rows:
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
