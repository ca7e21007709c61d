"""Workers that share a model: each keeps the keys and values of its heads, and tokens are equal.

Turns red if the KV layout, a backend or the cache counts the heads of the whole model on a rank.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.config.model import load_model_config
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.layers.parallel import Parallel
from quire.protocol.plan import AddedRow, StepPlan
from quire.protocol.sampling import SamplingParams
from quire.worker.device import detect_device
from quire.worker.worker import Worker
from tests.layers.ranks import on_ranks
from tests.models.reference import random_tokens
from tests.tiny import greedy, save_tiny

STEPS = 8
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 1,
    "num_hidden_layers": 3,
}


def plan_of(step: int, num_new_tokens: int) -> StepPlan:
    """Row 0 computes so many tokens and samples."""
    one = np.ones(1, np.int32)
    return StepPlan(step, rows=one - 1, num_new_tokens=one * num_new_tokens, num_samples=one)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_divide_the_heads_of_all_groups(size: int, tmp_path: Path) -> None:
    """Three KV groups; with four ranks a KV head is kept by two."""
    model = save_tiny(tmp_path, "qwen2", **WINDOWS, num_attention_heads=4, num_key_value_heads=2)
    config, device = load_model_config(str(tmp_path)), detect_device("cpu")
    wanted = EngineOptions().replace(
        model=str(tmp_path),
        device="cpu",
        dtype="float32",
        max_model_len=64,
        block_size=8,
        num_gpu_blocks_override=30,
    )
    options = resolve(wanted, config, device).options
    prompt = random_tokens(30, seed=1)

    def run(parallel: Parallel) -> list[int]:
        worker = Worker(options, config, device, parallel)
        worker.load()
        max_len, num_blocks = worker.size_cache(worker.profile(), False)
        worker.allocate(num_blocks, max_len)
        worker.capture()
        assert worker.layout.windows == (None, 20, 20)
        kv_heads = max(2 // size, 1)
        assert worker.runner.kv.data.shape == (1, 2, 30, kv_heads, 8, config.head_dim)
        plan = plan_of(0, len(prompt))
        params = SamplingParams(temperature=0.0)
        plan.added_rows = [AddedRow(0, np.array(prompt, np.int32), len(prompt), 0, params, seed=1)]
        plan.block_ids = np.arange(24, dtype=np.int32)
        plan.block_rows = np.zeros(24, np.int32)
        plan.block_groups, plan.block_indices = plan.block_ids // 8, plan.block_ids % 8
        tokens = []
        for step in range(STEPS):
            worker.runner.execute(plan if step == 0 else plan_of(step, 1))
            tokens += worker.runner.sample().result().tokens.tolist()
        return tokens

    (expected,) = greedy(model, [prompt], STEPS)
    assert on_ranks(size, run) == [expected] * size
