"""Pooling requests among others: each gets the vector of its own prompt, however it is computed."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from quire.protocol.request import NewRequest
from quire.protocol.sampling import SamplingParams
from tests.engine.driver import Engine, numbers
from tests.engine.toy import entries_of

PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def add_pooling(engine: Engine, prompt: list[int], pooling: str) -> int:
    key = 100 * len(engine.requests)
    new = NewRequest(key, f"r{key}", np.array(prompt, np.int32), PARAMS, 0.0, pooling=pooling)
    engine.requests[key] = new
    engine.core.add(new)
    return key


def expected(prompt: list[int], pooling: str) -> float:
    states = [entry % 1000 for entry in entries_of(prompt)]
    return float(np.float32(states[-1] if pooling == "last" else np.mean(states)))


@pytest.mark.parametrize(
    ("steps_in_flight", "num_stages"), [(1, 1), (2, 1), (4, 1), (2, 2), (3, 3)]
)
@pytest.mark.parametrize("seed", range(6))
def test_vectors_do_not_depend_on_scheduling(
    seed: int, steps_in_flight: int, num_stages: int
) -> None:
    """In chunks, with shared prefixes, preempted, aborted next door, after a failed step."""
    random = Random(seed)
    engine = Engine(
        random.choice([18, 40, 200]),
        steps_in_flight,
        max_num_batched_tokens=random.choice([7, 23, 256]),
        max_num_seqs=6,
        num_stages=num_stages,
    )
    engine.toy.failing_steps = frozenset({random.randint(2, 9)})
    prompts: dict[int, tuple[list[int], str]] = {}
    for i in range(30):
        prompt = numbers(random.choice([0, 12, 20])) + numbers(random.randint(1, 30), start=i)
        if random.random() < 0.6:
            pooling = random.choice(["mean", "last"])
            prompts[add_pooling(engine, prompt, pooling)] = (prompt, pooling)
        else:
            key = engine.add(prompt, max_tokens=random.randint(1, 12))
            if random.random() < 0.3:
                engine.core.abort(f"r{key}")
        engine.step(random.choice([0, 0, 1, 2]))
    engine.finish()
    for key, (prompt, pooling) in prompts.items():
        ended = engine.ended[key]
        assert ended.finish_reason == "stop" and not len(ended.token_ids)
        assert ended.embedding is not None
        assert ended.embedding.tolist() == [expected(prompt, pooling)]
    others = set(engine.ended) - set(prompts)
    assert all(engine.ended[key].embedding is None for key in others)


def test_the_mean_reads_nothing_from_the_cache_and_leaves_its_blocks_there() -> None:
    """The cache has keys and values but no hidden states, and a mean needs those of all tokens."""
    engine = Engine()
    prompt = numbers(40)
    keys = [add_pooling(engine, prompt, pooling) for pooling in ("mean",)]
    engine.finish()
    keys += [add_pooling(engine, prompt, pooling) for pooling in ("mean", "last")]
    engine.finish()
    assert [engine.cached(key) for key in keys] == [0, 0, 39]


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_an_aborted_pooling_request_ends_as_any_other(steps_in_flight: int) -> None:
    engine = Engine(steps_in_flight=steps_in_flight, max_num_batched_tokens=8)
    key = add_pooling(engine, numbers(40), "mean")
    engine.step(2)
    engine.core.abort(f"r{key}")
    other = add_pooling(engine, numbers(20, start=3), "mean")
    engine.finish()
    assert engine.ended[key].finish_reason == "abort" and engine.ended[key].embedding is None
    vector = engine.ended[other].embedding
    assert vector is not None and vector.tolist() == [expected(numbers(20, start=3), "mean")]
