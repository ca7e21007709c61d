"""Lines that verify drafts: each is sampled as if the drafts before it were known tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.protocol.sampling import SamplingParams
from tests.decoding import reference
from tests.decoding.table import Sketch, Table, random_logits

VOCAB = 40
STOPS = (3, 4)


def params(**kwargs: Any) -> SamplingParams:
    words = kwargs.pop("words", [])
    made = SamplingParams(**{"temperature": 0.0, **kwargs})
    made.bad_words_token_ids = words
    return made


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "filters": {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 3.0},
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 2.0},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.7,
        "frequency_penalty": -1.5,
        "presence_penalty": 1.2,
    },
    "min_tokens": {"min_tokens": 3, "logit_bias": dict.fromkeys(STOPS, 20.0)},
    "bad_words": {"words": [[5], [6, 7], [8, 6, 9]]},
    "logit_bias": {"temperature": 1.0, "logit_bias": {3: 5.0, 9: -5.0}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [3, 5, 6, 7, 8, 9]},
}
# Draft after draft repeats tokens, completes bad words and passes min_tokens.
DRAFTS = ([6, 6, 8, 6], [8, 6], [], [5, 5, 5, 3], [6, 7, 6])


def requests(**kwargs: Any) -> list[Sketch]:
    return [
        Sketch(params(**kwargs), [1, 2, 8, 6][: 1 + i % 4], [6, 5][: i % 3], 77 + i, STOPS)
        for i in range(len(DRAFTS))
    ]


def lines_of(rows: list[int]) -> tuple[list[int], list[int]]:
    """The row of each line and the drafts before it."""
    of = [
        (row, j) for row, drafts in zip(rows, DRAFTS, strict=True) for j in range(len(drafts) + 1)
    ]
    return [row for row, _ in of], [j for _, j in of]


def assert_lines(sketches: list[Sketch], kinds: str) -> list[int]:
    """Every line against the reference with the drafts before it as generated tokens."""
    rows = [5, 1, 3, 6, 0]
    table = Table(VOCAB, max_rows=7)
    for row, sketch, drafts in zip(rows, sketches, DRAFTS, strict=True):
        table.add(row, sketch, num_logprobs=2)
        table.draft(row, drafts)
    line_rows, offsets = lines_of(rows)
    logits = random_logits(len(kinds), len(line_rows), VOCAB, spread=2.0)
    logits[:, [5, 6, 7, 8, 9]] += 2.0  # so that drafted tokens are likely
    expected = []
    for row, offset, line in zip(line_rows, offsets, logits, strict=True):
        sketch, drafts = sketches[rows.index(row)], DRAFTS[rows.index(row)]
        before = [*sketch.generated, *drafts[:offset]]
        seen = Sketch(sketch.params, sketch.prompt, before, sketch.seed, STOPS)
        expected.append(seen.expected(line))
    sampled = table.sample(logits, line_rows, offsets)
    assert sampled.tokens.tolist() == expected
    assert sampled.logprobs is not None
    found = sampled.logprobs.to_host()
    assert found.index.tolist() == list(range(len(line_rows)))
    for line, token, logprob in zip(logits, expected, found.logprobs[:, 0], strict=True):
        assert abs(reference.logprobs(line)[token] - logprob) < 1e-5
    return expected


@pytest.mark.parametrize("kind", FEATURES)
def test_lines_see_the_drafts_before_them(kernels: str, kind: str) -> None:
    assert_lines(requests(**FEATURES[kind]), kind)


def test_lines_of_requests_with_different_features(kernels: str) -> None:
    kinds = ["penalties", "greedy", "bad_words", "frequency", "min_tokens"]
    sketches = [requests(**FEATURES[kind])[i] for i, kind in enumerate(kinds)]
    assert_lines(sketches, "mixed")


@pytest.mark.parametrize("kind", ["repetition", "frequency", "presence", "bad_words", "min_tokens"])
def test_drafts_change_what_later_lines_sample(kind: str) -> None:
    """All lines of a row have the same logits: without drafts in sight they would agree."""
    sketches = requests(**FEATURES[kind])
    table = Table(VOCAB)
    drafts = [6, 6, 8, 6]
    table.add(2, sketches[0])
    table.draft(2, drafts)
    line = np.zeros(VOCAB, np.float32)
    line[[6, 9]] = 3.9, 3.8
    line[7] = 4.0 if kind == "bad_words" else 3.7
    logits = np.stack([line] * 5)
    tokens = table.sample(logits, [2] * 5, range(5)).tokens.tolist()
    assert len(set(tokens)) > 1


def test_accepted_tokens_alone_are_counted() -> None:
    """And after a cut those of the tokens that are left."""
    table = Table(VOCAB)
    sketch = Sketch(params(frequency_penalty=1.0), [1, 6], [6])
    table.add(1, sketch)
    table.add(2, Sketch(params(), [1]))
    tokens = torch.tensor([7, 8, 9, 7], dtype=torch.int32)
    accepted = torch.tensor([True, True, False, True])
    table.token_ids[1, 3:5] = tokens[:2]
    table.num_tokens[1] += 2
    table.sampler.appended(torch.tensor([1, 1, 1, 2]), tokens, accepted)
    sketch.generated += [7, 8]

    def samples_of_flat_logits() -> list[int]:
        """With equal logits the least used token wins, so a bias shows how often one was used."""
        found = []
        for token in (6, 7, 8, 9):
            line = np.zeros((1, VOCAB), np.float32)
            line[0, token] = 0.5
            found.append(int(table.sample(line, [1]).tokens[0]) == token)
        return found

    assert samples_of_flat_logits() == [False, False, False, True]
    table.num_tokens[1] = 4
    table.sampler.cut(1, 4)
    sketch.generated.pop()
    assert samples_of_flat_logits() == [False, False, True, True]
    line = random_logits(0, 1, VOCAB)
    assert table.sample(line, [1]).tokens.tolist() == [sketch.expected(line[0])]
