"""Stages of a pipeline on one device: memory profile, capture and warm-up pass through all stages,
and CUDA graphs read and leave hidden states where the link takes them from.

The stages take turns in one process; what one sends waits until the next takes its turn.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.model import load_model_config
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.layers.parallel import Parallel, Stage
from quire.protocol.plan import StepPlan
from quire.protocol.sampling import SamplingParams
from quire.worker.device import detect_device
from quire.worker.warm_up import largest_step, warm_up_plans
from quire.worker.worker import Worker
from tests.models.reference import random_tokens
from tests.tiny import greedy, save_tiny
from tests.worker.rank_driver import CHUNK, MAX_LEN, Asked, Requests

NUM_STAGES, NUM_TOKENS = 3, 8
BLOCK_SIZE = 16


class Turns:
    """From one stage to the next, in the order of sending."""

    def __init__(self, before: deque[torch.Tensor], behind: deque[torch.Tensor]) -> None:
        self.before, self.behind = before, behind

    def send(self, x: torch.Tensor) -> None:
        self.behind.append(x.clone())

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        given = self.before.popleft()
        assert given.shape == out.shape and given.dtype == out.dtype
        return out.copy_(given)


def start(folder: Path, device: str, **changes: Any) -> list[Worker]:
    """A worker for each stage, ready for steps."""
    config, info = load_model_config(str(folder)), detect_device(device)
    settings: dict[str, Any] = {
        "model": str(folder),
        "device": device,
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 1 << 24,
        "pipeline_parallel_size": NUM_STAGES,
        "distributed_executor_backend": "ray",  # any number of ranks on one device
        **changes,
    }
    options = resolve(EngineOptions().replace(**settings), config, info).options
    queues = [deque[torch.Tensor]() for _ in range(NUM_STAGES + 1)]
    workers = []
    for index in range(NUM_STAGES):
        stage = Stage(index, NUM_STAGES, Turns(queues[index], queues[index + 1]))
        workers.append(Worker(options, config, info, Parallel(stage=stage)))
    for worker in workers:
        worker.load()
    sizes = [worker.size_cache(worker.profile(), False) for worker in workers]
    check_empty(queues)
    max_len, num_blocks = (min(numbers) for numbers in zip(*sizes, strict=True))
    for worker in workers:
        worker.allocate(num_blocks, max_len)
    for worker in workers:
        worker.capture()
        if device == "cpu":
            run_made_up_steps(worker)
    check_empty(queues)
    return workers


def run_made_up_steps(worker: Worker) -> None:
    """As a warm-up does, but for the sampler's kernels."""
    largest = largest_step(8, 256, MAX_LEN)
    for plan in (*warm_up_plans(BLOCK_SIZE, MAX_LEN, [1, 5], shares_prefixes=False), largest):
        worker.runner.execute(plan)
        worker.runner.sample().result()
        worker.runner.update_rows(StepPlan(0, freed_rows=plan.rows))


def check_empty(queues: list[deque[torch.Tensor]]) -> None:
    assert not any(queues), "each stage receives all that the one before it sent"


def generate(workers: list[Worker], asked: list[Asked]) -> tuple[list[list[int]], int]:
    """Tokens of each request, and how many steps were replays of graphs on all stages."""
    requests = Requests(asked, len(workers[0].layout.groups), NUM_STAGES, BLOCK_SIZE)
    longest, replays = max(len(one.prompt) for one in asked), 0
    for step in range(-(-longest // CHUNK) + NUM_TOKENS - 1):
        plan = requests.plan(step, range(len(asked)))
        for worker in workers:
            with worker.at_work():
                worker.runner.execute(plan)
                pending = worker.runner.sample()
        graphs = [worker.runner.graphs for worker in workers]
        replays += all(one is not None and one.find(plan) is not None for one in graphs)
        requests.apply(plan, pending.result())
    return [made.tokens[:NUM_TOKENS] for made in requests.made], replays


@pytest.mark.parametrize(
    ("device", "eager"),
    [
        ("cpu", True),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stages_take_turns(family: str, device: str, eager: bool, tmp_path: Path) -> None:
    """After all phases, steps give the tokens of transformers; with graphs they are replays, on all
    stages alike."""
    model = save_tiny(tmp_path, family)
    prompts = [random_tokens(length, seed=length) for length in (20, 7, 33)]
    asked = [Asked(prompt) for prompt in prompts]
    asked[1].params = SamplingParams(temperature=0.0, logprobs=1)
    tokens, replays = generate(start(tmp_path, device, enforce_eager=eager), asked)
    assert tokens == greedy(model, prompts, NUM_TOKENS)
    assert (replays == 0) == eager
