"""The line about a busy engine: its numbers, and its silence."""

from __future__ import annotations

import logging
import re

import pytest

from quire.engine.monitor import StatusLog
from tests.engine.driver import Engine, numbers


def run(engine: Engine, seconds: float, step_s: float = 0.5) -> None:
    """Step as the engine's process does: only while there is work."""
    end = engine.now + seconds
    while engine.now < end:
        engine.now += step_s
        if engine.core.has_work:
            engine.step()


def test_a_line_every_ten_seconds_of_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire")
    engine = Engine(100, max_num_seqs=2)
    engine.core.monitor.status = StatusLog(engine.core.scheduler)
    run(engine, 30)
    assert not caplog.messages
    engine.add(numbers(8), max_tokens=100)
    run(engine, 2)
    for _ in range(2):
        engine.add(numbers(8), max_tokens=100)
    run(engine, 8.5)
    (line,) = caplog.messages
    # Two steps a second, one sequence at first and two for the most part; one cannot begin.
    found = re.fullmatch(
        r"1\.6 prompt tokens/s, (.+) generated tokens/s, 2 running, 1 waiting, "
        r"KV cache (.+)% used, prefix hits (.+)%, 0 preemptions",
        line,
    )
    assert found, line
    assert 3 < float(found[1]) <= 4
    assert float(found[2]) == 100 * engine.core.scheduler.kv.pool.num_used / 100
    assert 0 < float(found[3]) < 100
    run(engine, 10)
    assert len(caplog.messages) == 2


def test_idle_time_is_no_part_of_a_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire")
    engine = Engine(100)
    engine.core.monitor.status = StatusLog(engine.core.scheduler)
    engine.add(numbers(8), max_tokens=10)
    run(engine, 100)
    assert not caplog.messages
    engine.add(numbers(8), max_tokens=100)
    run(engine, 11)
    (line,) = caplog.messages
    assert " 2.0 generated tokens/s" in line
