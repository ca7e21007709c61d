"""From a step's result to what clients see of it, as arrays."""

from __future__ import annotations

import numpy as np

from quire.protocol.output import SequencePromptLogprobs, StepOutput
from quire.protocol.plan import BoolArray, LogprobArrays, StepPlan, StepResult
from quire.scheduler.request import Columns


def collect_output(
    columns: Columns, plan: StepPlan, result: StepResult, live: BoolArray
) -> StepOutput:
    """New tokens and logprobs of streaming rows whose request still holds the row (`live`)."""
    sampled = plan.rows[plan.samples]
    shown = live[plan.samples] & columns.streams[sampled]
    output = StepOutput(keys=columns.keys[sampled[shown]], tokens=result.tokens[shown])
    if result.logprobs is not None:
        output.logprobs = _select(result.logprobs, shown)
    for part in result.prompt_logprobs:
        if live[plan.rows == part.row].any():
            key = int(columns.keys[part.row])
            output.prompt_logprobs.append(SequencePromptLogprobs(key, part.arrays))
    return output


def _select(logprobs: LogprobArrays, shown: BoolArray) -> LogprobArrays:
    """Keep the lines of shown samples and renumber them by their place in the output."""
    place = np.cumsum(shown).astype(np.int32) - 1
    keep = shown[logprobs.index]
    return LogprobArrays(
        index=place[logprobs.index[keep]],
        token_ids=logprobs.token_ids[keep],
        logprobs=logprobs.logprobs[keep],
        ranks=logprobs.ranks[keep],
    )
