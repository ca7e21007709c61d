"""Embeddings and the output head are the same for any number of ranks, also with padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.parallel import Parallel
from tests.layers.ranks import build_for, on_ranks

DIM = 6


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [12, 13])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_vocabulary_is_divided_without_loss(size: int, vocab_size: int, tied: bool) -> None:
    """13 entries on 2 or 5 ranks leave padding, which must not be looked up nor become a logit."""
    table, head = torch.randn(vocab_size, DIM), torch.randn(vocab_size, DIM)
    ids, hidden = torch.arange(vocab_size), torch.randn(3, DIM)

    def work(parallel: Parallel) -> tuple[torch.Tensor, ...]:
        build = build_for(parallel)
        embedding = VocabEmbedding(vocab_size, DIM, build)
        embedding.load("weight", (), table)
        lm_head = LMHead(vocab_size, DIM, build, embedding if tied else None)
        if not tied:
            lm_head.load("weight", (), head)
        shard = lm_head(hidden)
        return embedding(ids), lm_head.gather(shard), lm_head.gather_argmax(shard)

    for embedded, logits, highest in on_ranks(size, work):
        assert torch.equal(embedded, table)
        expected = F.linear(hidden, table if tied else head)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert highest.tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_highest_logit_of_several_ranks(size: int, dtype: torch.dtype) -> None:
    """The lowest id of several, and never padding, whose logits are zeros above negative ones. 8
    ids on 5 ranks leave the last one none."""
    lines = torch.tensor(
        [
            [-5.0, -1.0, -2.0, -1.0, -9.0, -1.0, -3.0, -4.0],
            [3.0] * 8,
            [-torch.inf] * 5 + [-7.0, -torch.inf, -7.0],
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        ]
    ).to(dtype)

    def work(parallel: Parallel) -> list[int]:
        lm_head = LMHead(8, DIM, build_for(parallel))
        share = parallel.share(8)
        shard = torch.zeros(len(lines), share, dtype=dtype)
        own = lines[:, parallel.rank * share :][:, :share]
        shard[:, : own.shape[1]] = own
        return lm_head.gather_argmax(shard).tolist()

    assert on_ranks(size, work) == [[1, 0, 5, 7]] * size


def test_tied_head_owns_no_weight() -> None:
    """So that the loader expects none and no memory is taken twice."""
    embedding = VocabEmbedding(12, DIM, build_for())
    lm_head = LMHead(12, DIM, build_for(), embedding)
    assert not lm_head.axes and not list(lm_head.parameters())
