"""Fuzz one target, or all: `python -m tests.fuzz.run gguf --seconds 60`.

New inputs come from the corpus by mutation; those that reach new lines of Quire are built upon. An
input fails if the target raises, takes too long or wants too much memory. The shortest input found
for each failure is written to `--found`, and the exit status is 1; an input that ends the process
is left there as `running`. Once the fault is mended the input belongs into
`tests/fuzz/corpus/TARGET`. With `--atheris` (pip install atheris) libFuzzer
chooses the inputs instead, and stops at the first failure.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.coverage import LineCoverage
from tests.fuzz.mutations import Mutator
from tests.fuzz.target import CORPUS, Target

# Target -> the module that holds it; each imports what it fuzzes, and no more.
TARGETS = {
    "gguf": "model_files",
    "safetensors": "model_files",
    "sentencepiece": "model_files",
    "adapter": "adapters",
    "adapter_pickle": "adapters",
    "tool_calls": "texts",
    "reasoning": "texts",
    "chat_template": "chat",
    "bodies": "bodies",
    "codec": "codec",
}
INPUT_SECONDS = 5.0
"""CPU time that one input may take; coverage makes all of it several times slower."""
WAIT_SECONDS = 60.0
"""How long it may take altogether, on a machine that is busy with other things."""
MEMORY_BYTES = 1 << 31
"""How much more memory than after its start a target may take up."""


class TooSlowError(Exception):
    """One input took too long."""


def load_target(name: str) -> Target:
    module = import_module(f"tests.fuzz.targets.{TARGETS[name]}")
    (kind,) = [one for one in vars(module).values() if getattr(one, "name", None) == name]
    target: Target = kind()
    return target


class Fuzzer:
    """Tries inputs on one target, and keeps those that fail."""

    def __init__(self, target: Target, seed: int, found: Path) -> None:
        self._target = target
        self._found = found / target.name
        self._found.mkdir(parents=True, exist_ok=True)
        self._running = (self._found / "running").open("wb", buffering=0)
        """The input that is being tried: what is left of one that ends the process."""
        self._mutator = Mutator(seed, target.tokens)
        self._coverage = LineCoverage()
        self._inputs: list[bytes] = []
        self.num_tried = 0
        self.failures: dict[str, tuple[bytes, str]] = {}
        """Where it went wrong -> the shortest input, and its traceback."""

    def replay(self) -> None:
        for path in self._target.corpus():
            self.add(path.read_bytes())

    def add(self, data: bytes) -> None:
        """Try an input, and build on it."""
        self._try(data)
        self._inputs.append(data)

    def run(self, seconds: float, *, stops: bool = False) -> None:
        """Try new inputs for a while; `stops` at the first failure."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (stops and self.failures):
            data = self._target.mutate(self._inputs, self._mutator)
            before = self._coverage.num_lines
            self._try(data)
            if self._coverage.num_lines > before:
                self._inputs.append(data)

    def shorten(self, seconds: float) -> None:
        """Leave out of failing inputs what they do not need in order to fail."""
        deadline = time.monotonic() + seconds
        for place, (data, _) in list(self.failures.items()):
            size = len(data) // 2
            while size and time.monotonic() < deadline:
                for start in range(0, len(data), size):
                    shorter = data[:start] + data[start + size :]
                    self._try(shorter)
                    if self.failures[place][0] == shorter:
                        data = shorter
                        break
                else:
                    size //= 2

    def _try(self, data: bytes) -> None:
        self.num_tried += 1
        os.pwrite(self._running.fileno(), data, 0)
        self._running.truncate(len(data))
        try:
            with _time_limit(), self._coverage:
                self._target.check(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's panic is no Exception
            place = _place(error)
            if place not in self.failures or len(data) < len(self.failures[place][0]):
                self.failures[place] = data, "".join(traceback.format_exception(error))
            self._target.recover()

    def report(self) -> int:
        self._running.close()
        (self._found / "running").unlink()
        name = self._target.name
        print(
            f"{name}: {self.num_tried} inputs, {self._coverage.num_lines} lines of Quire reached, "
            f"{len(self._inputs)} inputs kept, {len(self.failures)} failures",
            flush=True,
        )
        for place, (data, trace) in self.failures.items():
            path = self._found / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            print(f"{trace}{name}: {place}; {len(data)} bytes in {path}: {data[:400]!r}\n")
        return len(self.failures)


def _place(error: BaseException) -> str:
    """The kind of an error and the innermost line of Quire or of the target."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if "/quire/" in one.filename or "/targets/" in one.filename]
    where = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{where}"


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        _stop_clocks()
        raise TooSlowError(f"one input took {INPUT_SECONDS:g} s of CPU time, or {WAIT_SECONDS:g} s")

    clocks = {signal.ITIMER_PROF: INPUT_SECONDS, signal.ITIMER_REAL: WAIT_SECONDS}
    signal.signal(signal.SIGPROF, ring)
    signal.signal(signal.SIGALRM, ring)
    for clock, seconds in clocks.items():
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        _stop_clocks()


def _stop_clocks() -> None:
    for clock in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(clock, 0)


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def fuzz(name: str, seconds: float, seed: int, found: Path) -> int:
    target = load_target(name)
    try:
        fuzzer = Fuzzer(target, seed, found)
        fuzzer.replay()
        limit_memory()
        fuzzer.run(seconds)
        fuzzer.shorten(min(seconds, 20.0))
        return fuzzer.report()
    finally:
        target.close()


def fuzz_with_atheris(name: str, seconds: float) -> None:
    atheris: Any = import_module("atheris")
    with atheris.instrument_imports(include=["quire"]):
        target = load_target(name)
    check: Callable[[bytes], None] = target.check
    flags = [f"-max_total_time={seconds:g}", f"-timeout={INPUT_SECONDS:g}", "-rss_limit_mb=4096"]
    scratch = Path(f"fuzz-{name}")  # libFuzzer writes new inputs into the first folder
    scratch.mkdir(exist_ok=True)
    atheris.Setup([sys.argv[0], *flags, str(scratch), str(CORPUS / name)], check)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (0)")
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"), help="(fuzz-found)")
    parser.add_argument("--atheris", action="store_true", help="let libFuzzer choose inputs")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    names = list(TARGETS) if arguments.target == "all" else [arguments.target]
    if arguments.atheris:
        fuzz_with_atheris(names[0], arguments.seconds)
        return 0
    failures = [fuzz(name, arguments.seconds, arguments.seed, arguments.found) for name in names]
    return 1 if any(failures) else 0


if __name__ == "__main__":
    sys.exit(main())
