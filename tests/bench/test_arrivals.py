"""Times at which a load sends its requests."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from quire.bench.serving.arrivals import Load, arrival_times
from quire.bench.serving.workload import LoadRequest, Segment


def gaps(burstiness: float, count: int = 4001, rate: float = 8.0) -> list[float]:
    times = arrival_times(count, rate, burstiness, seed=1)
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_rate_and_the_spread_asked_for(burstiness: float) -> None:
    """A gamma distribution of shape k has a variation coefficient of 1 / sqrt(k)."""
    found = gaps(burstiness)
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 8, rel=0.1)
    assert statistics.pstdev(found) / mean == pytest.approx(burstiness**-0.5, rel=0.1)


def test_constant_and_immediate() -> None:
    assert gaps(math.inf, 5) == pytest.approx([1 / 8] * 4)
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_equal_seeds_give_equal_times() -> None:
    assert arrival_times(9, 2.0, 1.0, 5) == arrival_times(9, 2.0, 1.0, 5)
    assert arrival_times(9, 2.0, 1.0, 5) != arrival_times(9, 2.0, 1.0, 6)


def test_a_trace_is_replayed_at_its_speed() -> None:
    requests = [LoadRequest((Segment("a", 1),), 1, time) for time in (0.0, 1.0, 4.0)]
    assert Load("speed", 2.0).schedule(requests, 0) == [0.0, 0.5, 2.0]
    assert Load("concurrency", 2).schedule(requests, 0) is None
