"""Models with windows: what is behind the window is freed, and tokens stay those of transformers.

Turns red if a group frees a block that a query still sees, if a prefix hit takes blocks whose
window is not whole, or if a sequence keeps more than its window and one chunk.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.layers.attention.cpu import CpuBackend
from quire.layers.attention.layer import Attention
from quire.protocol.errors import OptionError
from quire.scheduler.sequence import Status
from tests.models.reference import random_tokens
from tests.tiny import greedy, is_greedy, save_tiny, tiny_llm

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers": ("mistral", {"sliding_window": 24}),
    "some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "one of three": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 2,
            "num_hidden_layers": 3,
        },
    ),
}
STEPS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
CHUNK = 32
BLOCK = 8


def prompts() -> list[list[int]]:
    """Two long ones that agree in their first 96 tokens, a short one, and the first again."""
    shared = random_tokens(96, seed=1)
    first = shared + random_tokens(20, seed=2)
    return [first, shared + random_tokens(9, seed=3), random_tokens(7, seed=4), first]


def generate(llm: LLM, some: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in some], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_memory(case: str, steps_in_flight: int, tmp_path: Path) -> None:
    name, changes = CASES[case]
    model = save_tiny(tmp_path, name, **changes)
    expected = greedy(model, prompts(), STEPS)
    options = {"block_size": BLOCK, "max_num_batched_tokens": CHUNK, "max_model_len": 160}
    with tiny_llm(tmp_path, max_steps_in_flight=steps_in_flight, **options) as llm:
        scheduler = llm._core.scheduler
        windows = scheduler.limits.windows
        assert changes["sliding_window"] in windows
        most = [0] * len(windows)

        def look(plan: Any) -> None:
            for request in scheduler.by_row:
                if request is not None and request.status is Status.RUNNING:
                    for group, table in enumerate(request.tables):
                        most[group] = max(most[group], len(table))

        llm._core.on_plan = look
        for some in (prompts(), prompts()[::-1], prompts()[1:2]):  # later ones find prefixes
            wanted = [expected[prompts().index(prompt)] for prompt in some]
            for prompt, made, right in zip(some, generate(llm, some), wanted, strict=True):
                assert made == right or is_greedy(model, prompt, made, 1e-3)
        assert llm.statistics().hit_rate > 0.3
        for window, held in zip(windows, most, strict=True):
            if window is None:
                assert held == -(-(116 + STEPS - 1) // BLOCK)
            else:
                assert held <= -(-(window + CHUNK) // BLOCK) + 1
        scheduler.check_integrity()


@pytest.mark.parametrize("case", CASES)
def test_preempted_sequences_go_on(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    model = save_tiny(tmp_path, name, **changes)
    some = [random_tokens(5 + i, seed=i) for i in range(8)]
    options = {"block_size": 4, "max_num_batched_tokens": CHUNK, "max_model_len": 80}
    with tiny_llm(tmp_path, **options) as llm:
        num_blocks = llm._core.scheduler.limits.blocks_held(80)  # one request of the longest
    with tiny_llm(tmp_path, **options, num_gpu_blocks_override=num_blocks) as llm:
        for prompt, made in zip(some, generate(llm, some), strict=True):
            assert is_greedy(model, prompt, made, 1e-3)
        assert llm.statistics().num_preemptions > 0


def test_a_long_context_needs_the_window_and_a_chunk(tmp_path: Path) -> None:
    """A cache for 80 tokens runs a request of 150, and says what would not fit."""
    model = save_tiny(tmp_path, "mistral", sliding_window=24)
    options: dict[str, Any] = {"block_size": BLOCK, "max_num_batched_tokens": 16}
    with tiny_llm(tmp_path, max_model_len=190, num_gpu_blocks_override=6, **options) as llm:
        prompt = random_tokens(150, seed=7)
        (made,) = generate(llm, [prompt])
        assert is_greedy(model, prompt, made, 1e-3)
    with pytest.raises(OptionError, match="needs 6 blocks"):
        tiny_llm(tmp_path, max_model_len=190, num_gpu_blocks_override=5, **options)


def test_a_block_size_that_a_group_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are read, with the size and the group."""
    save_tiny(tmp_path, "mistral", sliding_window=24)
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(CpuBackend, "support", replace(CpuBackend.support, block_sizes=(16,)))
    with pytest.raises(OptionError, match=r"block_size=8.*window of 24 tokens.*cpu: block_size"):
        tiny_llm(tmp_path, block_size=8, attention_backend="cpu")


def test_a_window_beyond_the_longest_request_is_none(tmp_path: Path) -> None:
    """Then all layers are of one group, and prefixes may be read once for several sequences."""
    model = save_tiny(tmp_path, "mistral", sliding_window=24)
    prompt = random_tokens(10, seed=5)
    with tiny_llm(tmp_path, max_model_len=24) as llm:
        worker = llm._core.executor._worker  # type: ignore[attr-defined]
        layers = [one for one in worker.runner.model.modules() if isinstance(one, Attention)]
        assert worker.layout.windows == (None,) and layers
        assert all(layer.window is None for layer in layers)
        params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert is_greedy(model, prompt, list(output.outputs[0].token_ids), 1e-3)


def test_reservations_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "mistral", sliding_window=24)
    with pytest.raises(OptionError, match=r"reservation='max_length'.*windows"):
        tiny_llm(tmp_path, reservation="max_length")
