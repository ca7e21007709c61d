"""What the log-probabilities of some tokens need to know of whole lines of scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# topk orders equal scores as it likes; with a few more than asked for, all ties at the end of the
# list are nearly always in view, and the lowest ids among them are reported.
TIE_MARGIN = 8


@dataclass(frozen=True)
class Summary:
    """Of the log-probability of a token, `score - best - log_total`, all but the score."""

    best: Tensor
    """float32 [n, 1]: the highest score."""
    log_total: Tensor
    """float32 [n, 1]: log of the sum of exp(score - best)."""
    ranks: Tensor
    """int32 [n]: 1 for the token of the highest score."""
    top_ids: Tensor
    """int64 [n, num_top]: tokens of the highest scores, equal ones in the order of their ids."""


def summarize(scores: Tensor, tokens: Tensor, num_top: int) -> Summary:
    """Of float32 scores [n, V], with the ranks of `tokens` [n]."""
    best = scores.amax(-1, keepdim=True)
    total = (scores - best).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    chosen = scores.gather(1, tokens[:, None].long())
    ranks = (scores > chosen).sum(-1, dtype=torch.int32) + 1
    return Summary(best, total.log_().float(), ranks, _top_ids(scores, num_top))


def _top_ids(scores: Tensor, count: int) -> Tensor:
    if count == 0:
        return torch.empty((len(scores), 0), dtype=torch.int64, device=scores.device)
    if count + TIE_MARGIN >= scores.shape[1]:
        return scores.sort(stable=True, dim=-1, descending=True).indices[:, :count]
    ids = scores.topk(count + TIE_MARGIN).indices.sort(-1).values
    order = scores.gather(1, ids).sort(stable=True, dim=-1, descending=True).indices[:, :count]
    return ids.gather(1, order)
