"""The same request gives the same bits whatever shares its batch and whichever row it has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.protocol.sampling import SamplingParams
from tests.decoding.table import Sketch, Table, random_logits

VOCAB = 5000
STEPS = 6
MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.2, top_k=50, presence_penalty=0.5),
    SamplingParams(temperature=0.7, min_p=0.05, logit_bias={3: 1.5}),
    SamplingParams(temperature=1.0, top_k=1500, repetition_penalty=1.1),
    SamplingParams(temperature=1.0, top_p=0.999, allowed_token_ids=list(range(0, VOCAB, 3))),
]


def neighbours(count: int) -> list[Sketch]:
    return [Sketch(MIXED[i % 7].clone(), [i, i + 1], seed=1000 + i) for i in range(count)]


def generate(
    subject: Sketch, others: list[Sketch], row: int, line: int
) -> tuple[list[int], list[np.ndarray]]:
    """The subject's tokens and logprobs, with `others` around it."""
    rows = [r for r in range(len(others) + 1 + row) if r != row][: len(others)]
    rows.insert(line, row)
    requests = [*others[:line], subject, *others[line:]]
    table = Table(VOCAB, max_rows=max(rows) + 1)
    for r, request in zip(rows, requests, strict=True):
        table.add(r, request, num_logprobs=2)
    tokens, logprobs = [], []
    for step in range(STEPS):
        logits = random_logits(100 + step, len(rows), VOCAB)
        logits[line] = random_logits(step, VOCAB)
        sampled = table.sample(logits, rows)
        tokens.append(int(sampled.tokens[line]))
        assert sampled.logprobs is not None
        logprobs.append(sampled.logprobs.to_host().logprobs[line])
        table.append(rows, sampled.tokens)
    return tokens, logprobs


@pytest.mark.parametrize("index", range(len(MIXED)))
def test_alone_in_a_batch_and_in_another_row(kernels, index):
    subject = Sketch(MIXED[index].clone(), [4, 5, 6], seed=42)
    tokens, logprobs = generate(subject, [], row=0, line=0)
    for others, row, line in ((31, 5, 5), (31, 40, 31), (3, 1, 0)):
        got_tokens, got_logprobs = generate(subject, neighbours(others), row, line)
        assert got_tokens == tokens
        assert all(np.array_equal(a, b) for a, b in zip(got_logprobs, logprobs, strict=True))


def test_preempted_and_added_again_goes_on_alike():
    """A request that comes back in another row, with its tokens, continues as if never gone."""
    subject = Sketch(
        SamplingParams(
            top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=4, logprobs=None
        ),
        [4, 5, 6],
        seed=42,
        stop_token_ids=(1, 2),
    )
    whole = generate(subject, neighbours(3), row=0, line=0)[0]
    table = Table(VOCAB)
    table.add(2, subject)
    row = 2
    for step in range(STEPS):
        sampled = table.sample(random_logits(step, 1, VOCAB), [row])
        table.append([row], sampled.tokens)
        subject.generated.append(int(sampled.tokens[0]))
        if step == 2:
            table.sampler.remove(2)
            row = 6
            table.add(row, subject)
    assert subject.generated == whole


def test_reused_row_buffers_are_not_remembered():
    """The runner may overwrite its arrays of rows between steps."""
    table = Table(VOCAB)
    table.add(0, Sketch(SamplingParams(allowed_token_ids=[7], temperature=0.0), [1]))
    table.add(1, Sketch(SamplingParams(allowed_token_ids=[8], temperature=0.0), [1]))
    rows, host_rows = torch.tensor([0, 1]), np.array([0, 1])
    logits = torch.zeros(2, VOCAB)
    assert table.sampler.sample(logits, rows, host_rows).tokens.tolist() == [7, 8]
    rows.copy_(torch.tensor([1, 0]))
    host_rows[:] = 1, 0
    assert table.sampler.sample(logits, rows, host_rows).tokens.tolist() == [8, 7]
