"""Random paged batches full of traps, and dense attention in float64 to compare with.

Every slot of the cache that no query may see is NaN: what lies behind a request's last token,
before its window, in blocks without an owner. Table entries without a visible token point to such a
block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.layers.attention.backend import AttentionBackend, AttentionInputs
from quire.layers.attention.layer import QKV
from quire.worker.rows import Staging


@dataclass(frozen=True)
class Case:
    """A step as pairs of (new tokens, tokens in the cache with them), and the model's shape."""

    requests: tuple[tuple[int, int], ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    seed: int = 0
    narrow: bool = False
    """Whether keys and values are in float16, whatever the type of queries."""

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def sinks(self) -> Tensor | None:
        """Some far above, some far below the scores."""
        if not self.has_sinks:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        return 5 * torch.randn(self.num_heads, generator=generator)

    def first_visible(self, request: int) -> int:
        """The oldest position that any query of the request sees."""
        num_queries, context = self.requests[request]
        return 0 if self.window is None else max(0, context - num_queries + 1 - self.window)


@dataclass
class Pages:
    """The tensors of a case."""

    q: Tensor
    kv_layer: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.kv_layer, self.query_start, self.context_lens, self.block_tables

    def new_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the step's tokens, in the type of queries, and their slots."""
        counts = self.query_start.diff().tolist()
        keys = [k[len(k) - n :] for k, n in zip(self.keys, counts, strict=True)]
        values = [v[len(v) - n :] for v, n in zip(self.values, counts, strict=True)]
        block_size = self.kv_layer.shape[3]
        places = [
            (table.long()[p // block_size] * block_size + p % block_size)
            for table, k, n in zip(self.block_tables, self.keys, counts, strict=True)
            for p in [torch.arange(len(k) - n, len(k))]
        ]
        none = self.q.new_empty(0, *self.kv_layer.shape[2:5:2])
        k, v = (torch.cat([none, *(x.to(self.q.dtype) for x in xs)]) for xs in (keys, values))
        return k, v, torch.cat([torch.empty(0, dtype=torch.int64), *places])


@dataclass
class Step:
    """A step of one layer, as the engine has a backend carry it out."""

    backend: type[AttentionBackend]
    kv_layer: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slots: Tensor

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        _, _, num_kv_heads, block_size, head_dim = self.kv_layer.shape
        layers = self.kv_layer.unsqueeze(0)
        backend = self.backend(layers, q.shape[1], num_kv_heads, head_dim, block_size)
        inputs = AttentionInputs(
            query_start=self.query_start,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            slots=self.slots,
            query_lens=np.diff(self.query_start.numpy()),
            send=Staging(torch.device("cpu")).send,
        )
        return backend.plan(inputs).attend(0, QKV(q, k, v), scale, window, softcap, sinks)


def attend(backend: type[AttentionBackend], case: Case, pages: Pages) -> Tensor:
    """Attention of a case by a backend, which also has to store the step's keys and values."""
    q, kv_layer, *where = pages.arguments()
    k, v, slots = pages.new_tokens()
    block_size = case.block_size
    kv_layer[:, slots // block_size, :, slots % block_size] = torch.nan
    step = Step(backend, kv_layer, *where, slots)
    return step.attend(q, k, v, case.scale, case.window, case.softcap, case.sinks)


def slot(pages: Pages, request: int, position: int) -> tuple[int, int]:
    """Block and offset of a token."""
    block_size = pages.kv_layer.shape[3]
    return int(pages.block_tables[request, position // block_size]), position % block_size


def make_pages(case: Case, dtype: torch.dtype = torch.float32) -> Pages:
    """Each request's tensors are drawn from its own numbers, so they are the same in any batch."""
    generators = [
        torch.Generator().manual_seed(hash((case.seed, *request)) % 2**31)
        for request in case.requests
    ]

    kept = torch.float16 if case.narrow else dtype

    def draw(count: int, heads: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, heads, case.head_dim, generator=generator)

    queries, keys, values = [], [], []
    for (num_queries, context), generator in zip(case.requests, generators, strict=True):
        queries.append(draw(num_queries, case.num_heads, generator).to(dtype))
        keys.append(draw(context, case.num_kv_heads, generator).to(kept))
        values.append(draw(context, case.num_kv_heads, generator).to(kept))
    counts = [-(-context // case.block_size) for _, context in case.requests]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(case.seed)).tolist()
    unowned = order.pop()
    tables = torch.full((len(counts), max(counts, default=0) + 1), unowned, dtype=torch.int32)
    kv_layer = torch.full(
        (2, num_blocks, case.num_kv_heads, case.block_size, case.head_dim), torch.nan, dtype=kept
    )
    starts = [0]
    for num_queries, _ in case.requests:
        starts.append(starts[-1] + num_queries)
    pages = Pages(
        q=torch.cat([*queries, torch.empty(0, case.num_heads, case.head_dim, dtype=dtype)]),
        kv_layer=kv_layer,
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in case.requests], dtype=torch.int32),
        block_tables=tables,
        keys=keys,
        values=values,
    )
    for request, (_, context) in enumerate(case.requests):
        first = case.first_visible(request)
        for block in range(first // case.block_size, counts[request]):
            tables[request, block] = order.pop()
        for position in range(first, context):
            block, offset = slot(pages, request, position)
            kv_layer[0, block, :, offset] = keys[request][position]
            kv_layer[1, block, :, offset] = values[request][position]
    return pages


def dense_attention(case: Case, pages: Pages) -> Tensor:
    """The expected result, from contiguous keys and values and in float64."""
    outs = [torch.empty(0, case.num_heads, case.head_dim, dtype=torch.float64)]
    group = case.num_heads // case.num_kv_heads
    for request, (num_queries, context) in enumerate(case.requests):
        if num_queries == 0:
            continue
        start = int(pages.query_start[request])
        q = pages.q[start : start + num_queries].double().transpose(0, 1)
        k = pages.keys[request].double().transpose(0, 1).repeat_interleave(group, 0)
        v = pages.values[request].double().transpose(0, 1).repeat_interleave(group, 0)
        position = torch.arange(context - num_queries, context)[:, None]
        key = torch.arange(context)[None, :]
        seen = key <= position
        if case.window is not None:
            seen &= key > position - case.window
        if case.softcap is None and not case.has_sinks:
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=case.scale)
        else:
            scores = q @ k.transpose(1, 2) * case.scale
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            weights = scores.masked_fill(~seen, -torch.inf).exp()
            total = weights.sum(-1, keepdim=True)
            if case.sinks is not None:
                total += case.sinks.double().exp()[:, None, None]
            out = weights / total @ v
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)
