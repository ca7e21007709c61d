"""Runs the systems of `cpu.py` in turns: starts, warm-up, rounds, and what came of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cpu_model import convert_to_openvino, write_q8_0, write_safetensors
from cpu_systems import SYSTEMS, Requests, Unavailable, Worker, installed_bytes, is_installed
from quire.config.embedded import embedded_model_path

WARM_UP: Requests = [([7] * 300, 8)] * 8
FIRST_SALT = 1000
"""Prompts of round i start with token FIRST_SALT + i, so that no round finds prefixes of the one
before in a cache; not every system can be told to drop them."""


class Models:
    """The formats of the model, made when they are first asked for."""

    def __init__(self, folder: Path, python: dict[str, str]) -> None:
        self._folder, self._python = folder, python

    def path(self, format: str) -> str:
        if format == "gguf":
            return str(embedded_model_path())
        makers: dict[str, tuple[str, Callable[[Path], Path]]] = {
            "safetensors": ("config.json", write_safetensors),
            "q8_0": ("", lambda path: write_q8_0(path, embedded_model_path())),
            "openvino-fp32": ("", lambda path: self._openvino(path, "fp32")),
            "openvino-int8": ("", lambda path: self._openvino(path, "int8")),
        }
        complete, make = makers[format]
        path = self._folder / (f"{format}.gguf" if format == "q8_0" else format)
        if not (path / complete if complete else path).exists():
            progress(f"writing {path}")
            make(path)
        return str(path)

    def _openvino(self, path: Path, weights: str) -> Path:
        python = self._python.get("openvino-convert")
        if python is None:
            raise Unavailable("its model must be converted: give --peer openvino-convert=PYTHON")
        try:
            return convert_to_openvino(python, Path(self.path("safetensors")), path, weights)
        except RuntimeError as error:
            raise Unavailable(str(error)) from None


def run_round(worker: Worker, workload: str, requests: Requests, salt: int) -> dict[str, Any]:
    """One run of a workload by one system."""
    count = sum(length for _, length in requests)
    if workload != "lat":
        answer = worker.generate(_salted(requests, salt))
        figures = {"seconds": answer["seconds"], "outputs": answer["outputs"]}
    else:
        # Systems tell the time of the first token in different ways or not at all; asking for it
        # alone, with a prompt that is not in any cache, works with all of them.
        first = [worker.generate([(ids, 1)]) for ids, _ in _salted(requests, salt + 500)]
        whole = [worker.generate([request]) for request in _salted(requests, salt)]
        first_s = sum(one["seconds"] for one in first)
        seconds = sum(one["seconds"] for one in whole)
        figures = {
            "seconds": seconds,
            "first_token_s": first_s / len(requests),
            "seconds_per_token": (seconds - first_s) / (count - len(requests)),
            "outputs": [output for one in whole for output in one["outputs"]],
        }
        answer = whole[-1]
    return {
        **figures,
        "memory_bytes": answer["memory_bytes"],
        "requests": len(requests),
        "output_tokens": count,
    }


def _salted(requests: Requests, salt: int) -> Requests:
    return [([FIRST_SALT + salt, *ids[1:]], count) for ids, count in requests]


class Comparison:
    """All systems that take part, their processes and what was measured of them."""

    def __init__(self, models: Models, python: dict[str, str], logs: Path) -> None:
        self._models, self._python, self._logs = models, python, logs
        self.workers: dict[str, Worker] = {}
        self.systems: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}

    def start(self, names: Sequence[str], starts: int) -> None:
        """Start every system `starts` times; the last process of each stays."""
        for number in range(starts):
            for name in names:
                if name not in self.left_out:
                    progress(f"start {number + 1} of {starts}: {name}")
                    self._attempt(name, self._start_one)
        for name in list(self.workers):
            progress(f"warm-up: {name}")
            self._attempt(name, lambda name: self.workers[name].generate(WARM_UP))

    def _start_one(self, name: str) -> None:
        system = SYSTEMS[name]
        python = self._python[system.peer]
        if name not in self.systems:
            if not is_installed(system.peer, python):
                raise Unavailable(f"{python} does not have it; see --help for how to install it")
            self.systems[name] = {"start_s": [], "rounds": {}, "most_memory_bytes": 0}
            self.systems[name]["installed_bytes"] = installed_bytes(system.peer, python)
        if name in self.workers:
            self.workers.pop(name).close()
        model = self._models.path(system.format)
        worker = self.workers[name] = Worker(name, python, model, self._logs / f"{name}.log")
        self.systems[name]["start_s"].append(worker.start_s)
        self.systems[name]["version"] = worker.version
        self.systems[name]["first_token_memory_bytes"] = worker.first_token_memory_bytes

    def run(self, workload: str, requests: Requests, rounds: int) -> None:
        """All rounds of a workload, the systems taking turns."""
        for number in range(rounds):
            for name in list(self.workers):

                def measure(name: str, number: int = number) -> None:
                    figures = run_round(self.workers[name], workload, requests, number)
                    progress(
                        f"{workload} {number + 1} of {rounds}: {name} {figures['seconds']:.2f} s"
                    )
                    system = self.systems[name]
                    system["rounds"].setdefault(workload, []).append(figures)
                    most = max(system["most_memory_bytes"], figures["memory_bytes"])
                    system["most_memory_bytes"] = most

                self._attempt(name, measure)
        self._compare_outputs(workload)

    def _attempt(self, name: str, action: Callable[[str], Any]) -> None:
        try:
            action(name)
        except Unavailable as error:
            self.left_out[name] = str(error).splitlines()[0]
            self.systems.pop(name, None)
            if name in self.workers:
                self.workers.pop(name).close()

    def _compare_outputs(self, workload: str) -> None:
        """Count outputs that are those of Quire in float32, then drop them."""
        all_rounds = {name: one["rounds"][workload] for name, one in self.systems.items()}
        outputs = {name: [one.pop("outputs") for one in all_rounds[name]] for name in all_rounds}
        for name in outputs.keys() - {"quire-fp32"} if "quire-fp32" in outputs else ():
            for one, made, wanted in zip(
                all_rounds[name], outputs[name], outputs["quire-fp32"], strict=True
            ):
                if isinstance(made[0], list):
                    pairs = zip(made, wanted, strict=True)
                    one["equal_outputs"] = sum(mine == theirs for mine, theirs in pairs)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def progress(text: str) -> None:
    """Standard output holds nothing but the tables."""
    print(f"cpu.py: {text}", file=sys.stderr, flush=True)
