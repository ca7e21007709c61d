"""The sampler on a GPU: the CPU's tokens, and never a wait for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.decoding.table import Sketch, Table, random_logits
from tests.decoding.test_sampler import FEATURES

VOCAB = 5000
pytestmark = pytest.mark.gpu


def requests() -> list[Sketch]:
    return [
        Sketch(params.clone(), [6, 7, i, 2, 30], seed=i << 33 | 5, stop_token_ids=(0, 3, i))
        for i, params in enumerate(FEATURES.values())
    ]


def test_gpu_chooses_like_the_cpu_and_does_not_wait():
    tables = {"cpu": Table(VOCAB, max_rows=50), "cuda": Table(VOCAB, max_rows=50, device="cuda")}
    rows = [2 * i + 1 for i in range(len(requests()))]
    for table in tables.values():
        for row, request in zip(rows, requests(), strict=True):
            table.add(row, request, num_logprobs=row % 4 - 1)
    host_rows = np.array(rows, np.int32)
    for step in range(10):
        logits = torch.from_numpy(random_logits(step, len(rows), VOCAB))
        got = {}
        for device, table in tables.items():
            inputs = (logits.to(device), torch.tensor(rows, device=device), host_rows)
            torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
            try:
                got[device] = table.sampler.sample(*inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            table.append(rows, got[device].tokens)
        assert got["cuda"].tokens.tolist() == got["cpu"].tokens.tolist()
        cuda, cpu = (got[device].logprobs.to_host() for device in ("cuda", "cpu"))
        assert np.array_equal(cuda.token_ids, cpu.token_ids)
        assert np.array_equal(cuda.ranks, cpu.ranks)
        np.testing.assert_allclose(cuda.logprobs, cpu.logprobs, atol=1e-5)
        if step == 4:
            for table in tables.values():
                table.sampler.remove(rows[-1])
                table.add(rows[-1], Sketch(FEATURES["all_filters"].clone(), [9], seed=77))
