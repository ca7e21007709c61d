"""The engine without a server, for `server.py`: reads loads from standard input, one per line, runs
them through `LLM`, and writes figures named as those of `quire bench serve`."""

from __future__ import annotations

import json
import os
import statistics
import sys
from time import perf_counter
from typing import Any

from quire import LLM, SamplingParams
from quire.bench.serving.prompts import IdPrompts
from quire.bench.serving.workload import LoadRequest, Segment


def run(llm: LLM, load: dict[str, Any]) -> dict[str, Any]:
    """All requests at once, of which the engine runs `max_num_seqs` at a time; or one by one."""
    prompts = IdPrompts(load["seed"], load["vocab_size"])
    tokens = [
        prompts.make(LoadRequest((Segment(f"request {index}", load["input_len"]),), 1))
        for index in range(load["num_requests"])
    ]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=load["output_len"])
    batch = 1 if load["concurrency"] == 1 else len(tokens)
    first, whole = [], []
    started = perf_counter()
    for begin in range(0, len(tokens), batch):
        inputs: list[Any] = [{"prompt_token_ids": ids} for ids in tokens[begin : begin + batch]]
        sent = perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        whole.append(perf_counter() - sent)
        first += [one.metrics.time_to_first_token for one in outputs if one.metrics is not None]
    seconds = perf_counter() - started
    num_tokens = load["num_requests"] * load["output_len"]
    return {
        "output_tokens": num_tokens,
        "pieces": num_tokens,
        "output_tokens_per_s": num_tokens / seconds,
        "requests_per_s": load["num_requests"] / seconds,
        "ttft_s": {"p50": statistics.median(first), "p99": max(first)},
        "e2e_s": {"p50": statistics.median(whole)},
        "client_cpu_share": 0.0,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(run(llm, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
