"""The experts of each token, by the logits of a router: one program for a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.config.experts import ExpertsConfig
from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.torch.experts import Routing

SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID = 0, 1, 2
SCORINGS = {"softmax": SOFTMAX, "softmax_of_chosen": SOFTMAX_OF_CHOSEN, "sigmoid": SIGMOID}
_SOFTMAX_OF_CHOSEN, _SIGMOID = tl.constexpr(SOFTMAX_OF_CHOSEN), tl.constexpr(SIGMOID)
_TAKEN = tl.constexpr(-(2**63))
"""Below the key of every number."""


@triton.jit
def _keys(ranked, order):
    """Integers in the order of the float32 numbers `ranked`; of equals the first in `order` is the
    largest. No two are the same, whatever the numbers, so that nothing is chosen twice."""
    bits = ranked.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - order).to(tl.int64)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    factor,
    stride_logits,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALIZES: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    places = tl.arange(0, SIZE)
    numbers = groups[:, None] * GROUP_SIZE + places[None, :]
    exists = (groups < NUM_GROUPS)[:, None] & (places < GROUP_SIZE)[None, :]
    wait_for_inputs(OVERLAPS)
    logits = tl.load(logits_ptr + token * stride_logits + numbers, exists, float("-inf"))
    scores = logits.to(tl.float32)
    if SCORING == _SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
        ranked = scores + tl.load(bias_ptr + numbers, exists, 0.0)
    else:
        if SCORING != _SOFTMAX_OF_CHOSEN:
            scores = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
            scores = scores / tl.sum(tl.sum(scores, 1), 0)
        ranked = scores
    keys = tl.where(exists, _keys(ranked, numbers), _TAKEN)
    if TOP_GROUPS < NUM_GROUPS:
        best = tl.max(tl.where(exists, ranked, float("-inf")), 1)
        if SCORING == _SIGMOID and GROUP_SIZE > 1:
            is_first = keys == tl.max(keys, 1)[:, None]
            best += tl.max(tl.where(exists & ~is_first, ranked, float("-inf")), 1)
        group_keys = tl.where(groups < NUM_GROUPS, _keys(best, groups), _TAKEN)
        is_open = groups < 0
        for _ in tl.static_range(TOP_GROUPS):
            is_next = group_keys == tl.max(group_keys, 0)
            is_open = is_open | is_next
            group_keys = tl.where(is_next, _TAKEN, group_keys)
        keys = tl.where(is_open[:, None], keys, _TAKEN)
    keys = tl.reshape(keys, [GROUPS * SIZE])
    scores = tl.reshape(scores, [GROUPS * SIZE])
    slots = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    weights = tl.full([SLOTS], float("-inf") if SCORING == _SOFTMAX_OF_CHOSEN else 0.0, tl.float32)
    for slot in tl.static_range(TOP_K):
        best_key = tl.max(keys, 0)
        is_best = keys == best_key
        number = 0x7FFFFFFF - (best_key & 0xFFFFFFFF).to(tl.int32)
        weight = tl.sum(tl.where(is_best, scores, 0.0), 0)
        chosen = tl.where(slots == slot, number, chosen)
        weights = tl.where(slots == slot, weight, weights)
        keys = tl.where(is_best, _TAKEN, keys)
    if SCORING == _SOFTMAX_OF_CHOSEN:
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    elif NORMALIZES:
        # As the references: what sigmoid leaves may be nothing at all.
        weights = weights / (tl.sum(weights, 0) + (1e-20 if SCORING == _SIGMOID else 0.0))
    at = token * TOP_K + slots
    tl.store(experts_ptr + at, chosen, slots < TOP_K)
    tl.store(weights_ptr + at, weights * factor, slots < TOP_K)


def route(logits: Tensor, config: ExpertsConfig, bias: Tensor | None = None) -> Routing:
    """The experts of each token by its router logits [tokens, experts], of equals the first;
    `bias` float32 [experts] is the score correction of sigmoid routers."""
    num_tokens = len(logits)
    shape = num_tokens, config.top_k
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    # Groups matter where some of them are closed alone.
    num_groups = config.num_groups if config.top_groups < config.num_groups else 1
    if config.scoring == "softmax_of_chosen":
        num_groups = 1
    group_size = config.count // num_groups
    _route_kernel[(num_tokens,)](
        logits,
        bias,
        experts,
        weights,
        float(config.factor),
        logits.stride(0),
        GROUP_SIZE=group_size,
        NUM_GROUPS=num_groups,
        TOP_GROUPS=min(config.top_groups, num_groups),
        TOP_K=config.top_k,
        SCORING=SCORINGS[config.scoring],
        NORMALIZES=config.normalizes,
        GROUPS=triton.next_power_of_2(num_groups),
        SIZE=triton.next_power_of_2(group_size),
        SLOTS=triton.next_power_of_2(config.top_k),
        num_warps=1 if config.count <= 256 else 2,
        **launch_options(logits),
    )
    return Routing(experts, weights)
