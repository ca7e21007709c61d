"""The engine without a server, for `server.py`: reads loads from standard input, one per line, runs
them through `AsyncLLM` as an HTTP server would, and writes what `quire bench serve` measures."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from quire import AsyncLLM, SamplingParams
from quire.bench.serving.arrivals import Load
from quire.bench.serving.prompts import IdPrompts
from quire.bench.serving.runner import LoadRun, Record
from quire.bench.serving.statistics import summarize
from quire.bench.serving.workload import LoadRequest, Segment
from quire.protocol.sampling import RequestOutputKind


async def ask(llm: AsyncLLM, request: LoadRequest, prompt: list[int]) -> Record:
    clock = asyncio.get_running_loop().time
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=request.num_output_tokens,
        output_kind=RequestOutputKind.DELTA,
    )
    record = Record(request, clock(), 0.0)
    async for output in llm.generate({"prompt_token_ids": prompt}, params):
        record.times.append(clock())
        record.texts.append(output.outputs[0].text)
    record.end_s = clock()
    record.num_output_tokens = request.num_output_tokens
    return record


async def run(llm: AsyncLLM, load: dict[str, Any]) -> dict[str, Any]:
    prompts = IdPrompts(load["seed"], load["vocab_size"])
    waiting = iter(
        [
            LoadRequest((Segment(f"request {index}", load["input_len"]),), load["output_len"])
            for index in range(load["num_requests"])
        ]
    )
    records: list[Record] = []

    async def keep_asking() -> None:
        for request in waiting:
            record = await ask(llm, request, prompts.make(request))
            records.append(record)

    await asyncio.gather(*(keep_asking() for _ in range(load["concurrency"])))
    seconds = max(one.end_s for one in records) - min(one.sent_s for one in records)
    return summarize(LoadRun(Load("concurrency", load["concurrency"]), records, seconds, 0.0))


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    llm = AsyncLLM(sys.argv[1], **json.loads(sys.argv[2]))
    print("ready", file=answers, flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await run(llm, json.loads(line))), file=answers, flush=True)
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
