"""Gaps between the tokens of running streams while a long prompt is taken in.

    python benchmarks/gaps.py [--model MODEL] [--streams 4] [--prompt-tokens 3900] [--threads 1]

Streams run, then one long prompt arrives; with `target_itl_ms=0` (steps as large as they may be)
and with the automatic target, turn by turn. Printed are the longest and the 99th percentile of the
gaps while the prompt is computed, the prompt's time to its first token, and the tokens that the
streams got meanwhile. `quire bench serve` shows gaps (ITL) under a load of many prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import numpy as np

from quire import AsyncLLM, RequestOutputKind, SamplingParams


async def measure(
    llm: AsyncLLM, num_streams: int, prompt: list[int], prompt_logprobs: bool
) -> tuple[np.ndarray, float, int]:
    """Gaps of all streams beside the prompt, and its time to first token."""
    delta = SamplingParams(
        max_tokens=100_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA, temperature=0.0
    )
    times: list[list[float]] = [[] for _ in range(num_streams)]
    started = asyncio.Event()

    async def stream(index: int) -> None:
        async for _ in llm.generate({"prompt_token_ids": [index + 1] * 8}, delta, f"s{index}"):
            times[index].append(time.perf_counter())
            if all(len(t) > 10 for t in times):
                started.set()

    tasks = [asyncio.create_task(stream(i)) for i in range(num_streams)]
    await started.wait()
    sent = time.perf_counter()
    params = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=1 if prompt_logprobs else None
    )
    async for _ in llm.generate({"prompt_token_ids": prompt}, params, "long"):
        pass
    first = time.perf_counter()
    await asyncio.sleep(0.2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gaps = np.concatenate([np.diff([t for t in ts if t > sent - 1]) for ts in times])
    num_tokens = sum(sent < t < first for ts in times for t in ts)
    return gaps, first - sent, num_tokens


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=3_900)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-logprobs", action="store_true")
    flags = parser.parse_args()
    engines = {
        name: AsyncLLM(
            flags.model, num_threads=flags.threads, target_itl_ms=target, max_model_len=8_192
        )
        for name, target in (("no target", 0), ("automatic", None))
    }
    random = np.random.default_rng(0)
    for _ in range(flags.rounds):
        prompt = random.integers(1_000, 20_000, flags.prompt_tokens).tolist()
        for name, llm in engines.items():
            gaps, first_s, num_tokens = await measure(
                llm, flags.streams, prompt, flags.prompt_logprobs
            )
            print(
                f"{name:10}: longest gap {max(gaps) * 1e3:7.0f} ms, p99 "
                f"{np.percentile(gaps, 99) * 1e3:7.0f} ms, first token after {first_s:5.1f} s, "
                f"{num_tokens} tokens streamed meanwhile",
                flush=True,
            )
    for llm in engines.values():
        llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
