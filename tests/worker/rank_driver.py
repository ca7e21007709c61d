"""Ranks of a tiny model as threads, driven by plans as a scheduler makes them.

Requests are dealt to as many groups as there are stages; one step after the other computes a group,
and as many steps as there are stages are in flight. With several stages a plan carries the tokens
that an earlier step of its group has sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.config.model import ModelConfig, load_model_config
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.layers.parallel import Parallel
from quire.protocol.plan import AddedRow, LogprobArrays, StepPlan, StepResult, TokenMasks
from quire.protocol.sampling import SamplingParams
from quire.worker.device import detect_device
from quire.worker.model_runner import ModelRunner
from quire.worker.worker import Worker
from tests.layers.ranks import on_ranks

MAX_LEN, BLOCK_SIZE = 64, 8
CHUNK = 9
"""Tokens of a prompt that a step computes."""
TIMEOUT_S = 120


@dataclass
class Asked:
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    pooling: str | None = None
    grammar: Sequence[int] | None = None
    """Tokens that masks allow."""


@dataclass
class Made:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogprobArrays] = field(default_factory=list)
    prompt_logprobs: list[LogprobArrays] = field(default_factory=list)
    pooled: list[np.ndarray] = field(default_factory=list)


@dataclass
class Ran:
    made: list[Made]
    workers: list[Worker]
    """In the order of ranks."""


class Requests:
    """What a rank knows of all requests; all ranks know the same."""

    def __init__(
        self,
        asked: Sequence[Asked],
        num_groups: int,
        num_stages: int,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.asked, self.num_groups, self.num_stages = asked, num_groups, num_stages
        self.blocks_per_table = MAX_LEN // block_size
        self.computed = [0] * len(asked)
        self.made = [Made() for _ in asked]
        self.unsent: list[tuple[int, int]] = []
        """Rows and tokens for the next plan."""

    def plan(self, step: int, rows: range) -> StepPlan:
        work: list[tuple[int, int, int]] = []
        added: list[AddedRow] = []
        entries: list[tuple[int, int, int, int]] = []
        for row in rows:
            asked, made = self.asked[row], self.made[row]
            if not self.computed[row]:
                added.append(self.added(row))
                entries += self.table(row)
            if asked.pooling and made.pooled:
                continue
            known = len(asked.prompt) + len(made.tokens)
            count = min(known - self.computed[row], CHUNK)
            self.computed[row] += count
            work.append((row, count, self.computed[row] == known))
        computing = np.array(work, np.int32).reshape(-1, 3).T.copy()
        groups, table_rows, indices, ids = np.array(entries, np.int32).reshape(-1, 4).T.copy()
        sent = [pair for pair in self.unsent if pair[0] in rows and self.num_stages > 1]
        self.unsent = [pair for pair in self.unsent if pair not in sent]
        appends = np.array(sent, np.int32).reshape(-1, 2).T.copy()
        return StepPlan(
            step,
            added_rows=added,
            append_rows=appends[0],
            append_tokens=appends[1],
            block_rows=table_rows,
            block_groups=groups,
            block_indices=indices,
            block_ids=ids,
            rows=computing[0],
            num_new_tokens=computing[1],
            num_samples=computing[2],
        )

    def added(self, row: int) -> AddedRow:
        asked = self.asked[row]
        logprobs, of_prompt = asked.params.logprobs, asked.params.prompt_logprobs
        return AddedRow(
            row,
            np.array(asked.prompt, np.int32),
            len(asked.prompt),
            0,
            asked.params,
            seed=row + 1,
            num_logprobs=-1 if logprobs is None else logprobs,
            num_prompt_logprobs=-1 if of_prompt is None else of_prompt,
            pooling=asked.pooling,
            appends_sampled=self.num_stages == 1,
        )

    def table(self, row: int) -> list[tuple[int, int, int, int]]:
        """Blocks of its own in each KV group."""
        per_table = self.blocks_per_table
        first = row * self.num_groups * per_table
        return [
            (group, row, index, first + group * per_table + index)
            for group in range(self.num_groups)
            for index in range(per_table)
        ]

    def masks(self, plan: StepPlan, runner: ModelRunner, vocab_size: int) -> TokenMasks | None:
        allowed = [self.asked[row].grammar for row in plan.rows[plan.samples].tolist()]
        lines = [line for line, tokens in enumerate(allowed) if tokens is not None]
        if not lines:
            return None
        masks = runner.token_masks(np.array(lines, np.int32), -(-vocab_size // 32))
        masks.bits[:] = 0
        for place, line in enumerate(lines):
            for token in allowed[line] or ():
                masks.bits[place, token // 32] |= np.int32(1) << np.int32(token % 32)
        return masks

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        rows = plan.rows[plan.samples].tolist()
        assert result.step == plan.step and len(result.tokens) == len(rows)
        for row, token in zip(rows, result.tokens.tolist(), strict=True):
            if not self.asked[row].pooling:
                self.made[row].tokens.append(token)
                self.unsent.append((row, token))
        if result.logprobs is not None:
            for line, number in enumerate(result.logprobs.index.tolist()):
                arrays = result.logprobs.select(np.arange(len(rows)) == number)
                assert len(arrays.token_ids) == 1, line
                self.made[rows[number]].logprobs.append(arrays)
        for one in result.prompt_logprobs:
            self.made[one.row].prompt_logprobs.append(one.arrays)
        if result.pooled is not None:
            for row, vector in zip(result.pooled.rows, result.pooled.vectors, strict=True):
                self.made[row].pooled.append(vector)


def resolved(folder: Path, size: int, num_stages: int, **changes: Any) -> EngineOptions:
    settings: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "max_model_len": MAX_LEN,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 8 * 3 * MAX_LEN // BLOCK_SIZE,
        "num_threads": 1,
        "tensor_parallel_size": size,
        "pipeline_parallel_size": num_stages,
        **changes,
    }
    wanted = EngineOptions().replace(**settings)
    return resolve(wanted, load_model_config(str(folder)), detect_device("cpu")).options


def start(options: EngineOptions, config: ModelConfig, parallel: Parallel) -> Worker:
    parallel = replace(parallel, expert_parallel=options.parallel.enable_expert_parallel)
    worker = Worker(options, config, detect_device("cpu"), parallel)
    worker.load()
    max_len, num_blocks = worker.size_cache(worker.profile(), False)
    worker.allocate(num_blocks, max_len)
    worker.capture()
    return worker


def run(
    folder: Path,
    asked: Sequence[Asked],
    num_tokens: int,
    size: int = 1,
    num_stages: int = 1,
    **changes: Any,
) -> Ran:
    """Generate so many tokens for each of the requests."""
    config = load_model_config(str(folder))
    options = resolved(folder, size, num_stages, **changes)
    longest = max(len(one.prompt) for one in asked)
    num_steps = num_stages * (-(-longest // CHUNK) + num_tokens - 1)
    results: list[Future[StepResult]] = [Future() for _ in range(num_steps)]
    workers: dict[int, Worker] = {}

    def work(parallel: Parallel) -> list[Made]:
        worker = start(options, config, parallel)
        stage = parallel.stage
        workers[stage.index * size + parallel.rank] = worker
        requests = Requests(asked, len(worker.layout.groups), num_stages)
        plans: list[StepPlan] = []
        for step in range(num_steps + num_stages):
            before = step - num_stages
            if before >= 0:
                requests.apply(plans[before], results[before].result(TIMEOUT_S))
            if step < num_steps:
                plans.append(requests.plan(step, range(step % num_stages, len(asked), num_stages)))
                worker.runner.execute(plans[-1])
                if stage.is_last and parallel.rank == 0:
                    masks = requests.masks(plans[-1], worker.runner, config.vocab_size)
                    results[step].set_result(worker.runner.sample(masks).result())
                else:
                    found = worker.runner.sample().result()
                    assert stage.is_last or not len(found.tokens)
        return requests.made

    def work_or_tell(parallel: Parallel) -> list[Made]:
        try:
            return work(parallel)
        except BaseException as error:
            for result in results:
                if not result.done():
                    result.set_exception(error)  # the others need not wait
            raise

    made = on_ranks(size, work_or_tell, num_stages)[0]
    return Ran(made, [workers[rank] for rank in range(size * num_stages)])
