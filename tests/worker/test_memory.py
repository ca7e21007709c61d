"""How many blocks the KV cache gets, and what is said where something does not fit."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.config.device import DeviceInfo
from quire.config.options import EngineOptions
from quire.protocol.errors import OptionError
from quire.protocol.kv_spec import KVLayout, KVSpec
from quire.worker.kv_tensors import KVTensors
from quire.worker.memory import (
    MemoryProfile,
    available_cache_bytes,
    count_blocks,
    explaining,
    is_out_of_memory,
)
from quire.worker.warm_up import largest_step
from tests.tiny import save_tiny, tiny_llm

GIB = 1 << 30
LAYOUT = KVLayout.of([KVSpec(num_kv_heads=3, head_dim=8, dtype="float32")] * 2, block_size=16)
STEP = 8192
GPU = DeviceInfo("cuda", "a GPU", 100 * GIB, 4)
PROFILE = MemoryProfile(total=100 * GIB, used=30 * GIB, step=5 * GIB, graphs=2 * GIB)


def options(**changes: Any) -> EngineOptions:
    wanted = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "max_model_len": 4096}
    return EngineOptions().replace(**{"gpu_memory_utilization": 0.9, **wanted, **changes})


def test_all_memory_becomes_blocks() -> None:
    """Also beyond what one request can fill: the rest serves the prefix cache."""
    assert LAYOUT.bytes_per_block == 2 * 2 * 3 * 8 * 4 * 16
    assert (
        count_blocks(
            LAYOUT, 10 * LAYOUT.bytes_per_block + 5, max_model_len=20, max_step_tokens=STEP
        )
        == 10
    )


def test_too_little_for_one_request_names_what_would_fit() -> None:
    with pytest.raises(OptionError, match=r"needs 3 blocks .* max_model_len to at most 32"):
        count_blocks(LAYOUT, 2 * LAYOUT.bytes_per_block, max_model_len=33, max_step_tokens=STEP)
    with pytest.raises(OptionError, match="To run it at all, raise kv_cache_memory_bytes"):
        count_blocks(LAYOUT, LAYOUT.bytes_per_block - 1, max_model_len=33, max_step_tokens=STEP)


def test_the_cache_gets_what_steps_and_graphs_leave() -> None:
    assert available_cache_bytes(options(), LAYOUT, GPU, PROFILE) == (90 - 30 - 5 - 2) * GIB
    exact = options(kv_cache_memory_bytes=63 * GIB)
    assert available_cache_bytes(exact, LAYOUT, GPU, PROFILE) == 63 * GIB
    blocks = options(num_gpu_blocks_override=7)
    assert available_cache_bytes(blocks, LAYOUT, GPU, PROFILE) == 7 * LAYOUT.bytes_per_block


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"gpu_memory_utilization": 0.37},
            (
                "gpu_memory_utilization=0.37 of 100.00 GiB",
                "30.00 GiB are in use",
                "step takes 5.00 GiB and the CUDA graphs 2.00 GiB",
                "Raise gpu_memory_utilization",
                "max_num_batched_tokens (8192), max_num_seqs (256) or max_model_len (4096)",
                "enforce_eager=True",
            ),
        ),
        (
            {"kv_cache_memory_bytes": 64 * GIB},
            ("kv_cache_memory_bytes=", "64.00 GiB", "70.00 of 100.00 GiB are free"),
        ),
        ({"num_gpu_blocks_override": 10**9}, ("num_gpu_blocks_override=1000000000", "Lower")),
    ],
)
def test_messages_say_what_was_needed_and_free(
    changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(OptionError) as caught:
        available_cache_bytes(options(**changes), LAYOUT, GPU, PROFILE)
    for part in parts:
        assert part in str(caught.value)


def test_weights_too_large_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    """100 layers of 16,384 x 65,536: nothing of that is allocated."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 16384,
        "intermediate_size": 65536,
        "num_hidden_layers": 100,
        "num_attention_heads": 128,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    num_values = 100 * (4 * 16384**2 + 3 * 16384 * 65536 + 2 * 16384) + (2 * 1024 + 1) * 16384
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OptionError) as caught:
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, device="cpu")
    assert f"take {num_values * 4 / GIB:.2f} GiB in float32" in str(caught.value)
    for part in ("GiB free", "use a smaller model", "dtype='bfloat16'"):
        assert part in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


def test_running_out_of_memory_is_recognised_and_explained() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    here = torch.device("cpu")
    assert is_out_of_memory(caught.value, here)
    assert is_out_of_memory(MemoryError(), here)
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"), here)
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), here)
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), here)
    assert not is_out_of_memory(RuntimeError("out of resource: shared memory"), here)
    assert not is_out_of_memory(ValueError("out of memory"), here)
    cpu = DeviceInfo("cpu", "a CPU", GIB, 1)
    with (
        pytest.raises(OptionError, match=r"while reading .*GiB are free on a CPU\. Read less\."),
        explaining("reading", "Read less.", cpu),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shape"), explaining("reading", "", cpu):
        torch.empty(3).view(2)


@pytest.mark.parametrize(
    ("rows", "tokens", "max_len", "expected"), [(3, 11, 100, 11), (4, 4, 100, 4), (2, 99, 10, 20)]
)
def test_the_profiled_step_is_as_large_as_a_step_can_be(
    rows: int, tokens: int, max_len: int, expected: int
) -> None:
    plan = largest_step(rows, tokens, max_len)
    assert plan.num_tokens == expected and len(plan.rows) == rows
    assert [len(added.token_ids) for added in plan.added_rows] == plan.num_new_tokens.tolist()
    assert plan.num_new_tokens.max() <= max_len


def test_the_memory_profile_runs_on_one_block(tmp_path: Path) -> None:
    """What it computes is of no use, but all of a step is done: 40 rows, 200 tokens, one block."""
    save_tiny(tmp_path)
    with tiny_llm(tmp_path, max_num_seqs=40) as llm:
        worker = llm._core.executor._worker
        runner = worker._build_runner(KVTensors(worker.layout, 1, torch.device("cpu")), 192)
        runner.kv.data.zero_()
        runner.execute(largest_step(40, 200, 192))
        result = runner.sample().result()
    assert len(result.tokens) == 40
    assert result.logprobs is not None and torch.tensor(result.logprobs.logprobs).isfinite().all()
    assert runner.kv.data.isfinite().all() and runner.kv.data.any()
