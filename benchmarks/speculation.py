"""Speculation with drafts from the text: the same requests with and without, in turns.

    python benchmarks/speculation.py [--model MODEL] [--quantization gguf] [--rounds 5]

Texts that repeat their prompt, where drafts should win, and ordinary questions, where they should
cost nothing. Tokens must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

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
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
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
    return {"edited list": [EDIT], "questions": questions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--quantization")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=Path, help="spec_bench_question.jsonl or the like")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    options = {"dtype": args.dtype, "quantization": args.quantization, "max_model_len": 4096}
    engines = {
        name: LLM(args.model, speculative_config=config, log_level="ERROR", **options)
        for name, config in METHODS.items()
    }
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    for name, texts in workloads(args.prompts).items():
        seconds: dict[str, list[float]] = {method: [] for method in engines}
        tokens: dict[str, Any] = {}
        drafts: dict[str, str] = {}
        for _ in range(1 + args.rounds):  # the first warms up
            for method, llm in engines.items():
                metrics = llm._core.metrics
                before = metrics.draft_tokens.value, metrics.accepted_tokens.value
                llm.reset_prefix_cache()
                started, made = time.perf_counter(), []
                for text in texts:  # one stream
                    (output,) = llm.generate([text], params, use_tqdm=False)
                    made.append(output.outputs[0].token_ids)
                seconds[method].append(time.perf_counter() - started)
                tokens[method] = made
                drafted = metrics.draft_tokens.value - before[0]
                accepted = metrics.accepted_tokens.value - before[1]
                drafts[method] = f"{accepted} of {drafted}"
        assert all(made == tokens["none"] for made in tokens.values()), "texts differ"
        plain = statistics.median(seconds["none"][1:])
        for method, times in seconds.items():
            middle = statistics.median(times[1:])
            print(
                f"{name:12} {method:6} {middle:6.2f} s  {plain / middle:5.2f} x  "
                f"drafts accepted {drafts[method]}"
            )


if __name__ == "__main__":
    main()
