"""Every benchmark runs to its end, and its figures agree with each other and with arithmetic.

No test looks at how long anything took.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.cli import BENCHMARKS, main
from tests.bench.conftest import Bench

Request = dict[str, int]


def tokens_by_step(requests: Sequence[Request], at_once: int) -> list[list[tuple[Request, int]]]:
    """Who runs in each step with how many tokens in the cache, if at most `at_once` run together.

    Prompts are computed whole in one step; each step after it adds a token.
    """
    waiting = list(requests)
    running: list[tuple[Request, int]] = []
    steps = []
    while waiting or running:
        running = [(one, age + 1) for one, age in running if age + 1 < one["output_tokens"]]
        while waiting and len(running) < at_once:
            running.append((waiting.pop(0), 0))
        steps.append([(one, one["input_tokens"] + age) for one, age in running])
        if not waiting and all(age + 1 == one["output_tokens"] for one, age in running):
            break
    return steps


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def test_throughput_rates_are_the_counts_over_the_time(bench: Bench) -> None:
    figures = bench("throughput", "--num-requests", "5", "--rounds", "3")
    requests, seconds = figures["requests"], figures["seconds"]
    assert len(requests) == 5
    assert seconds == sorted(figures["rounds_s"])[1]
    assert figures["input_tokens"] == sum(one["input_tokens"] for one in requests)
    assert figures["output_tokens"] == sum(one["output_tokens"] for one in requests)
    total = figures["input_tokens"] + figures["output_tokens"]
    assert figures["output_tokens_per_s"] == pytest.approx(figures["output_tokens"] / seconds)
    assert figures["total_tokens_per_s"] == pytest.approx(total / seconds)
    assert figures["requests_per_s"] == pytest.approx(5 / seconds)
    assert figures["max_running"] == 5
    assert figures["steps"] == max(one["output_tokens"] for one in requests)


def test_throughput_of_a_file_of_requests(bench: Bench, tmp_path: Path) -> None:
    """A workload made elsewhere is run as it is: its prompts, its output lengths, no others."""
    path = tmp_path / "work.json"
    path.write_text(json.dumps({"mine": [{"ids": [5, 6, 7], "out": 4}, {"ids": [9], "out": 2}]}))
    figures = bench("throughput", "--requests", f"{path}:mine")
    assert figures["requests"] == [
        {"input_tokens": 3, "output_tokens": 4},
        {"input_tokens": 1, "output_tokens": 2},
    ]
    assert figures["output_tokens"] == 6


def test_latency_never_finds_prompts_in_the_cache(bench: Bench) -> None:
    """Repeats start with an empty cache: a first token found there says nothing of prefill."""
    figures = bench("latency", "--batch-size", "3", "--repeats", "4")
    assert figures["cached_tokens"] == 0
    assert len(figures["first_token_s"]) == len(figures["per_token_s"]) == 12
    for name in ("first_token", "per_token", "batch"):
        values = sorted(figures[f"{name}_s"])
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        assert figures[f"{name}_median_s"] == pytest.approx(middle)
        assert figures[f"{name}_median_s"] <= figures[f"{name}_p90_s"] <= values[-1]


def test_prefix_counts_what_was_shared(bench: Bench) -> None:
    """Questions after the first under a system prompt take all of it from the cache; with caching
    off nothing does. The outputs are the same."""
    figures = bench("prefix", "--system-prompts", "2", "--questions", "3", "--system-len", "48")
    on, off = figures["on"], figures["off"]
    assert off["hit_rate"] == 0 and off["cached_tokens"] == 0
    assert 2 * 2 * 48 <= on["cached_tokens"] < on["input_tokens"]
    assert on["hit_rate"] == on["cached_tokens"] / on["input_tokens"]
    assert on["allocated_blocks"] < off["allocated_blocks"]
    assert figures["speedup"] == off["seconds"] / on["seconds"]
    assert figures["first_token_speedup"] == (
        off["first_token_median_s"] / on["first_token_median_s"]
    )
    assert figures["equal_outputs"] == len(figures["requests"]) == 6


def test_blocks_waste_and_allocations(bench: Bench) -> None:
    """Each figure follows from the lengths alone: all requests start together and grow by one."""
    figures = bench("blocks", "--block-sizes", "4,8,32")
    assert [(r["mix"], r["block_size"]) for r in figures["results"]] == [
        (mix, size) for mix in ("short", "long") for size in (4, 8, 32)
    ]
    for result in figures["results"]:
        requests, size = figures["mixes"][result["mix"]], result["block_size"]
        steps = tokens_by_step(requests, at_once=len(requests))
        held = [sum(blocks_for(count, size) for _, count in step) for step in steps]
        tokens = sum(count for step in steps for _, count in step)
        assert result["waste"] == pytest.approx(1 - tokens / (size * sum(held)))
        assert result["peak_blocks"] == max(held)
        assert result["max_unused_slots"] < size
        assert result["allocated_blocks"] == sum(
            blocks_for(one["input_tokens"] + one["output_tokens"] - 1, size) for one in requests
        )
        num_output = sum(one["output_tokens"] for one in requests)
        assert result["output_tokens_per_s"] == pytest.approx(num_output / result["seconds"])


def expected_reservation(figures: dict[str, Any]) -> dict[str, float]:
    """Shares of slots if every request reserves the maximum length, from the lengths alone."""
    size, requests = figures["block_size"], figures["requests"]
    capacity = figures["num_blocks"] * size
    reserved = blocks_for(figures["max_model_len"], size) * size
    at_once = capacity // reserved
    counts = dict.fromkeys(("used", "internal", "not_yet_used", "never_used", "external"), 0)
    num_steps, admitted = 0, set[int]()
    for step in tokens_by_step(requests, at_once):
        admitted |= {id(one) for one, _ in step}
        if len(admitted) == len(requests):
            break  # no request waits any more
        num_steps += 1
        for one, count in step:
            in_use = blocks_for(count, size) * size
            last = one["input_tokens"] + one["output_tokens"] - 1
            needed = blocks_for(last, size) * size
            counts["used"] += count
            counts["internal"] += in_use - count
            counts["not_yet_used"] += needed - in_use
            counts["never_used"] += reserved - needed
        counts["external"] += capacity - len(step) * reserved
    return {name: count / (num_steps * capacity) for name, count in counts.items()}


def test_memory_of_reservation_and_paging(bench: Bench) -> None:
    """Reservation wastes what arithmetic says; paging less than a block per sequence, and nothing
    by reserving; both run the same requests in the same memory."""
    figures = bench("memory", "--no-transformers", "--num-requests", "10", "--block-size", "8")
    assert set(figures["systems"]) == {"paged", "max_length"}
    paged, reserved = figures["systems"]["paged"], figures["systems"]["max_length"]
    for system in (paged, reserved):
        assert sum(system["slots"].values()) == pytest.approx(1)
        taken = 1 - system["slots"]["free"]
        assert system["waste"] == pytest.approx(1 - system["slots"]["used"] / taken)
    assert paged["max_unused_slots"] < 8
    for kind in ("not_yet_used", "never_used", "external", "padding", "ended"):
        assert paged["slots"][kind] == 0
    for kind, share in expected_reservation(figures).items():
        assert reserved["slots"][kind] == pytest.approx(share), kind
    assert paged["waste"] < reserved["waste"]
    most = figures["num_blocks"] // blocks_for(figures["max_model_len"], 8)
    assert reserved["in_flight_max"] == most < paged["in_flight_max"]
    assert figures["speedup"] == {
        "max_length": paged["output_tokens_per_s"] / reserved["output_tokens_per_s"]
    }


def test_memory_of_static_batches(bench: Bench) -> None:
    """transformers holds a rectangle per batch: as wide as the longest prompt and what was
    generated beside it, until the longest output ends."""
    pytest.importorskip("transformers")
    figures = bench("memory", "--num-requests", "7")
    static = figures["systems"]["transformers"]
    capacity = figures["num_blocks"] * figures["block_size"]
    size = capacity // figures["max_model_len"]
    assert 1 < size < 7
    used = padding = ended = num_steps = 0
    batches = [figures["requests"][i : i + size] for i in range(0, 7, size)]
    for batch in batches[:-1]:
        width = max(one["input_tokens"] for one in batch)
        for age in range(max(one["output_tokens"] for one in batch)):
            num_steps += 1
            for one in batch:
                if age < one["output_tokens"]:
                    used += one["input_tokens"] + age
                    padding += width - one["input_tokens"]
                else:
                    ended += width + age
    for kind, count in (("used", used), ("padding", padding), ("ended", ended)):
        assert static["slots"][kind] == pytest.approx(count / (num_steps * capacity)), kind
    assert sum(static["slots"].values()) == pytest.approx(1)
    assert static["in_flight_max"] == size
    assert static["steps"] == sum(max(one["output_tokens"] for one in batch) for batch in batches)
    num_output = sum(one["output_tokens"] for one in figures["requests"])
    assert static["output_tokens_per_s"] == pytest.approx(num_output / static["seconds"])


def test_host_work_is_counted_for_every_step(bench: Bench) -> None:
    """Each request is admitted once and ends once, and stages add up to the whole."""
    figures = bench("host", "--num-requests", "9", "--rounds", "3")
    kinds = figures["steps"]
    assert sum(steps["requests"] for steps in kinds.values()) == 2 * 9 * 2
    assert kinds["decode"]["requests"] == 0
    for steps in kinds.values():
        parts = [steps[stage]["mean"] for stage in ("schedule", "plan", "apply", "outputs")]
        assert steps["all"]["mean"] == pytest.approx(sum(parts))
        assert 0 < steps["all"]["median"] <= steps["all"]["p99"] <= steps["all"]["worst"]


@pytest.mark.parametrize("name", sorted(BENCHMARKS.keys() - {"serve"}))
def test_table_and_plot(
    name: str, model_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What people look at: a table on standard output and a picture."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    words = ["--no-transformers"] if name == "memory" else []
    assert main(["bench", name, "--quick", "--plot", str(path), *model_words, *words]) == 0
    assert "----  --" in capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["throughput", "--input-len", "9:3"], "--input-len must be a number of tokens or a range"),
        (["throughput", "--rounds", "0"], "--rounds must be an integer of at least 1, got '0'"),
        (["throughput", "--distribution", "x"], "--distribution must be log-uniform or uniform"),
        (["throughput", "--requests", "no.json"], "no.json cannot be read"),
        (["throughput", "--json", "no/such/folder/x.json"], "the folder does not exist"),
        (["latency", "--plot", "x.doc"], "must end in one of .png"),
        (["blocks", "--block-sizes", "4,5"], "--block-sizes has 5"),
        (["memory", "--max-model-len", "20"], "max_model_len=20 is less than the longest request"),
        (["memory", "--reservations", "x"], "--reservations must be a number of at least 1"),
    ],
)
def test_mistakes_end_before_anything_is_measured(
    words: list[str], message: str, model_words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words, *model_words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_without_matplotlib_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "latency", "--plot", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_bad_request_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_words: list[str]
) -> None:
    path = tmp_path / "work.json"
    for content, message in (
        ({"a": [], "b": []}, "holds a, b; name one of them"),
        ([], "must lead to a list of requests"),
        ([{"ids": [1], "out": 0}], "entry 0 must be an object with ids"),
        ([{"ids": [1], "out": 1}, {"ids": "text", "out": 1}], "entry 1 must be"),
    ):
        path.write_text(json.dumps(content))
        assert main(["bench", "throughput", "--requests", str(path), *model_words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2"])
def test_transformers_runs_the_same_model(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures mean something only if it computes what Quire computes: the tokens are equal."""
    pytest.importorskip("transformers")
    from tests.models.reference import random_model, save_safetensors

    rope = {} if family in ("opt", "gpt2") else {"rope_theta": 500.0}
    folder = save_safetensors(random_model(family, **rope), tmp_path / "model")
    words = ["--model", str(folder), "--skip-tokenizer-init", "--json", str(tmp_path / "x.json")]
    assert main(["bench", "memory", "--quick", *words]) == 0
    figures = json.loads((tmp_path / "x.json").read_text())
    assert figures["equal_outputs"] == len(figures["requests"]) == 8
    assert "8 of 8 outputs of transformers are equal" in capsys.readouterr().out
