"""Speculation with drafts from the text: the same requests with and without, in turns.

    python benchmarks/speculation.py [--model MODEL] [--quantization gguf] [--rounds 5]
    python benchmarks/speculation.py --quantization gguf --processor-time

A document and a list that are given back with a small change, where drafts should win, and ordinary
questions, where they should cost nothing. Tokens must be equal. One engine for each method answers
with drafts and without: two engines differ by where their weights lie. Seconds of the processor, on
one thread, are stretched less by other programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.scheduler.speculation import Speculation

NAMES = ("apples", "pears", "plums", "figs", "dates", "limes", "melons", "grapes", "kiwis", "nuts")
COLOURS = ("red", "green", "blue", "brown", "black", "yellow", "orange", "purple", "grey", "white")
LIST = "\n".join(
    f"{number}. {name}: {colour}, {number * 7 % 31} kg, shelf {number * 5 % 17}"
    for number, (name, colour) in enumerate(zip(NAMES, COLOURS, strict=True), 1)
)
EDIT = f"""Here is the list of goods:
{LIST}

Here is the same list, but with 'bin' instead of 'shelf' in line 1:
1. apples: red, 7 kg, bin 5
"""
DOCUMENT = (
    "lies between two low hills, and its houses stand so close to the water that at high tide the "
    "waves reach the lowest steps. Fishing boats leave before dawn and come back in the afternoon, "
    "when the market opens on the quay. Mrs Harper sells herring, mackerel and crab there, as her "
    "mother did before her, and she knows every skipper by name. In winter the market is held in "
    "the old customs house, which has thick walls and a large stove. The town council wanted to "
    "close it last year because the roof leaks, but so many people complained that the money for "
    "a new roof was found after all. Work begins in March and will take about four months. Until "
    "then a canvas is stretched over the worst places, and buckets stand under the others. "
    "Visitors are told to mind their heads. The ferry to the islands leaves from the northern pier "
    "twice a day, at nine and at four, and a return ticket costs twelve pounds. Children under six "
    "travel free. From May to September there is a third boat at noon, which stops at the "
    "lighthouse for an hour, so that passengers can climb its two hundred steps and look over the "
    "whole bay. On a clear day one can see as far as the mountains of the north."
)
DOCUMENT_EDIT = f"""Original text:

The old harbour of Westhaven {DOCUMENT}

The same text with 'Northhaven' instead of 'Westhaven':

The old harbour of Northhaven"""
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 8,
    },
    "auto": {"method": "auto", "num_speculative_tokens": 8},
}


def workloads(prompts: Path | None) -> dict[str, list[str]]:
    questions = ["Question: how do plants make sugar from light?\nAnswer:"]
    if prompts is not None:
        lines = [json.loads(line) for line in prompts.read_text().splitlines()]
        questions = [line["turns"][0] for line in lines[:80:20]]
    return {"edited document": [DOCUMENT_EDIT], "edited list": [EDIT], "questions": questions}


@dataclass
class Drafts:
    """Those of an engine, on or off; it must be at rest."""

    llm: LLM
    runner: Any = field(init=False)
    on: tuple[Any, Speculation] = field(init=False)

    def __post_init__(self) -> None:
        executor: Any = self.llm._core.executor
        self.runner = executor.runner
        self.on = self.runner.drafter, self.llm._core.scheduler.speculation

    def switch(self, on: bool) -> None:
        scheduler = self.llm._core.scheduler
        off = None, Speculation(scheduler.columns)
        self.runner.drafter, scheduler.speculation = self.on if on else off

    @property
    def counted(self) -> tuple[int, int]:
        metrics = self.llm._core.metrics
        return int(metrics.accepted_tokens.value), int(metrics.draft_tokens.value)


def compare(
    drafts: Drafts, texts: list[str], args: argparse.Namespace, clock: Callable[[], float]
) -> str:
    """Of one method: how many times as fast each text is with drafts, and all of them."""
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    seconds: list[list[tuple[float, float]]] = [[] for _ in texts]
    accepted = drafted = 0
    for number in range(1 + args.rounds):  # the first warms up
        before = drafts.counted
        for place, text in enumerate(texts):
            each, made = [], []
            for on in (False, True):
                drafts.switch(on)
                drafts.llm.reset_prefix_cache()
                started = clock()
                (output,) = drafts.llm.generate([text], params, use_tqdm=False)
                each.append(clock() - started)
                made.append(output.outputs[0].token_ids)
            assert made[0] == made[1], f"texts differ: {text[:60]!r}"
            if number:
                seconds[place].append((each[0], each[1]))
        accepted, drafted = (now - then for now, then in zip(drafts.counted, before, strict=True))
    ratios = [statistics.median(off / on for off, on in pairs) for pairs in seconds]
    without = sum(statistics.median(off for off, _ in pairs) for pairs in seconds)
    overall = len(ratios) / sum(1 / ratio for ratio in ratios)
    singly = f" ({', '.join(f'{ratio:.2f}' for ratio in ratios)})" if len(ratios) > 1 else ""
    return (
        f"{without:6.2f} s without, {overall:5.2f} x with drafts{singly}, {accepted} of {drafted} "
        "accepted"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--quantization")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=Path, help="spec_bench_question.jsonl or the like")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    options: dict[str, Any] = {"dtype": args.dtype, "quantization": args.quantization}
    if args.processor_time:
        options["num_threads"] = 1
    clock = time.process_time if args.processor_time else time.perf_counter
    for method in args.methods:
        config = METHODS[method]
        with LLM(
            args.model,
            speculative_config=config,
            log_level="ERROR",
            max_model_len=4096,
            **options,
        ) as llm:
            drafts = Drafts(llm)
            for name, texts in workloads(args.prompts).items():
                print(f"{method:6} {name:16} {compare(drafts, texts, args, clock)}", flush=True)


if __name__ == "__main__":
    main()
