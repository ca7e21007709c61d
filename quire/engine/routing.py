"""Splits a step's output among the clients whose sequences it is about."""

from __future__ import annotations

import numpy as np

from quire.protocol.output import StepOutput
from quire.protocol.plan import BoolArray, LogprobArrays
from quire.protocol.request import KEY_BITS


def split_by_client(output: StepOutput) -> dict[int, StepOutput]:
    """Client index -> its part of the output."""
    owners = output.keys >> KEY_BITS
    clients = set(np.unique(owners).tolist())
    clients.update(ended.key >> KEY_BITS for ended in output.finished)
    clients.update(part.key >> KEY_BITS for part in output.prompt_logprobs)
    clients.update(one.key >> KEY_BITS for one in output.progress)
    if len(clients) == 1:
        return {clients.pop(): output}
    return {client: _part(output, client, owners == client) for client in clients}


def _part(output: StepOutput, client: int, own: BoolArray) -> StepOutput:
    return StepOutput(
        keys=output.keys[own],
        tokens=output.tokens[own],
        logprobs=None if output.logprobs is None else _own_logprobs(output.logprobs, own),
        prompt_logprobs=[p for p in output.prompt_logprobs if p.key >> KEY_BITS == client],
        finished=[e for e in output.finished if e.key >> KEY_BITS == client],
        progress=[one for one in output.progress if one.key >> KEY_BITS == client],
    )


def _own_logprobs(arrays: LogprobArrays, own: BoolArray) -> LogprobArrays | None:
    lines = own[arrays.index]
    if not lines.any():
        return None
    places = np.cumsum(own, dtype=np.int32) - 1
    return LogprobArrays(
        index=places[arrays.index[lines]].astype(np.int32),
        token_ids=arrays.token_ids[lines],
        logprobs=arrays.logprobs[lines],
        ranks=arrays.ranks[lines],
    )
