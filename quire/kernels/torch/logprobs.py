"""What the log-probabilities of some tokens need to know of whole lines of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# topk orders equal logits as it likes; with a few more than asked for, all ties at the end of the
# list are nearly always in view, and the lowest ids among them are reported.
TIE_MARGIN = 8


@dataclass(frozen=True)
class Summary:
    """Of the log-probability of a token, `logit - best - log_total`, all but the logit."""

    best: Tensor
    """float32 [n, 1]: the highest logit."""
    log_total: Tensor
    """float32 [n, 1]: log of the sum of exp(logit - best)."""
    ranks: Tensor
    """int32 [n]: 1 for the token of the highest logit."""
    top_ids: Tensor
    """int64 [n, num_top]: tokens of the highest logits, equal ones in the order of their ids."""


def summarize(logits: Tensor, tokens: Tensor, num_top: int) -> Summary:
    """Of float32 logits [n, V], with the ranks of `tokens` [n]."""
    best = logits.amax(-1, keepdim=True)
    total = (logits - best).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    chosen = logits.gather(1, tokens[:, None].long())
    ranks = (logits > chosen).sum(-1, dtype=torch.int32) + 1
    return Summary(best, total.log_().float(), ranks, _top_ids(logits, num_top))


def _top_ids(logits: Tensor, count: int) -> Tensor:
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    if count + TIE_MARGIN >= logits.shape[1]:
        return logits.sort(stable=True, dim=-1, descending=True).indices[:, :count]
    ids = logits.topk(count + TIE_MARGIN).indices.sort(-1).values
    order = logits.gather(1, ids).sort(stable=True, dim=-1, descending=True).indices[:, :count]
    return ids.gather(1, order)
