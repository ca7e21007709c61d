"""`PromptLogprobRows`: log-probabilities of prompt tokens, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.decoding.logprobs import MAX_LINES, LogprobTensors, measure_prompt
from quire.layers.parallel import Parallel
from quire.models.registry import CausalLM
from quire.protocol.plan import AddedRow, Int32Array, StepPlan
from quire.worker.adapters import HostAdapters
from quire.worker.rows import RowTable


@dataclass(slots=True)
class _Row:
    """A row whose prompt tokens get logprobs, and how far its KV is computed."""

    added: AddedRow
    num_computed: int


class PromptLogprobRows:
    """The hidden state at p - 1 gives those of p. The first rank has them; the others do the same
    but for measuring."""

    def __init__(self, model: CausalLM, table: RowTable, parallel: Parallel) -> None:
        self.rows: dict[int, _Row] = {}
        """Whose prompts are not complete; while there are any, steps run outside of graphs."""
        self.on_logits: Callable[[Int32Array, Tensor], None] | None = None
        """Given the positions of prompt tokens, in pieces, and the logits [positions, vocabulary]
        before each: the first rank's."""
        self._model, self._table, self._parallel = model, table, parallel

    def add(self, added: AddedRow) -> None:
        """A row that asks for them begins."""
        self.rows[added.row] = _Row(added, added.num_computed_tokens)

    def apply(
        self, plan: StepPlan, hidden: Tensor | None, adapters: HostAdapters | None
    ) -> list[tuple[int, LogprobTensors]]:
        """Take in a step's hidden states [tokens, hidden]; returns rows and their logprobs."""
        found: list[tuple[int, LogprobTensors]] = []
        if hidden is None:
            return found
        starts = np.cumsum(plan.num_new_tokens) - plan.num_new_tokens
        for row, start, count in zip(
            plan.rows.tolist(), starts.tolist(), plan.num_new_tokens.tolist(), strict=True
        ):
            entry = self.rows.get(row)
            if entry is None:
                continue
            first, num_before = entry.num_computed, entry.added.num_prompt_tokens - 1
            entry.num_computed += count
            if first < num_before:
                some = hidden[start : start + min(count, num_before - first)]
                logprobs = self._logprobs_behind(entry.added, first, some, adapters)
                if logprobs is not None:
                    found.append((row, logprobs))
            if entry.num_computed >= num_before:
                del self.rows[row]
        return found

    def _logprobs_behind(
        self, added: AddedRow, first: int, hidden: Tensor, adapters: HostAdapters | None
    ) -> LogprobTensors | None:
        """Logprobs of the tokens after positions `first` and on; `hidden` are the states there."""
        positions = np.arange(first + 1, first + 1 + len(hidden), dtype=np.int32)
        targets = self._table.token_ids[added.row, first + 1 : first + 1 + len(hidden)].long()
        # In pieces: all logits of a long prompt would take gigabytes.
        cuts = [slice(start, start + MAX_LINES) for start in range(0, len(hidden), MAX_LINES)]
        parts = []
        for cut in cuts:
            if adapters is not None:
                adapters.begin_lines(added.adapter_slot, len(hidden[cut]))
            logits = self._model.lm_head.gather(self._model.logits(hidden[cut]))
            if self._parallel.answers:
                if self.on_logits is not None:
                    self.on_logits(positions[cut], logits)
                measured = measure_prompt(added, logits, targets[cut], positions[cut])
                parts.append(measured.tensors)
        if not parts:
            return None
        return LogprobTensors(positions, *map(torch.cat, zip(*parts, strict=True)))
