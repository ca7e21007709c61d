"""Adapters on a GPU: what they cost next to none, and how long one takes to come from host memory.

    python benchmarks/gpu_adapters.py                        # llama-8b: some five minutes
    python benchmarks/gpu_adapters.py --model qwen3-0.6b --json adapters.json

Weights are random. The same requests run in an engine without adapters, then in one with 16 of rank
16 on all linear layers: w1 and w3 of gpu.py with none in use, w1 with all of them in each batch
(l1), w3 with one. Last, streams decode while adapters that are not on the device come there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu import ROUNDS, WORKLOADS, Request
from harness import SHAPES, markdown_table, require_gpu, say, start_engine, write_json
from quire import SamplingParams
from quire.lora.request import LoRARequest

if TYPE_CHECKING:
    from quire import LLM

NUM_ADAPTERS, RANK = 16, 16
NUM_SWAPPED = 8
"""Further ones, which lie in host memory alone."""
STREAMS = 8
MOST = {"w1, none in use": 1.02, "l1: w1, 16 in each batch": 1.15, "w3, one in use": 1.08}
"""Targets, as multiples of the same requests in an engine without adapters."""
MOST_SWAP_S, MOST_STEP = 0.030, 2.0


def linears(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The linear layers of a block as (inputs, outputs)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv_heads),
        "self_attn.v_proj": (hidden, kv_heads),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def write_adapters(
    folder: Path, config: dict[str, Any], count: int, rank: int
) -> list[LoRARequest]:
    """As peft writes them, in bfloat16, on all linear layers."""
    import torch
    from safetensors.torch import save_file

    requests = []
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (inputs, outputs) in linears(config).items():
                path = f"base_model.model.model.layers.{layer}.{name}"
                for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                    numbers = 0.01 * torch.randn(shape, generator=generator)
                    tensors[f"{path}.{part}.weight"] = numbers.bfloat16()
        place = folder / f"a{index}"
        place.mkdir()
        save_file(tensors, place / "adapter_model.safetensors")
        about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (place / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
        requests.append(LoRARequest(place.name, index + 1, str(place)))
    return requests


def seconds(llm: LLM, requests: Sequence[Request], adapters: Sequence[LoRARequest] = ()) -> float:
    """Of the last of some rounds, each with an empty prefix cache. Requests take turns with the
    adapters."""
    wanted = [adapters[i % len(adapters)] for i in range(len(requests))] if adapters else None
    took = 0.0
    for _ in range(ROUNDS):
        llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": one.prompt} for one in requests],
            [_params(one.num_outputs) for one in requests],
            lora_request=wanted,
            use_tqdm=False,
        )
        took = time.perf_counter() - started
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == [one.num_outputs for one in requests], "tokens are missing"
    return took


def _params(num_outputs: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=num_outputs, detokenize=False
    )


def swap(llm: LLM, adapters: Sequence[LoRARequest], num_outputs: int) -> dict[str, float]:
    """Streams without adapters decode, and requests for `adapters` come one by one; before that
    all of them are in host memory. Steps by their time on the host, which waits for the results."""
    for adapter in adapters:
        llm.add_lora(adapter)
    prompts = [Request([7 + index] * 100, num_outputs).prompt for index in range(STREAMS)]
    llm.enqueue([{"prompt_token_ids": one} for one in prompts], _params(num_outputs))
    steps: list[float] = []
    after: list[float] = []

    def step() -> float:
        started = time.perf_counter()
        llm._loop.step()
        return time.perf_counter() - started

    queries = llm._core.metrics.adapters.device_queries
    for _ in range(10):
        step()
    for adapter in adapters:
        steps += [step() for _ in range(10)]
        before = queries.value
        llm.enqueue([{"prompt_token_ids": [9] * 8}], _params(2), lora_request=adapter)
        while queries.value == before:  # its folder is looked at on another thread
            after.append(step())
        after += [step() for _ in range(2)]
    assert llm._core.scheduler.num_running >= STREAMS, "the streams have ended too soon"
    llm.wait_for_completion(use_tqdm=False)
    usual = statistics.median(steps)
    return {"step_s": usual, "longest_step_s": max(after), "ratio": max(after) / usual}


def placing(llm: LLM, slot: int) -> float:
    """Seconds until an adapter in host memory lies in the slot and chunks of the device."""
    import torch

    executor: Any = llm._core.executor
    adapters = executor.runner.adapters
    held = max(adapters._held.values(), key=lambda one: one.nbytes)
    took = []
    for _ in range(5):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        adapters.layers.place(slot, range(held.num_chunks), held)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args(words)
    require_gpu()
    model = arguments.model
    w1, w3 = (WORKLOADS[name].requests() for name in ("w1", "w3"))
    with start_engine(model) as llm:
        plain = {"w1": seconds(llm, w1), "w3": seconds(llm, w3)}
        say(f"without adapters: w1 {plain['w1']:.3f} s, w3 {plain['w3']:.3f} s")
    options = {"max_loras": NUM_ADAPTERS, "max_lora_rank": RANK, "max_cpu_loras": 64}
    with tempfile.TemporaryDirectory() as folder:
        count = NUM_ADAPTERS + NUM_SWAPPED
        made = write_adapters(Path(folder), SHAPES[model].config(), count, RANK)
        used, others = made[:NUM_ADAPTERS], made[NUM_ADAPTERS:]
        with start_engine(model, enable_lora=True, **options) as llm:
            found = {
                "w1, none in use": (seconds(llm, w1), plain["w1"]),
                "w3, none in use": (seconds(llm, w3), plain["w3"]),
                "l1: w1, 16 in each batch": (seconds(llm, w1, used), plain["w1"]),
                "w3, one in use": (seconds(llm, w3, used[:1]), plain["w3"]),
            }
            swapped = swap(llm, others, 400)
            placed_s = placing(llm, 0)
    rows = [
        [name, f"{took:.3f} s", f"{took / base:.3f} x", f"{MOST[name]:g} x" if name in MOST else ""]
        for name, (took, base) in found.items()
    ]
    longest, usual = 1000 * swapped["longest_step_s"], 1000 * swapped["step_s"]
    rows.append(
        [
            f"longest step while one comes; the usual one {usual:.2f} ms",
            f"{longest:.2f} ms",
            f"{swapped['ratio']:.2f} x",
            f"{MOST_STEP:g} x",
        ]
    )
    swap_target = f"{1000 * MOST_SWAP_S:g} ms"
    rows.append(["from host memory", f"{1000 * placed_s:.2f} ms", "", swap_target])
    say(markdown_table(["", "time", "next to no adapters", "target"], rows))
    figures = {
        "model": model,
        "plain_s": plain,
        "seconds": {name: took for name, (took, _) in found.items()},
        "swap": {**swapped, "placed_s": placed_s},
    }
    write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
