"""Memory of a GPU: the share that was asked for is kept, and running out of it kills nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, OptionError, SamplingParams
from quire.protocol.plan import StepPlan
from quire.worker.memory import return_free_memory

pytestmark = pytest.mark.gpu

GIB = 1 << 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    return_free_memory()
    yield
    return_free_memory()


def save(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def start(folder: Path, **options: Any) -> LLM:
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, **options}
    return LLM(str(folder), **settings)


def work(count: int, longest: int) -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, longest, count)
    return [{"prompt_token_ids": rng.integers(5, 500, n).tolist()} for n in lengths]


def used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


# --- at start -------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_utilization_holds_under_load(eager: bool, tmp_path: Path) -> None:
    """Graphs, rows and the largest steps with costly sampling fit beside the cache."""
    _, total = torch.cuda.mem_get_info()
    share = used() / total + 0.1
    with start(
        save(tmp_path), gpu_memory_utilization=share, max_num_seqs=512, enforce_eager=eager
    ) as llm:
        at_start = used()
        params = [
            SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, **more)
            for more in ({}, {"top_p": 0.8}, {"logprobs": 5}, {"logit_bias": {7: 2.0}})
        ]
        prompts = work(800, 600)
        llm.generate(prompts, [params[i % 4] for i in range(800)], use_tqdm=False)
        under_load = used()
        cache = llm._core.scheduler.limits.num_blocks * 4 * 2 * 4 * 64 * 2 * 16
    assert at_start <= share * total
    assert under_load <= share * total + 0.002 * total
    # And the memory is put to use: what is set aside for steps and graphs is not half of it.
    assert cache > 0.06 * total


@pytest.mark.parametrize(
    ("changes", "options", "parts"),
    [
        (
            {"num_hidden_layers": 300, "hidden_size": 16384, "intermediate_size": 65536},
            {},
            ("the weights of", "GiB in bfloat16", "GiB free", "use a smaller model"),
        ),
        (
            {},
            {"kv_cache_memory_bytes": "4TiB"},
            ("kv_cache_memory_bytes=", "4096.00 GiB", "free beside the weights", "Lower kv_cache"),
        ),
        (
            {},
            {"num_gpu_blocks_override": 10**9},
            ("num_gpu_blocks_override=1000000000", "Lower num_gpu_blocks_override"),
        ),
        (
            {},
            {"gpu_memory_utilization": 0.0001},
            ("gpu_memory_utilization=0.0001", "allows 0.00 GiB", "raise gpu_memory_utilization"),
        ),
    ],
    ids=["weights", "cache", "blocks", "share"],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], options: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    before = used()
    with pytest.raises(OptionError) as caught:
        start(save(tmp_path, **changes), **options)
    for part in parts:
        assert part in str(caught.value)
    del caught
    return_free_memory()
    assert used() <= before + GIB, "nothing of the attempt stays behind"


def test_steps_too_large_for_what_is_free(tmp_path: Path) -> None:
    """Weights fit, the largest step does not: the message names what makes steps smaller."""
    filler = fill(leave=GIB)
    with pytest.raises(OptionError, match=r"largest step.*GiB are free.*max_num_batched_tokens"):
        start(save(tmp_path), gpu_memory_utilization=1.0, max_num_batched_tokens=1 << 19).shutdown()
    filler.clear()


# --- at run time ----------------------------------------------------------------------------------


def fill(leave: int = 0) -> list[torch.Tensor]:
    """Take all memory there is, or all but `leave`, as another program could."""
    return_free_memory()
    taken: list[torch.Tensor] = []
    free, _ = torch.cuda.mem_get_info()
    size = max(free - leave, 0)
    while size >= 512:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
        else:
            if leave:
                break
    return taken


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
SMALL = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 64, "dtype": "float32"}


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("leave", [0, 400 << 20], ids=["all", "most"])
def test_memory_taken_for_a_while_shows_in_no_output(leave: int, tmp_path: Path) -> None:
    """All memory goes away and comes back, or so much of it that steps must shrink."""
    with start(save(tmp_path), **{**SMALL, "max_num_batched_tokens": 16384}) as llm:
        prompts = work(100, 500)
        expected = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
        llm.reset_prefix_cache()
        core, taken, sizes, pauses = llm._core, [], [], []

        def on_plan(plan: StepPlan) -> None:
            sizes.append(core.scheduler.max_step_tokens)
            if len(sizes) == 1:
                taken.extend(fill(leave))

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            taken.clear()

        core.on_plan, core.pressure._sleep = on_plan, pause
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
        assert core.death is None
        assert (min(sizes) < 16384) == bool(leave)
        assert len(pauses) == (0 if leave else 1)
        taken.clear()  # records of the log hold errors, which hold the engine, which holds this


def test_memory_gone_for_good_ends_requests_not_the_engine(tmp_path: Path) -> None:
    with start(save(tmp_path), **SMALL) as llm:
        prompts = work(5, 200)
        expected = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
        llm.reset_prefix_cache()
        pauses: list[float] = []
        llm._core.pressure._sleep = pauses.append
        taken = fill()
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
        assert all("out of memory" in str(output.outputs[0].stop_reason) for output in outputs)
        assert pauses == sorted(pauses) and len(pauses) == 5
        taken.clear()
        return_free_memory()
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_prompt_logprobs_need_little_memory(tmp_path: Path) -> None:
    """Logits of a whole prompt of 4,000 tokens in float32 and their temporaries would take over
    2 GiB here; they are made in pieces."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    with start(save(tmp_path, vocab_size=128256), **SMALL) as llm:
        llm.generate(work(1, 4), params, use_tqdm=False)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        prompt = {"prompt_token_ids": list(range(4000))}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert sum(entry is not None for entry in output.prompt_logprobs) == 3999
        assert torch.cuda.max_memory_allocated() - before < GIB
