"""Experts of a sparse layer, and the router in front of them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import SPARSE_SHAPES, Sparse
from kernel_cases.case import DEVICE, Call, Case, Sides, check_close, copies_of, random
from quire.config.experts import ExpertsConfig
from quire.kernels.torch import experts as references
from quire.kernels.torch.experts import Routing
from quire.kernels.triton.experts import expert_mlp
from quire.kernels.triton.routing import route


def sparse_layer(model: str) -> tuple[int, Sparse]:
    """Its hidden size and its experts."""
    shape = SPARSE_SHAPES[model]
    assert shape.sparse is not None
    return shape.hidden, shape.sparse


def routing(sparse: Sparse, num_tokens: int) -> Case:
    config = ExpertsConfig(sparse.count, sparse.top_k, sparse.width, (True,))
    num_bytes = num_tokens * (2 * sparse.count + 8 * sparse.top_k)

    def make() -> Sides:
        copies = copies_of(num_bytes)
        logits = random(copies, num_tokens, sparse.count)

        def torchs(copy: int) -> Routing:
            return references.softmax_then_top_k(logits[copy], sparse.top_k, True)

        def check() -> None:
            # Of logits in 16 bits many are equal, so that the choice may differ.
            check_close(route(logits[0], config).weights, torchs(0).weights)

        return Sides(
            [partial(route, logits[i], config) for i in range(copies)],
            [partial(torchs, i) for i in range(copies)],
            check,
        )

    return Case(f"{num_tokens:,} x {sparse.top_k} of {sparse.count}", num_bytes, 0, False, make)


def experts(sparse: Sparse, hidden: int, num_tokens: int) -> Case:
    """Tokens choose among all experts alike: the share of the ceiling counts each that is met at
    least once on average."""
    num_pairs = num_tokens * sparse.top_k
    met = sparse.count * (1 - (1 - sparse.top_k / sparse.count) ** num_tokens)
    expert_weights = 3 * sparse.width * hidden
    num_bytes = int(2 * (met * expert_weights + 2 * num_tokens * hidden))

    def make() -> Sides:
        copies = copies_of(num_bytes)
        gate_up = random(sparse.count, 2 * sparse.width, hidden) / hidden**0.5
        down = random(sparse.count, hidden, sparse.width) / sparse.width**0.5
        x = random(copies, num_tokens, hidden)
        choices = torch.rand(copies, num_tokens, sparse.count, device=DEVICE).topk(sparse.top_k)
        chosen = choices.indices.int()
        weights = torch.rand(chosen.shape, device=DEVICE)

        def ours(copy: int) -> Call:
            return partial(expert_mlp, x[copy], Routing(chosen[copy], weights[copy]), gate_up, down)

        def torchs(copy: int) -> Tensor:
            """Sorted by expert, by torch's product of groups."""
            pairs = chosen[copy].flatten()
            order = pairs.argsort()
            numbers = torch.arange(sparse.count, device=DEVICE)
            ends = (pairs[:, None] <= numbers).sum(0).int()
            rows = x[copy][order // sparse.top_k]
            gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
            results = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
            by_pair = torch.empty_like(results).index_copy_(0, order, results)
            return references.weighted_sum(by_pair, weights[copy])

        def check() -> None:
            found, choice = ours(0)(), Routing(chosen[0], weights[0])
            assert isinstance(found, Tensor)
            check_close(found, references.expert_mlp(x[0], choice, gate_up, down))

        return Sides(
            [ours(i) for i in range(copies)], [partial(torchs, i) for i in range(copies)], check
        )

    size = f"{num_tokens:,} x {sparse.top_k} of {sparse.count} x {sparse.width:,}"
    return Case(size, num_bytes, 2 * num_pairs * expert_weights, False, make)
