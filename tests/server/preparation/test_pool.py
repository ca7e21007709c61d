"""`PreparationPool` by itself: clients that leave cost the others nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Iterator

import pytest

from quire.config.options import EngineOptions
from quire.config.server import ServingOptions
from quire.protocol.sampling import SamplingParams
from quire.server import app  # its routes register what they prepare
from quire.server.preparation.pool import LARGE_BYTES, MAX_LARGE, PreparationPool
from quire.server.preparation.prepare import PreparationSettings, Prepared
from quire.server.routes import PREPARED_KINDS

assert app

COMPLETIONS = PREPARED_KINDS["/v1/completions"]
SMALL = json.dumps({"prompt": [5, 6, 7]}).encode()
LARGE = json.dumps({"prompt": [5], "padding": "x" * LARGE_BYTES}).encode()
WAIT_S = 60


@pytest.fixture
def pool() -> Iterator[PreparationPool]:
    options = EngineOptions().replace(max_model_len=2048)
    settings = PreparationSettings(
        tokenizer=None,
        vocab_size=100,
        eos_token_ids=(),
        hidden_size=8,
        engine_options=options.flat(),
        serving_options=dataclasses.asdict(ServingOptions()),
        default_params=SamplingParams(),
        chat_params=SamplingParams(),
        model_names=("m", "x" * 4_000_000),  # more than a socket holds, as a tokenizer is
    )
    made = PreparationPool(settings)
    yield made
    made.close()


async def prompt_of(pool: PreparationPool, body: bytes) -> list[int]:
    made = await asyncio.wait_for(pool.run(COMPLETIONS, [body]), WAIT_S)
    assert isinstance(made, Prepared) and made.prompts[0].token_ids is not None
    return made.prompts[0].token_ids.tolist()


async def test_a_client_that_leaves_while_the_process_starts(pool: PreparationPool) -> None:
    """What the process is told is not cut off."""
    leaving = asyncio.create_task(pool.run(COMPLETIONS, [SMALL]))
    await asyncio.sleep(0.05)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert await prompt_of(pool, SMALL) == [5, 6, 7]


async def test_clients_that_leave_free_their_places_when_forks_are_gone(
    pool: PreparationPool,
) -> None:
    """However many leave while the process that forks does nothing, it neither gets more orders
    than it may have forks, nor counts as dead."""
    assert await prompt_of(pool, SMALL) == [5, 6, 7]
    server = pool.start()
    pid = server._process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(600):
            leaving = asyncio.create_task(pool.run(COMPLETIONS, [LARGE]))
            for _ in range(4):
                await asyncio.sleep(0)
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
        assert len(server._endings) <= MAX_LARGE
    finally:
        os.kill(pid, signal.SIGCONT)
    assert await prompt_of(pool, LARGE) == [5]
    assert pool.start() is server


async def test_closing_ends_forks_that_work(pool: PreparationPool) -> None:
    body = json.dumps({"prompt": [[1] * 5] * 1_000_000}).encode()
    working = asyncio.create_task(pool.run(COMPLETIONS, [body]))
    server = pool.start()
    forks: list[int] = []
    while not forks:
        await asyncio.sleep(0.01)
        path = f"/proc/{server._process.pid}/task/{server._process.pid}/children"
        with open(path, encoding="ascii") as file:
            forks = [int(pid) for pid in file.read().split()]
    pool.close()
    for pid in forks:
        for _ in range(100):
            if not os.path.exists(f"/proc/{pid}"):
                break
            await asyncio.sleep(0.01)
        else:
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                assert file.read().rpartition(")")[2].split()[0] == "Z"
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
