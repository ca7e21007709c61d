"""Logprobs, ranks and top tokens of sampled and prompt tokens against the plain reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.decoding import logprobs as logprobs_module
from quire.protocol.plan import AddedRow, LogprobArrays
from quire.protocol.sampling import SamplingParams
from tests.decoding import reference
from tests.decoding.table import Sketch, Table, random_logits

VOCAB = 60
IDS = np.array([1], np.int32)


def check_line(
    arrays: LogprobArrays, line: int, logits: NDArray[np.float32], token: int, others: list[int]
) -> None:
    want = reference.logprobs(logits)
    ids = arrays.token_ids[line].tolist()
    assert ids == [token, *others, *[-1] * (len(ids) - 1 - len(others))]
    used = 1 + len(others)
    np.testing.assert_allclose(arrays.logprobs[line, :used], want[ids[:used]], atol=2e-6)
    assert (arrays.logprobs[line, used:] == -np.inf).all()
    assert arrays.ranks[line] == reference.rank(logits, token)


def top(logits: NDArray[np.float32], count: int) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("max_lines", [3, 256])
def test_sampled_tokens(kernels, monkeypatch, ties, max_lines):
    """Each line gets what it asked for: nothing, the token alone, k of them, all, or named ids."""
    monkeypatch.setattr(logprobs_module, "MAX_LINES", max_lines)
    wanted = [-1, 0, 1, 5, 0, VOCAB, 20, 0, 3]
    named = {4: [9, 2, 2, 59], 7: [0]}
    table = Table(VOCAB, max_rows=20)
    rows = [3, 17, 2, 8, 9, 10, 11, 0, 5]
    for row, (line, count) in zip(rows, enumerate(wanted), strict=True):
        params = SamplingParams(temperature=line % 3, logprob_token_ids=named.get(line))
        table.add(row, Sketch(params, [1], seed=line), num_logprobs=count)
    logits = random_logits(0, len(rows), VOCAB)
    if ties:
        logits = np.round(logits)
    sampled = table.sample(logits, rows)
    assert sampled.logprobs is not None
    arrays = sampled.logprobs.to_host()
    assert arrays.index.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [a.dtype for a in (arrays.index, arrays.token_ids, arrays.ranks)] == [np.int32] * 3
    assert arrays.logprobs.dtype == np.float32
    for i, line in enumerate(arrays.index):
        others = named.get(line, top(logits[line], wanted[line]))
        check_line(arrays, i, logits[line], int(sampled.tokens[line]), others)


def test_raw_logits_are_reported_not_processed_ones():
    table = Table(VOCAB)
    params = SamplingParams(
        temperature=0.3, top_k=2, logit_bias={5: 50.0}, repetition_penalty=3.0, min_p=0.5
    )
    table.add(0, Sketch(params, [1, 2, 3]), num_logprobs=4)
    logits = random_logits(1, 1, VOCAB)
    sampled = table.sample(logits, [0])
    assert sampled.tokens.tolist() == [5]
    assert sampled.logprobs is not None
    check_line(sampled.logprobs.to_host(), 0, logits[0], 5, top(logits[0], 4))


def test_width_is_that_of_the_batch():
    """A line that wants many logprobs costs columns only in the steps it takes part in."""
    table = Table(VOCAB)
    table.add(0, Sketch(SamplingParams(temperature=0.0), [1]), num_logprobs=2)
    table.add(1, Sketch(SamplingParams(temperature=0.0), [1]), num_logprobs=30)
    logits = random_logits(2, 2, VOCAB)
    both, one = table.sample(logits, [0, 1]).logprobs, table.sample(logits[:1], [0]).logprobs
    assert both is not None
    assert one is not None
    assert both.token_ids.shape == (2, 31)
    assert one.token_ids.shape == (1, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_lines", [1, 9, 40])
@pytest.mark.parametrize("count", [0, 3, VOCAB])
def test_prompt_tokens(kernels, dtype, num_lines, count):
    added = AddedRow(2, IDS, 1, 0, SamplingParams(), seed=0, num_prompt_logprobs=count)
    logits = torch.from_numpy(random_logits(3, num_lines, VOCAB)).to(dtype)
    targets = np.random.default_rng(4).integers(0, VOCAB, num_lines, dtype=np.int32)
    positions = np.arange(7, 7 + num_lines, dtype=np.int32)
    found = logprobs_module.measure_prompt(added, logits, torch.from_numpy(targets), positions)
    arrays = found.to_host()
    assert arrays.index.tolist() == positions.tolist()
    assert arrays.token_ids.shape == (num_lines, 1 + count)
    exact = logits.float().numpy()
    for line in range(0, num_lines, 13):
        others = top(exact[line], count)
        check_line(arrays, line, exact[line], int(targets[line]), others)


def test_prompt_tokens_by_id(kernels):
    params = SamplingParams(prompt_logprob_token_ids=[8, 3, 50])
    added = AddedRow(0, IDS, 1, 0, params, seed=0, num_prompt_logprobs=0)
    logits = random_logits(5, 4, VOCAB)
    targets = torch.tensor([5, 6, 7, 8])
    positions = np.arange(4, dtype=np.int32)
    found = logprobs_module.measure_prompt(added, torch.from_numpy(logits), targets, positions)
    arrays = found.to_host()
    for line in range(4):
        check_line(arrays, line, logits[line], 5 + line, [8, 3, 50])
