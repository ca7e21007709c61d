"""`ModelRunner.sample` uses the masks that it is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quire import SamplingParams
from quire.protocol.plan import AddedRow, StepPlan, TokenMasks
from quire.worker.model_runner import ModelRunner
from tests.tiny import save_tiny, tiny_llm


def allow(masks: TokenMasks, token: int) -> None:
    masks.bits[:] = 0
    masks.bits[:, token // 32] = 1 << token % 32


def execute(runner: ModelRunner) -> None:
    rows = np.arange(3, dtype=np.int32)
    params = SamplingParams(temperature=0.0)
    tokens = np.array([5, 6, 7], np.int32)
    plan = StepPlan(
        0,
        added_rows=[AddedRow(row, tokens, 3, 0, params, seed=0) for row in rows.tolist()],
        block_rows=rows,
        block_groups=np.zeros(3, np.int32),
        block_indices=np.zeros(3, np.int32),
        block_ids=rows + 1,
        rows=rows,
        num_new_tokens=np.full(3, 3, np.int32),
        num_samples=np.ones(3, np.int32),
    )
    runner.execute(plan)


def test_masks_that_were_made_later_or_for_another_step_do_not_count(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with tiny_llm(tmp_path, device="cpu") as llm:
        runner = llm._core.executor.runner
        execute(runner)
        (free,) = {*runner.sample().result().tokens.tolist()}
        execute(runner)
        first = runner.token_masks(np.array([1], np.int32), 5)
        allow(first, (free + 1) % 160)
        later = runner.token_masks(np.array([0, 2], np.int32), 5)
        allow(later, (free + 2) % 160)
        found = runner.sample(first).result().tokens.tolist()
        assert found == [free, (free + 1) % 160, free]
        execute(runner)
        assert runner.sample().result().tokens.tolist() == [free] * 3
