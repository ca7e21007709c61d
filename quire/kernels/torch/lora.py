"""Low-rank adapters of linear layers and embeddings, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.kernels.adapter_pool import (
    CHUNK_ROWS,
    HAS_BIAS,
    HAS_GAINS,
    AdapterPool,
    AdapterSlice,
    AdapterTokens,
    LayerAdapters,
)


def add_adapters(
    x: Tensor,
    out: Tensor,
    bias: Tensor | None,
    adapters: LayerAdapters,
    tokens: AdapterTokens,
) -> None:
    """Adds to out [tokens, outputs] = x W^T + bias what the adapters of the tokens add to it. Sums
    between A and B are in float32."""
    pool = adapters.pool
    for slot, chosen in _tokens_by_slot(tokens):
        for one in adapters.slices:
            if one.counts[slot] == 0:
                continue
            a, b = adapter_matrices(pool, one, slot)
            delta = (x[chosen].float() @ a.float().t()) @ b.float()
            _add(delta, out, bias, pool, one, slot, chosen)


def add_to_embedding(
    ids: Tensor, out: Tensor, adapters: LayerAdapters, tokens: AdapterTokens
) -> None:
    """Adds to out [tokens, dim], rows of a table, what adapters have for the same rows: B times a
    column of A for each token."""
    pool, (one,) = adapters.pool, adapters.slices
    for slot, chosen in _tokens_by_slot(tokens):
        if one.counts[slot] == 0:
            continue
        a, b = adapter_matrices(pool, one, slot)
        columns = a[:, ids[chosen]].float()
        delta = columns.new_zeros(len(chosen), b.shape[1])
        for row in range(len(b)):  # in the same order for any number of tokens
            delta += columns[row].unsqueeze(1) * b[row].float()
        out[chosen] = (out[chosen].float() + delta).to(out.dtype)


def adapter_matrices(pool: AdapterPool, one: AdapterSlice, slot: int) -> tuple[Tensor, Tensor]:
    """A [rank, inputs] and B [rank, outputs] of the adapter in a slot, with rows of zeros up to
    whole chunks."""
    chosen = pool.tables[slot, : int(one.counts[slot])].long()
    chunks = pool.chunks[chosen]
    size_a, size_b = CHUNK_ROWS * one.a_stride, CHUNK_ROWS * one.b_stride
    a = chunks[:, one.a_offset : one.a_offset + size_a].reshape(-1, one.a_stride)
    b = chunks[:, one.b_offset : one.b_offset + size_b].reshape(-1, one.b_stride)
    return a[:, : one.num_inputs], b[:, : one.num_outputs]


def _tokens_by_slot(tokens: AdapterTokens) -> Iterator[tuple[int, Tensor]]:
    for slot in tokens.slots.unique().tolist():
        if slot >= 0:
            yield slot, (tokens.slots == slot).nonzero().squeeze(1)


def _add(
    delta: Tensor,
    out: Tensor,
    bias: Tensor | None,
    pool: AdapterPool,
    one: AdapterSlice,
    slot: int,
    chosen: Tensor,
) -> None:
    outputs = slice(one.first, one.first + one.num_outputs)
    product = out[chosen, outputs].float()
    total = product + delta
    first_chunk, vectors = pool.chunks[pool.tables[slot, 0]], int(one.vectors[slot])
    if vectors & HAS_GAINS:
        without = product if bias is None else product - bias[outputs].float()
        gains = first_chunk[one.gains_offset : one.gains_offset + one.num_outputs]
        total = total + gains.float() * without
    if vectors & HAS_BIAS:
        total = total + first_chunk[one.bias_offset : one.bias_offset + one.num_outputs].float()
    out[chosen, outputs] = total.to(out.dtype)
