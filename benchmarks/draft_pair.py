"""Speculation with a real pair on a CPU: the embedded model in float32, and its own 4-bit form as
the draft model, on the questions of Spec-Bench by category.

    QUIRE_TEST_DATA=... python benchmarks/draft_pair.py [--per-category 2] [--drafts 3]
    QUIRE_TEST_DATA=... python benchmarks/draft_pair.py --method auto

Each question is answered with and without drafts, one after the other, greedily and on one thread.
Tokens must be equal. Seconds are those of the processor, which other programs stretch less.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.config.embedded import embedded_model_path


def questions(path: Path, per_category: int) -> dict[str, list[str]]:
    """The first turns of the first questions of each category."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if len(found[entry["category"]]) < per_category:
            found[entry["category"]].append(entry["turns"][0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--method", choices=("draft_model", "auto"), default="draft_model")
    args = parser.parse_args()
    data = Path(os.environ["QUIRE_TEST_DATA"]) / "prompts" / "spec_bench_question.jsonl"
    config = {"model": str(embedded_model_path()), "num_speculative_tokens": args.drafts}
    config["method"] = args.method
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "num_threads": 1}
    options["log_level"] = "ERROR"
    plain, drafting = LLM(**options), LLM(speculative_config=config, **options)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    metrics = drafting._core.metrics
    print("category | questions | drafts accepted | tokens a verification | speed")
    for category, texts in questions(data, args.per_category).items():
        seconds = [0.0, 0.0]
        counters = (metrics.draft_tokens, metrics.accepted_tokens, metrics.drafts)
        before = [counter.value for counter in counters]
        for text in texts:
            tokens = []
            for i, llm in enumerate((plain, drafting)):
                llm.reset_prefix_cache()
                started = time.process_time()
                (output,) = llm.generate([text], params, use_tqdm=False)
                seconds[i] += time.process_time() - started
                tokens.append(output.outputs[0].token_ids)
            assert tokens[0] == tokens[1], f"texts differ: {text[:60]!r}"
        drafted, accepted, verified = (
            counter.value - start for counter, start in zip(counters, before, strict=True)
        )
        print(
            f"{category} | {len(texts)} | {accepted} of {drafted}, "
            f"{accepted / max(drafted, 1):.0%} | {1 + accepted / max(verified, 1):.2f} | "
            f"{seconds[0] / seconds[1]:.2f} x",
            flush=True,
        )


if __name__ == "__main__":
    main()
