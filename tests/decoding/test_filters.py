"""The sets that top_k, top_p and min_p keep, whichever way they are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.torch import sampling
from quire.protocol.sampling import SamplingParams
from tests.decoding import reference
from tests.decoding.table import Sketch, Table, random_logits

TOP_K = (0, 1, 2, 17, 200)
TOP_P = (1.0, 0.999, 0.9, 0.4, 1e-6)
MIN_P = (0.0, 1e-4, 0.2, 1.0)
COMBINATIONS = [(k, p, m) for k in TOP_K for p in TOP_P for m in MIN_P]


def cutoffs(logits: np.ndarray) -> torch.Tensor:
    """Of a line for each of the combinations."""
    top_k, top_p, min_p = map(torch.tensor, zip(*COMBINATIONS, strict=True))
    ordered = torch.from_numpy(logits).sort(-1, descending=True).values
    return sampling.cutoffs(ordered, top_k, top_p, min_p.log())


@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_kept_sets_equal_the_reference(spread):
    logits = random_logits(5, len(COMBINATIONS), 150, spread=spread)
    logits[:, 20:40] = -np.inf
    for line, limit, combination in zip(logits, cutoffs(logits), COMBINATIONS, strict=True):
        kept = set(np.flatnonzero((line >= limit.numpy()) & (line > -np.inf)).tolist())
        assert kept == reference.kept_tokens(line, *combination), combination


def test_equal_logits_stay_or_go_together():
    """Rounded logits have many ties; the kept set must not depend on the order of a sort."""
    logits = np.round(random_logits(6, len(COMBINATIONS), 150, spread=2.0))
    for line, limit, combination in zip(logits, cutoffs(logits), COMBINATIONS, strict=True):
        kept = set(np.flatnonzero(line >= limit.numpy()).tolist())
        assert kept == reference.kept_tokens(line, *combination), combination


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("ties", [False, True])
def test_lines_choose_alike_in_any_batch(monkeypatch, without_library, spread, ties):
    """In torch: all lines at once, in pieces that bound memory, or alone."""
    vocab = 6000
    logits = random_logits(7, len(COMBINATIONS), vocab, spread=spread)
    if ties:
        logits = np.round(logits * 4) / 4
    rows = list(range(len(COMBINATIONS)))
    table = Table(vocab, max_rows=len(rows))
    for row, (k, p, m) in zip(rows, COMBINATIONS, strict=True):
        params = SamplingParams(top_k=k, top_p=p, min_p=m, temperature=0.9)
        table.add(row, Sketch(params, [row], seed=row))
    together = table.sample(logits, rows).tokens
    alone = [table.sample(logits[row : row + 1], [row]).tokens.item() for row in rows[::7]]
    monkeypatch.setattr(sampling, "MAX_ELEMENTS", 7 * vocab)
    assert torch.equal(together, table.sample(logits, rows).tokens)
    assert together.tolist()[::7] == alone


def test_every_kept_token_is_drawn_and_no_other(kernels):
    vocab, num_draws = 30, 3000
    logits = random_logits(8, 1, vocab, spread=1.0)
    table = Table(vocab, max_rows=num_draws)
    params = SamplingParams(top_k=8, top_p=0.85, min_p=0.05)
    for row in range(num_draws):
        table.add(row, Sketch(params, [1], seed=row))
    tokens = table.sample(np.repeat(logits, num_draws, 0), list(range(num_draws))).tokens
    assert set(tokens.tolist()) == reference.kept_tokens(logits[0], 8, 0.85, 0.05)


def test_top_k_1_is_greedy_even_among_ties(kernels):
    table = Table(6)
    logits = np.array([[1, 5, 5, 5, 0, 5]], np.float32)
    for seed in range(20):
        table.add(0, Sketch(SamplingParams(top_k=1), [1], seed=seed))
        assert table.sample(logits, [0]).tokens.tolist() == [1]
