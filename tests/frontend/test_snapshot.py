"""What a snapshot says of a real model's memory."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM
from tests.tiny import tiny_llm


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_memory_is_that_of_the_weights_and_the_blocks(tiny: Any, quantization: str | None) -> None:
    with tiny_llm(tiny.folder, quantization=quantization, block_size=16) as llm:
        llm.generate("the quick brown fox", use_tqdm=False)
        memory = llm._core.snapshot().memory
        num_blocks = llm._core.scheduler.limits.num_blocks
    # Keys and values of 2 heads of 16 numbers, in 3 layers, for 16 tokens; float16 beside 8 bits.
    number = 4 if quantization is None else 2
    assert memory.kv_used == 0 and memory.kv_cached > 0
    assert memory.kv_cached + memory.kv_free == num_blocks * 2 * 2 * 16 * number * 3 * 16
    whole = sum(parameter.nbytes for parameter in tiny.model.parameters())
    share = memory.weights / whole
    # Packed rows are padded; 8-bit weights have a scale for each 32 of them.
    assert 0.95 < share < 1.3 if quantization is None else 0.25 < share < 0.6
    assert 0 < memory.other < memory.total


def test_gauges_say_the_same(llm: LLM) -> None:
    memory = llm._core.snapshot().memory
    gauges: dict[str, Any] = {
        reading.labels["kind"]: reading
        for reading in llm.get_metrics()
        if reading.name == "quire:device_memory_bytes"
    }
    assert gauges["weights"].value == memory.weights
    assert gauges["kv_free"].value == memory.kv_free
