"""Structured output: what is accepted, and what it costs.

    python benchmarks/structured.py
    python benchmarks/structured.py --parts speed --threads 2 --json structured.json

`schemas` walks the instances of maskbench_dev.jsonl.gz (in the folder schemas of the one that
QUIRE_TEST_DATA names) token by token through the engine's masks, and through llguidance called
directly. A schema passes if it compiles, its valid instances are accepted and its invalid ones are
not. `documents` lets the embedded model write a document for some of the schemas, at temperature 1,
and checks each that it finishes with `jsonschema`. `calls` forces a call of 200 random tools
(`structured_calls.py`), at temperature 1, and counts those that end within 400 tokens, with the
default layout and with any amount of white space. `speed` measures, with the embedded model: the
time per token of 32 requests under a fixed-length expression against the same without one; what a
schema that was never seen adds to a request; and tokens/s of a key-heavy schema with and without
jump-ahead. `memory` sends 10,000 different schemas to a server and prints how the memory of its
processes grows (Linux; a few minutes). Ends with status 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from harness import markdown_table, say
from quire import LLM, RequestError, SamplingParams, StructuredOutputs
from quire.config.model import load_model_config
from quire.config.structured import GrammarSettings
from quire.engine.structured_output.compiler import GrammarCompiler
from quire.engine.structured_output.grammar_source import Vocabulary
from quire.engine.structured_output.matcher import Grammar, MaskSettings, Matcher
from quire.text.tokenizer import Tokenizer, load_tokenizer
from structured_calls import measure_calls
from structured_memory import measure_memory

FILE = "schemas/maskbench_dev.jsonl.gz"
BATCH = 32
MAX_ADDED_SHARE = 0.05
MAX_NEW_SCHEMA_S = 0.050
MIN_JUMP_AHEAD = 1.5
NUM_NEW_SCHEMAS = 25
DOCUMENT_TOKENS = 300
PARTS = ("schemas", "documents", "calls", "speed", "memory")

KEYS = ("customer_identifier", "shipping_address_line", "billing_address_line", "order_reference")
KEY_HEAVY = {
    "type": "object",
    "properties": {
        f"{key}_{part}": {"type": "integer", "minimum": 0, "maximum": 9}
        for key in KEYS
        for part in ("primary", "secondary", "confirmation")
    },
    "additionalProperties": False,
}
KEY_HEAVY["required"] = list(KEY_HEAVY["properties"])  # type: ignore[call-overload]


# --- schemas ------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the schemas on one way."""

    passed: int = 0
    refused: int = 0
    valid_rejected: int = 0
    invalid_accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def count(self, results: list[tuple[bool, bool]] | str) -> None:
        """`results`: (is valid, was accepted) of each instance, or why there are none."""
        if isinstance(results, str):
            self.refused += 1
            self.reasons[results[:70]] += 1
            return
        self.valid_rejected += any(valid and not accepted for valid, accepted in results)
        self.invalid_accepted += any(accepted and not valid for valid, accepted in results)
        self.passed += all(valid == accepted for valid, accepted in results)

    def row(self, name: str) -> list[str]:
        shown = (self.passed, self.refused, self.valid_rejected, self.invalid_accepted)
        return [name, *map(str, shown)]


def read_cases(limit: int | None) -> Iterator[dict[str, Any]]:
    folder = os.environ.get("QUIRE_TEST_DATA")
    if not folder:
        sys.exit("QUIRE_TEST_DATA is not set: it names the folder that holds " + FILE)
    with gzip.open(Path(folder) / FILE, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                return
            yield json.loads(line)


def walk(grammar: Grammar, vocabulary: Vocabulary, tokens: list[int]) -> bool:
    """Whether the engine's masks let a model write these tokens and then end."""
    matcher = Matcher(grammar, SamplingParams(), vocabulary.eos_token_ids)
    settings = MaskSettings([matcher])
    mask = np.empty(grammar.num_words, np.int32)
    for token in [*tokens, vocabulary.eos_token_ids[0]]:
        if matcher.is_complete:
            return token in vocabulary.eos_token_ids
        matcher.native.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        settings.apply(mask[None])
        if matcher.failure is not None or not mask[token // 32] >> token % 32 & 1:
            return False
        if token not in vocabulary.eos_token_ids:
            matcher.consume(token)
    return True


def by_engine(
    compiler: GrammarCompiler, vocabulary: Vocabulary, tokenizer: Tokenizer, case: dict[str, Any]
) -> list[tuple[bool, bool]] | str:
    try:
        grammar = compiler.compile(StructuredOutputs(json=case["schema"])).result()
    except RequestError as error:
        return str(error)
    return [
        (test["valid"], walk(grammar, vocabulary, instance_tokens(tokenizer, test)))
        for test in case["tests"]
    ]


def directly(
    native: LLTokenizer, tokenizer: Tokenizer, case: dict[str, Any]
) -> list[tuple[bool, bool]] | str:
    text = LLMatcher.grammar_from_json_schema(json.dumps(case["schema"]))
    start = LLMatcher(native, text, log_level=0)
    if start.is_error():
        return start.get_error()
    results = []
    for test in case["tests"]:
        matcher, accepted = start.deep_copy(), True
        for token in instance_tokens(tokenizer, test):
            accepted = bool(matcher.compute_bitmask()[token // 8] >> token % 8 & 1)
            if not accepted:
                break
            matcher.consume_token(token)
        results.append((test["valid"], accepted and matcher.is_accepting()))
    return results


def instance_tokens(tokenizer: Tokenizer, test: dict[str, Any]) -> list[int]:
    text = json.dumps(test["data"], ensure_ascii=False)
    return tokenizer.encode(text, add_special_tokens=False)


def measure_schemas(limit: int | None) -> dict[str, Any]:
    model = load_model_config(None)
    tokenizer = load_tokenizer(model.source)
    eos = tuple(model.eos_token_ids)
    vocabulary = Vocabulary(tokenizer.backend.to_str(), model.vocab_size, eos)
    native = LLTokenizer(vocabulary.tokenizer_json, n_vocab=model.vocab_size, eos_token=list(eos))
    compiler = GrammarCompiler(GrammarSettings())
    compiler.set_vocabulary(lambda: vocabulary)
    ours, reference = Tally(), Tally()
    started = time.perf_counter()
    for case in read_cases(limit):
        ours.count(by_engine(compiler, vocabulary, tokenizer, case))
        reference.count(directly(native, tokenizer, case))
    say(f"walked in {time.perf_counter() - started:.0f} s")
    head = ["", "passed", "refused", "with a valid one rejected", "with an invalid one accepted"]
    print(markdown_table(head, [ours.row("quire"), reference.row("llguidance")]))
    for reason, count in ours.reasons.most_common(12):
        print(f"  {count:4d} x {reason}")
    compiler.shutdown()
    return {
        "passed": ours.passed,
        "passed_directly": reference.passed,
        "invalid_accepted": ours.invalid_accepted,
        "met": ours.passed >= reference.passed and ours.invalid_accepted == 0,
    }


# --- documents ----------------------------------------------------------------------------------


def measure_documents(engine: dict[str, Any], count: int) -> dict[str, Any]:
    """Documents for `count` of the schemas, drawn evenly from the file."""
    schemas = [case["schema"] for case in read_cases(None)]
    schemas = schemas[:: max(1, len(schemas) // count)][:count]
    found = Counter[str]()
    with LLM(**engine) as llm:
        for place, schema in enumerate(schemas):
            try:
                grammar = StructuredOutputs(json=schema)
                params = SamplingParams(
                    seed=place, max_tokens=DOCUMENT_TOKENS, structured_outputs=grammar
                )
                (output,) = llm.generate(["An example: "], params, use_tqdm=False)
            except RequestError:
                found["refused by name"] += 1
                continue
            (written,) = output.outputs
            found[verdict(written.text, written.finish_reason, schema)] += 1
    print("documents: " + ", ".join(f"{number} {name}" for name, number in found.items()))
    wrong = found["INVALID"] + found["ended by error"]
    return {**found, "met": wrong == 0 and found["valid"] > 0}


def verdict(text: str, finish_reason: str | None, schema: Any) -> str:
    if finish_reason != "stop":
        return "cut off at the limit" if finish_reason == "length" else f"ended by {finish_reason}"
    try:
        jsonschema.validate(json.loads(text), schema)
    except jsonschema.SchemaError:
        return "with schemas that jsonschema refuses"
    except (jsonschema.ValidationError, json.JSONDecodeError) as error:
        say(f"INVALID: {json.dumps(schema)[:300]}\n  {text[:300]}\n  {str(error)[:200]}")
        return "INVALID"
    return "valid"


# --- speed --------------------------------------------------------------------------------------


def seconds(llm: LLM, prompts: list[str], params: SamplingParams) -> tuple[float, int]:
    """(time, tokens) of one call."""
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started, sum(len(o.outputs[0].token_ids) for o in outputs)


def measure_added_time(llm: LLM, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Each round is free, bound, bound, free, for the machine's speed drifts. Other programs only
    ever add time: the quicker quarters of both kinds are compared, and the middles shown too."""
    grammar = StructuredOutputs(regex=r"(.|\n){4000}")
    plain: dict[str, Any] = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
    prompts = [f"Story number {i}: once upon a time" for i in range(BATCH)]
    free, bound = SamplingParams(**plain), SamplingParams(**plain, structured_outputs=grammar)
    steps: tuple[list[float], list[float]] = [], []
    for is_bound in (False, True, *(False, True, True, False) * rounds):
        spent, count = seconds(llm, prompts, bound if is_bound else free)
        assert count == BATCH * num_tokens, count
        steps[is_bound].append(spent / num_tokens)
    # The first of each kind has warmed up.
    quick_free, quick_bound = (statistics.quantiles(times[1:], n=4)[0] for times in steps)
    middle_free, middle_bound = (statistics.median(times[1:]) for times in steps)
    added, in_the_middle = quick_bound / quick_free - 1, middle_bound / middle_free - 1
    print(
        f"time per step of {BATCH} tokens: {quick_free * 1e3:.1f} ms, with a grammar {added:+.1%} "
        f"(medians: {middle_free * 1e3:.1f} ms, {in_the_middle:+.1%})"
    )
    return {"added_share": added, "step_s": quick_free, "met": added < MAX_ADDED_SHARE}


def measure_new_schemas(llm: LLM) -> dict[str, Any]:
    plain: dict[str, Any] = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
    schemas = [case["schema"] for case in read_cases(None)][:: 1900 // NUM_NEW_SCHEMAS]
    added = []
    seconds(
        llm, ["Hello"], SamplingParams(**plain, structured_outputs=StructuredOutputs(regex=".{9}"))
    )
    for schema in schemas:
        free, _ = seconds(llm, ["Hello"], SamplingParams(**plain))
        try:
            grammar = StructuredOutputs(json=schema)
            bound, _ = seconds(llm, ["Hello"], SamplingParams(**plain, structured_outputs=grammar))
        except RequestError:
            continue
        added.append(bound - free)
    median = statistics.median(added)
    worst = max(added)
    print(
        f"a new schema adds {median * 1e3:.1f} ms (median of {len(added)}), at most {worst:.2f} s"
    )
    return {"median_s": median, "max_s": worst, "met": median < MAX_NEW_SCHEMA_S}


def measure_jump_ahead(engine: dict[str, Any]) -> dict[str, Any]:
    grammar = StructuredOutputs(json=KEY_HEAVY, disable_any_whitespace=True)
    params = SamplingParams(temperature=0.0, max_tokens=400, structured_outputs=grammar)
    rates, texts = [], []
    for jump_ahead in (False, True):
        with LLM(**engine, structured_outputs_config={"jump_ahead": jump_ahead}) as llm:
            seconds(llm, ["Hello"], params)
            runs = [seconds(llm, [f"An order in JSON, {i}: "] * 4, params) for i in range(3)]
            rates.append(statistics.median(count / spent for spent, count in runs))
            outputs = llm.generate(["An order in JSON: "], params, use_tqdm=False)
            texts.append(outputs[0].outputs[0].text)
    jsonschema.validate(json.loads(texts[1]), KEY_HEAVY)
    gain = rates[1] / rates[0]
    same = "the same text" if texts[0] == texts[1] else "ANOTHER TEXT"
    print(f"jump-ahead: {rates[0]:.0f} -> {rates[1]:.0f} tokens/s, {gain:.2f} x, {same}")
    return {"gain": gain, "met": gain >= MIN_JUMP_AHEAD and texts[0] == texts[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--schemas", type=int, help="walk the first N only")
    parser.add_argument("--documents", type=int, default=80, help="write so many")
    parser.add_argument("--calls", type=int, default=200, help="force so many")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=48, help="per request, for the added time")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--grammars", type=int, default=10_000, help="for the memory")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    parts = given.parts
    engine = {"num_threads": given.threads, "max_model_len": 1024}
    if "schemas" in parts:
        found["schemas"] = measure_schemas(given.schemas)
    if "documents" in parts:
        found["documents"] = measure_documents(engine, given.documents)
    if "calls" in parts:
        found["calls"] = measure_calls(engine, given.calls)
    if "speed" in parts:
        with LLM(**engine) as llm:
            found["added_time"] = measure_added_time(llm, given.tokens, given.rounds)
            found["new_schemas"] = measure_new_schemas(llm)
        found["jump_ahead"] = measure_jump_ahead(engine)
    if "memory" in parts:
        found["memory"] = measure_memory(given.grammars)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))
    missed = [name for name, figures in found.items() if not figures["met"]]
    print("all aims met" if not missed else f"missed: {', '.join(missed)}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
