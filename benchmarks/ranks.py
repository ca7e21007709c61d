"""What ranks in processes of their own cost a step: a toy model, many requests, one rank and two.

    python benchmarks/ranks.py --requests 1024 --rounds 5

The model is so small that nearly all of a step is the host's work and the way of plans and results.
All engines run at the same time and take turns, a round each. A machine with free cores is needed:
every rank and the engine keep one busy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ENGINES: dict[str, dict[str, Any]] = {
    "one rank, in this process": {},
    "one rank, in another": {"distributed_executor_backend": "mp"},
    "two tensor-parallel ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}


def start(folder: Path, num_requests: int, changes: dict[str, Any]) -> LLM:
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        num_threads=changes.get("tensor_parallel_size", 1),
        max_model_len=1024,
        max_num_seqs=num_requests,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=num_requests * 24,
        **changes,
    )


def step_seconds(llm: LLM, num_requests: int, num_tokens: int) -> float:
    """Of a decode step: what more tokens take, without prompts and texts."""
    prompts: Any = [{"prompt_token_ids": [1 + i % 200, 2 + i // 200]} for i in range(num_requests)]
    took = []
    for count in (8, 8 + num_tokens):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        before = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        took.append(time.perf_counter() - before)
    return (took[1] - took[0]) / num_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        engines = {
            name: start(folder, arguments.requests, changes) for name, changes in ENGINES.items()
        }
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(1 + arguments.rounds):
            for name, llm in engines.items():
                times[name].append(step_seconds(llm, arguments.requests, arguments.tokens))
        for llm in engines.values():
            llm.shutdown()
    first = next(iter(times))
    base = statistics.median(times[first][1:])
    print(f"{arguments.requests} requests, {arguments.tokens} steps, {arguments.rounds} rounds")
    for name, values in times.items():
        middle = statistics.median(values[1:])
        print(
            f"{name:28} {1e3 * middle:7.2f} ms a token of all ({1e3 * min(values[1:]):.2f} to "
            f"{1e3 * max(values[1:]):.2f}), {1e3 * (middle - base):+.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
