"""References for mixtures of experts: which experts a token chooses, and what they compute."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.experts import ClampedGate


class Routing(NamedTuple):
    """The experts of each token and their weights."""

    experts: Tensor
    """int32 [tokens, top_k], no expert twice."""
    weights: Tensor
    """float32 [tokens, top_k]."""


def softmax_then_top_k(logits: Tensor, top_k: int, normalizes: bool) -> Routing:
    """Weights are probabilities among all experts; those of a token sum up to 1 if `normalizes`."""
    weights, experts = logits.float().softmax(-1).topk(top_k)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts.int(), weights)


def softmax_in_groups(
    logits: Tensor, top_k: int, num_groups: int, top_groups: int, normalizes: bool
) -> Routing:
    """As `softmax_then_top_k`, within the groups that have the best experts."""
    ranked = logits.float().softmax(-1).unflatten(-1, (num_groups, -1))
    ranked = _of_best_groups(ranked, ranked.amax(-1), top_groups)
    weights, experts = ranked.flatten(-2).topk(top_k)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts.int(), weights)


def top_k_then_softmax(logits: Tensor, top_k: int) -> Routing:
    """Weights are probabilities among the chosen experts."""
    chosen, experts = logits.float().topk(top_k)
    return Routing(experts.int(), chosen.softmax(-1))


def sigmoid_in_groups(
    logits: Tensor, bias: Tensor, top_k: int, num_groups: int, top_groups: int, normalizes: bool
) -> Routing:
    """Experts are the top-k by score + bias, within the groups whose two best have the largest
    sums; the weights are scores without the bias."""
    scores = logits.float().sigmoid()
    ranked = (scores + bias).unflatten(-1, (num_groups, -1))
    best = ranked.topk(min(2, ranked.shape[-1]), -1).values.sum(-1)
    ranked = _of_best_groups(ranked, best, top_groups)
    experts = ranked.flatten(-2).topk(top_k).indices
    weights = scores.gather(-1, experts)
    if normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts.int(), weights)


def _of_best_groups(ranked: Tensor, best: Tensor, top_groups: int) -> Tensor:
    """`ranked` [tokens, groups, experts] with -inf in all groups but those that are `best`."""
    if top_groups == best.shape[-1]:
        return ranked
    groups = best.topk(top_groups).indices
    is_open = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, groups, True)
    return ranked.masked_fill(~is_open.unsqueeze(-1), -torch.inf)


def clamped_gate_and_mul(gate_up: Tensor, gate: ClampedGate) -> Tensor:
    """What `gate` makes of gate and up joined in the last dimension."""
    gates, up = gate_up.chunk(2, -1)
    gates, up = gates.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return gates * torch.sigmoid(gate.slope * gates) * (up + 1)


def expert_mlp(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    first_expert: int = 0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate: ClampedGate | None = None,
) -> Tensor:
    """The weighted sum over a token's experts of silu(x G^T) * (x U^T) times D^T.

    `gate_up` [experts, 2 * width, hidden] has the rows of G, then those of U; `down` is [experts,
    hidden, width]. The first of these experts is number `first_expert`; what tokens choose beyond
    them is left out.

    Biases are [experts, 2 * width] and [experts, hidden]. A `gate` takes the place of
    silu(gate) * up.
    """
    top_k = routing.experts.shape[1]
    chosen = routing.experts.flatten() - first_expert
    results = x.new_zeros(len(chosen), x.shape[1])
    for expert in range(len(gate_up)):
        pairs = (chosen == expert).nonzero().squeeze(1)
        if len(pairs):
            biases = (None if one is None else one[expert] for one in (gate_up_bias, down_bias))
            first_bias, second_bias = biases
            inner = F.linear(x[pairs // top_k], gate_up[expert], first_bias)
            if gate is None:
                gates, up = inner.chunk(2, -1)
                inner = F.silu(gates) * up
            else:
                inner = clamped_gate_and_mul(inner, gate)
            results[pairs] = F.linear(inner, down[expert], second_bias)
    return weighted_sum(results, routing.weights)


def weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """[tokens * top_k, hidden] and weights [tokens, top_k] -> [tokens, hidden]."""
    by_token = results.view(*weights.shape, results.shape[-1])
    return (by_token.float() * weights.unsqueeze(-1)).sum(1).to(results.dtype)
