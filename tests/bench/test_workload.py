"""Made workloads are the same every time and within the lengths that were asked for."""

from __future__ import annotations

import pytest

from quire.bench.flags import Lengths
from quire.bench.workload import Dice


@pytest.mark.parametrize("distribution", ["uniform", "log-uniform"])
def test_requests_repeat_and_keep_to_their_lengths(distribution: str) -> None:
    inputs, outputs = Lengths(3, 40), Lengths(5, 5)
    made = Dice(7, 100, distribution).requests(400, inputs, outputs)
    assert made == Dice(7, 100, distribution).requests(400, inputs, outputs)
    assert made != Dice(8, 100, distribution).requests(400, inputs, outputs)
    lengths = [len(request.token_ids) for request in made]
    assert (min(lengths), max(lengths)) == (3, 40)
    assert {request.num_output_tokens for request in made} == {5}
    assert all(0 <= token < 100 for request in made for token in request.token_ids)


def test_log_uniform_has_as_many_short_as_long_lengths() -> None:
    """Half of them lie below the geometric mean of the bounds."""
    dice = Dice(0, 100)
    lengths = [dice.length(Lengths(10, 1000)) for _ in range(2000)]
    assert 0.45 < sum(length < 100 for length in lengths) / 2000 < 0.55


def test_questions_share_their_system_prompt_and_nothing_else() -> None:
    made = Dice(0, 10_000).shared_prefix_requests(2, 3, 20, 5, 4)
    prefixes = {tuple(request.token_ids[:20]) for request in made}
    questions = {tuple(request.token_ids[20:]) for request in made}
    assert len(prefixes) == 2 and len(questions) == len(made) == 6
    assert made[0].token_ids[:20] == made[2].token_ids[:20] != made[1].token_ids[:20]
