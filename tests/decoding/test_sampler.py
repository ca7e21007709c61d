"""`Sampler` against the plain reference: every feature, alone, together and over time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.decoding import penalties, rows
from quire.protocol.sampling import SamplingParams
from tests.decoding.table import Sketch, Table, random_logits

VOCAB = 40


def params(**kwargs: object) -> SamplingParams:
    words = kwargs.pop("words", [])
    made = SamplingParams(**{"temperature": 0.0, **kwargs})
    made.bad_words_token_ids = words
    return made


def check_generation(requests: list[Sketch], num_steps: int = 12, vocab: int = VOCAB) -> None:
    """All requests together, in scattered rows, token by token against the reference."""
    rows = [2 * i + 1 for i in range(len(requests))]
    table = Table(vocab, max_rows=2 * len(requests) + 1)
    for row, request in zip(rows, requests, strict=True):
        table.add(row, request)
    for step in range(num_steps):
        logits = random_logits(step, len(requests), vocab)
        expected = [r.expected(line) for r, line in zip(requests, logits, strict=True)]
        tokens = table.sample(logits, rows).tokens
        assert tokens.tolist() == expected
        table.append(rows, tokens)
        for request, token in zip(requests, expected, strict=True):
            request.generated.append(token)


def test_greedy_takes_the_highest_logit_and_the_first_of_equals():
    table = Table(5)
    table.add(3, Sketch(params(), [1]))
    assert table.sample(np.array([[0, 7, 2, 7, 1]], np.float32), [3]).tokens.tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_float_type_are_read_and_left_alone(dtype):
    """The caller's logits survive even where features edit logits; tokens are int32."""
    table = Table(VOCAB)
    requests = [
        Sketch(params(), [1]),
        Sketch(params(temperature=0.8, seed=1), [2], seed=5),
        Sketch(params(temperature=0.8, top_p=0.7, logit_bias={3: 2.0}), [2], seed=6),
        Sketch(params(frequency_penalty=1.0, allowed_token_ids=[3, 4, 5]), [2], [3, 3]),
    ]
    for row, request in enumerate(requests):
        table.add(row, request)
    logits = torch.from_numpy(random_logits(0, 4, VOCAB)).to(dtype)
    before = logits.clone()
    tokens = table.sample(logits, [0, 1, 2, 3]).tokens
    expected = [r.expected(logits[i].float().numpy()) for i, r in enumerate(requests)]
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == expected
    assert torch.equal(logits, before)


FEATURES = {
    "greedy": params(),
    "temperature": params(temperature=0.7),
    "hot": params(temperature=2.0),
    "top_k": params(temperature=1.0, top_k=5),
    "top_k_1": params(temperature=1.0, top_k=1),
    "top_p": params(temperature=1.0, top_p=0.6),
    "min_p": params(temperature=1.0, min_p=0.1),
    "all_filters": params(temperature=1.3, top_k=9, top_p=0.8, min_p=0.02),
    "repetition": params(repetition_penalty=1.7),
    "repetition_below_1": params(repetition_penalty=0.6),
    "frequency": params(frequency_penalty=1.1),
    "presence": params(presence_penalty=1.9),
    "negative_penalties": params(presence_penalty=-1.0, frequency_penalty=-0.5),
    "all_penalties": params(
        temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3
    ),
    "bias": params(logit_bias={0: 4.0, 7: -100.0, 9: 5.5}),
    "allowed": params(allowed_token_ids=[0, 3, 4, 11, 39]),
    "bad_word": params(words=[[5], [0], [39]]),
    "bad_words": params(words=[[2, 3], [6, 7, 8], [30], [1, 2, 3, 4, 5, 6, 7]]),
    "min_tokens": params(min_tokens=4),
    "everything": params(
        temperature=0.8,
        top_k=12,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        presence_penalty=0.2,
        logit_bias={4: 3.0, 5: -3.0},
        allowed_token_ids=list(range(3, 30)),
        words=[[9], [4, 5], [4, 6]],
        min_tokens=6,
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_alone(kernels, name):
    request = Sketch(FEATURES[name].clone(), [6, 7, 2, 2, 30], seed=91, stop_token_ids=(0, 3, 12))
    check_generation([request])


def test_all_features_in_one_batch(kernels):
    """A feature touches only the lines that use it."""
    requests = [
        Sketch(p.clone(), [6, 7, i, 2, 30], seed=i << 31 | 7, stop_token_ids=(0, 3, i))
        for i, p in enumerate(FEATURES.values())
    ]
    check_generation(requests, num_steps=20)


some_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, VOCAB]),
    top_p=st.sampled_from([1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.9]),
    min_tokens=st.sampled_from([0, 3]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=6),
    allowed_token_ids=st.none()
    | st.lists(st.integers(0, VOCAB - 1), min_size=8, max_size=30, unique=True),
    words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3),
)


@settings(max_examples=40)
@given(
    st.lists(
        st.builds(
            Sketch,
            params=some_params,
            prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
            generated=st.lists(st.integers(0, VOCAB - 1), max_size=5),
            seed=st.integers(0, 2**64 - 1),
            stop_token_ids=st.sampled_from([(), (2,), (0, 39)]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_random_combinations(requests):
    """Also: a request added with generated tokens (after preemption, or forked) has its counts."""
    check_generation(requests, num_steps=5)


def test_multi_token_bad_word_blocks_only_after_its_prefix():
    table = Table(10)
    table.add(0, Sketch(params(words=[[3, 4, 5]]), [1, 3]))
    likes_5 = np.eye(10, dtype=np.float32)[[5]]
    assert table.sample(likes_5, [0]).tokens.tolist() == [5]
    table.append([0], torch.tensor([4], dtype=torch.int32))
    assert table.sample(likes_5, [0]).tokens.tolist() != [5]
    table.append([0], torch.tensor([4], dtype=torch.int32))
    assert table.sample(likes_5, [0]).tokens.tolist() == [5]


def test_bad_word_longer_than_the_sequence_does_not_match():
    table = Table(10)
    table.add(0, Sketch(params(words=[[0, 0, 0, 5]]), [0, 0]))
    assert table.sample(np.eye(10, dtype=np.float32)[[5]], [0]).tokens.tolist() == [5]


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [50, 1500])
def test_all_tokens_forbidden_still_gives_a_token(kernels, filters, temperature, vocab):
    """The same one alone and in a batch, and without harm to its neighbours."""
    hopeless = Sketch(
        params(temperature=temperature, **filters, allowed_token_ids=[7], words=[[7]]), [1]
    )
    other = Sketch(params(temperature=1.0, top_p=0.5), [1], seed=3)
    table = Table(vocab)
    table.add(0, hopeless)
    table.add(1, other)
    logits = random_logits(1, 2, vocab)
    alone = table.sample(logits[:1], [0]).tokens.tolist()
    assert alone == [0]
    assert table.sample(logits, [0, 1]).tokens.tolist() == [0, other.expected(logits[1])]


def test_row_reuse_leaks_nothing():
    """A plain request in a row that had every feature behaves as in a fresh table."""
    table = Table(VOCAB)
    plain = Sketch(params(temperature=1.0), [3, 4], seed=8)
    for _ in range(2):
        for p in FEATURES.values():
            table.add(2, Sketch(p.clone(), [1, 2, 3], [4, 4], seed=1, stop_token_ids=(5,)), 3)
            table.sample(random_logits(0, 1, VOCAB), [2])
            table.append([2], torch.tensor([9], dtype=torch.int32))
            table.sampler.remove(2)
            table.add(2, plain)
            for step in range(3):
                logits = random_logits(step, 1, VOCAB)
                sampled = table.sample(logits, [2])
                assert sampled.logprobs is None
                assert sampled.tokens.tolist() == [plain.expected(logits[0])]
            table.sampler.remove(2)


def test_penalty_counts_do_not_leak_through_slots():
    """A second penalised request gets the first one's slot and starts from its own tokens."""
    first, second = (Sketch(params(frequency_penalty=2.0), [1]) for _ in range(2))
    table = Table(VOCAB)
    table.add(0, first)
    table.append([0], torch.tensor([9], dtype=torch.int32))
    table.sampler.remove(0)
    table.add(1, second)
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 9] = 1.0
    assert table.sample(logits, [1]).tokens.tolist() == [9]


def test_slots_are_reused():
    """Wide state grows with the rows that use it at one time, not with the requests served."""
    table = Table(VOCAB, max_rows=64)
    penalties = table.sampler._penalties
    wide = FEATURES["everything"]
    for i in range(50):
        table.add(i, Sketch(wide.clone(), [1, 2], seed=i, stop_token_ids=(1,)))
        if i >= 3:
            table.sampler.remove(i - 3)
    assert len(penalties._uses) <= 8


def test_growing_wide_state_keeps_what_it_held():
    """Rows added later, with longer lists, must not disturb those already there."""
    early = [
        Sketch(params(words=[[3]], logit_bias={5: 2.0}, min_tokens=9, presence_penalty=1.0), [3, i])
        for i in range(3)
    ]
    late = [
        Sketch(
            params(
                words=[[1, 2, 3, 4, 5 + j] for j in range(9)],
                logit_bias={j: -float(j) for j in range(20)},
                allowed_token_ids=list(range(25)),
                min_tokens=9,
                presence_penalty=0.5,
            ),
            [1, 2, 3, 4],
            [i],
            stop_token_ids=tuple(range(20, 25)),
        )
        for i in range(9)
    ]
    for request in early:
        request.stop_token_ids = (8,)
    check_generation(early + late, num_steps=6)


def test_min_tokens_ends_where_it_should():
    table = Table(10)
    request = Sketch(params(min_tokens=2), [1, 2, 3], stop_token_ids=(5,))
    table.add(0, request)
    likes_5 = np.eye(10, dtype=np.float32)[[5]]
    got = []
    for _ in range(3):
        tokens = table.sample(likes_5, [0]).tokens
        table.append([0], tokens)
        got.append(tokens.item())
    assert got[0] != 5
    assert got[1] != 5
    assert got[2] == 5


def test_several_tokens_appended_at_once_are_all_counted():
    """Known tokens sent by the host may name a row more than once."""
    table = Table(VOCAB)
    table.add(0, Sketch(params(frequency_penalty=1.0), [1]))
    table.sampler.appended(torch.tensor([0, 0, 5, 0]), torch.tensor([3, 3, 3, 4]))
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [3, 4]] = 1.9, 0.95
    assert table.sample(logits, [0]).tokens.tolist() == [0]


def test_no_lines_at_all():
    table = Table(VOCAB)
    assert table.sample(np.empty((0, VOCAB), np.float32), []).tokens.shape == (0,)


def test_no_memory_for_one_more_row_leaves_room_for_those_that_come_after_others(monkeypatch):
    """A row that found no memory is removed; a later one takes the place of one that left."""
    table = Table(VOCAB)
    requests = [Sketch(params(repetition_penalty=1.5), [3 + i]) for i in range(8)]

    def full(tensor: torch.Tensor, shape: tuple[int, ...], fill: float) -> torch.Tensor:
        if len(tensor) >= shape[0]:
            return tensor
        if len(tensor) >= 4:
            raise torch.OutOfMemoryError("no memory")
        return rows.fit(tensor, shape, fill)

    monkeypatch.setattr(penalties, "fit", full)
    for row in range(3):
        table.add(row, requests[row])
    with pytest.raises(torch.OutOfMemoryError):
        table.add(3, requests[3])
    for row in (3, 1):
        table.sampler.remove(row)
    table.add(4, requests[4])
    logits = random_logits(0, 3, VOCAB)
    expected = [requests[row].expected(line) for row, line in zip((0, 2, 4), logits, strict=True)]
    assert table.sample(logits, [0, 2, 4]).tokens.tolist() == expected
