"""What a step's result means: which tokens sequences take in, and what clients are shown of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.protocol.output import SequencePromptLogprobs, StepOutput
from quire.protocol.plan import BoolArray, Int32Array, LogprobArrays, StepPlan, StepResult
from quire.scheduler.sequence import Columns


@dataclass(slots=True)
class AcceptedTokens:
    """Sampled tokens that rows take in: those of sequences that still hold their row and whose
    tokens the sampler chooses, up to the first token that ends the sequence."""

    rows: Int32Array
    counts: Int32Array
    """Tokens of each row, at least 1."""
    tokens: Int32Array
    """Row after row."""
    places: Int32Array
    """Where each lies in `StepResult.tokens`."""
    ends: BoolArray
    """Of each row, whether its sequence ends with the last of its tokens."""
    stops: BoolArray
    """Of each row, whether that token is a stop token, or nothing can follow it."""


def accept(
    columns: Columns,
    plan: StepPlan,
    result: StepResult,
    live: BoolArray,
    complete: BoolArray | None,
) -> AcceptedTokens:
    """`live` says of each of `plan.rows` whether its sequence still holds it, `complete` of each
    row that samples whether nothing can follow its token."""
    c, samples = columns, plan.samples
    rows, counts = plan.rows[samples], result.counts
    keep = live[samples] & ~c.host_chooses[rows]
    if len(result.tokens) == len(rows):  # a token each, as in most steps
        places, tokens = np.arange(len(rows), dtype=np.int32), result.tokens
        if not keep.all():
            places = places[keep]
            rows, tokens = rows[places], tokens[places]
        num_known = c.num_known[rows] + 1
        stops = _stop(c, rows, tokens, num_known)
        if complete is not None:
            stops |= complete[places]
        ends = stops | (num_known >= c.max_total[rows])
        return AcceptedTokens(rows, np.ones_like(rows), tokens, places, ends, stops)
    index = np.repeat(np.arange(len(rows)), counts)
    offset = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    num_known = (c.num_known[rows[index]] + offset + 1).astype(np.int32)
    stops = _stop(c, rows[index], result.tokens, num_known)
    if complete is not None:
        stops |= complete[index]
    ends = stops | (num_known >= c.max_total[rows[index]])
    num_tokens = counts.copy()
    np.minimum.at(num_tokens, index[ends], offset[ends] + 1)
    taken = keep[index] & (offset < num_tokens[index])
    is_last = taken & (offset == num_tokens[index] - 1)
    return AcceptedTokens(
        rows=rows[keep],
        counts=num_tokens[keep].astype(np.int32),
        tokens=result.tokens[taken],
        places=np.flatnonzero(taken).astype(np.int32),
        ends=ends[is_last],
        stops=stops[is_last],
    )


def _stop(c: Columns, rows: Int32Array, tokens: Int32Array, num_known: Int32Array) -> BoolArray:
    """Which tokens are stop tokens, where so many tokens are enough for one."""
    found: BoolArray = (c.stop_ids[rows] == tokens[:, None]).any(axis=1)
    return found & (num_known >= c.min_total[rows])


def collect_output(
    columns: Columns,
    plan: StepPlan,
    result: StepResult,
    live: BoolArray,
    accepted: AcceptedTokens,
) -> StepOutput:
    """New tokens and logprobs of streaming rows whose sequence still holds the row (`live`)."""
    rows = accepted.rows
    if len(accepted.tokens) != len(rows):
        rows = np.repeat(rows, accepted.counts)
    streams = columns.streams[rows]
    output = StepOutput(keys=columns.keys[rows[streams]], tokens=accepted.tokens[streams])
    if result.logprobs is not None:
        shown = np.zeros(len(result.tokens), np.bool_)
        shown[accepted.places[streams]] = True
        output.logprobs = _select(result.logprobs, shown)
    for part in result.prompt_logprobs:
        if live[plan.rows == part.row].any():
            key = int(columns.keys[part.row])
            output.prompt_logprobs.append(SequencePromptLogprobs(key, part.arrays))
    return output


def _select(logprobs: LogprobArrays, shown: BoolArray) -> LogprobArrays:
    """Keep the lines of shown tokens and renumber them by their place in the output."""
    place = np.cumsum(shown).astype(np.int32) - 1
    keep = shown[logprobs.index]
    return LogprobArrays(
        index=place[logprobs.index[keep]],
        token_ids=logprobs.token_ids[keep],
        logprobs=logprobs.logprobs[keep],
        ranks=logprobs.ranks[keep],
    )
