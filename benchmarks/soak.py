"""Soak `quire serve`: a mixed load for a long time, with kills of the engine, and what it leaves.

    python benchmarks/soak.py --minutes 60

Clients in a closed loop stream, leave, ask for distinct grammars, tools, embeddings, several
choices, beams, penalties and logprobs. The engine is killed (SIGKILL) every so often in the first
third. Slopes of memory are taken over the second half, when the last engine has warmed up.
Before, after the kills and at the end the load rests: fixed questions are asked at temperature 0,
every block of the KV cache must be free, and descriptors and threads are counted. The exit status
is 1 where a bound is broken; the table is printed also if the soak is interrupted. What follows
`--` are flags of `quire serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import quire
from harness import markdown_table
from soak_exchange import Exchange, FailedRequestError, LostAnswerError, WrongAnswerError
from soak_load import FIXED_PROMPTS, Clients, Requests, Tally, ask
from soak_processes import Sample, Watch

ADMIN_KEY = "soak"
SERVE = (
    *("--num-threads", "1", "--max-model-len", "1024", "--kv-cache-memory-bytes", "64MiB"),
    *("--max-engine-restarts", "1000000", "--admin-key", ADMIN_KEY),
)
"""A cache that is small enough to be full, so that blocks are evicted and requests preempted."""
WARM_UP_S = 10.0
START_S = 300.0
CACHE_FILLS = 8
"""Long prompts that use every block of the cache, about 3,000 tokens of the embedded model."""
FLAT_MIB_PER_MIN = 0.2
LONG_MINUTES = 30.0
"""In a shorter soak caches still fill: its slopes are told, not judged."""
EXTRA_DESCRIPTORS, EXTRA_THREADS = 4, 8
"""More than at the rest before: idle connections, and threads that are made when first needed."""


class StoppedError(Exception):
    """Why a soak ends before its time."""


@dataclass
class Rest:
    """What was found while the load rested."""

    name: str
    processes: Sample
    used_blocks: int
    open_requests: int


@dataclass
class Results:
    minutes: float
    elapsed_s: float = 0.0
    slopes: dict[str, float | None] = field(default_factory=dict)
    rests: list[Rest] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    """Memory in MiB by role, at sixty moments of the load."""
    faults: list[str] = field(default_factory=list)
    num_grammars: int = 0
    num_compared: int = 0
    stopped: str | None = None
    """Why it ended early."""

    def broken_bounds(self) -> list[str]:
        found = [] if self.stopped is None else [f"it ended early: {self.stopped}"]
        found += [
            f"{self.outcomes[name]} answers were {name}"
            for name in ("lost", "doubled", "wrong", "failed")
            if self.outcomes.get(name)
        ]
        found += [
            f"memory of {role} grows by {slope:.2f} MiB/min, more than {FLAT_MIB_PER_MIN:.2f}"
            for role, slope in self.slopes.items()
            if self.minutes >= LONG_MINUTES and slope is not None and slope > FLAT_MIB_PER_MIN
        ]
        for rest in self.rests:
            if rest.used_blocks or rest.open_requests:
                found.append(
                    f"{rest.used_blocks} blocks and {rest.open_requests} requests were left at "
                    f"rest ({rest.name})"
                )
        return found + (self._grown(*self.rests[-2:]) if len(self.rests) > 2 else [])

    @staticmethod
    def _grown(before: Rest, after: Rest) -> list[str]:
        found = []
        for role, figures in after.processes.items():
            old = before.processes.get(role)
            if role == "helpers" or old is None:
                continue
            for what, more, allowed in (
                ("descriptors", figures.descriptors - old.descriptors, EXTRA_DESCRIPTORS),
                ("threads", figures.threads - old.threads, EXTRA_THREADS),
            ):
                if more > allowed:
                    found.append(f"{role} has {more} {what} more than at rest ({before.name})")
        return found

    def table(self) -> str:
        header = ["process", "MiB", "MiB/min", "descriptors", "threads"]
        rows = []
        for role in self.rests[-1].processes if self.rests else ():
            seen = [one.processes[role] for one in self.rests if role in one.processes]
            slope = self.slopes.get(role)
            rows.append(
                [
                    role,
                    ", ".join(f"{one.memory_mib:.0f}" for one in seen),
                    "-" if slope is None else f"{slope:+.2f}",
                    ", ".join(str(one.descriptors) for one in seen),
                    ", ".join(str(one.threads) for one in seen),
                ]
            )
        return markdown_table(header, rows)

    def sentences(self) -> str:
        count = self.outcomes.get
        asked = sum(self.outcomes.values()) - count("retried", 0)
        minutes = self.elapsed_s / 60
        back = statistics.median(self.restarts_s) if self.restarts_s else 0.0
        names = ", ".join(rest.name for rest in self.rests)
        lines = [
            f"{asked} requests in {minutes:.1f} minutes ({asked / max(minutes, 1e-9):.0f}/min): "
            f"{count('answered', 0)} answered, {count('left', 0)} left by their clients, "
            f"{count('lost', 0)} lost, {count('doubled', 0)} doubled, {count('wrong', 0)} wrong, "
            f"{count('failed', 0)} failed without a kill.",
            f"{len(self.restarts_s)} kills of the engine, back in {back:.1f} s (median); "
            f"{count('retried', 0)} answers told the client to try again.",
            f"{self.num_grammars} distinct grammars; {self.num_compared} greedy answers compared "
            "with the first ones.",
            f"Columns with several figures: at rest ({names}). Slopes are of the second half.",
        ]
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        return {
            "quire": quire.__version__,
            "python": platform.python_version(),
            "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
            **{name: value for name, value in vars(self).items() if name != "rests"},
            "rests": [
                {**vars(one), "processes": {r: vars(f) for r, f in one.processes.items()}}
                for one in self.rests
            ],
            "broken": self.broken_bounds(),
        }


class Soak:
    def __init__(self, arguments: argparse.Namespace, log: TextIO) -> None:
        self._arguments = arguments
        self._log = log
        self._server = _start_server(arguments, log)
        self._exchange = Exchange("127.0.0.1", self._server.port, ADMIN_KEY)
        self._tally = Tally()
        self._chance = random.Random(arguments.seed)
        self._requests = Requests(self._exchange)
        self._clients = Clients(self._requests, self._tally, arguments.clients, arguments.seed)
        self._watch = Watch(self._server.process.pid)
        self._stop = threading.Event()
        self._told = 0.0
        self._start: float | None = None
        """When the load began; None before and after."""
        self.results = Results(arguments.minutes)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()

    def say(self, text: str) -> None:
        self._log.write(f"{time.strftime('%H:%M:%S')} soak: {text}\n")
        self._log.flush()

    def run(self) -> None:
        """All of it; what there is of the results stays if it ends early."""
        try:
            self._await_health(START_S)
            self._watch.start()
            self._clients.go()
            self._wait(WARM_UP_S)
            self._rest("start")
            self._start = time.monotonic()
            self._soak(self._start, self._arguments.minutes * 60)
        except (StoppedError, WrongAnswerError, FailedRequestError) as error:
            self.results.stopped = str(error)
            self.say(f"ended early: {error}")
        finally:
            self._watch.stop()
            self._clients.end()
            self._collect()
            self._server.stop()

    def _soak(self, start: float, length: float) -> None:
        kills = max(1, round(self._arguments.minutes / 3)) if self._arguments.kills else 0
        self._clients.go()
        for i in range(kills):
            self._wait(start + (i + 0.5) * length / 3 / kills - time.monotonic())
            self._kill_engine()
        self._wait(start + length / 3 - time.monotonic())
        self._rest("after the kills")
        self._clients.go()
        self._wait(length / 6)
        measured = time.monotonic()
        self._wait(length / 2)
        self.results.slopes = self._watch.slopes(measured)
        self.results.series = self._watch.series(start, length / 60)
        self._collect()
        self._start = None
        self._rest("end")

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._stop.wait(min(left, 5.0)):
                raise StoppedError("interrupted")
            if self._server.process.poll() is not None:
                raise StoppedError(f"the server ended with status {self._server.process.poll()}")
            self._tell()

    def _tell(self) -> None:
        """A line and the partial results, about once a minute."""
        if time.monotonic() < self._told + 60:
            return
        self._told = time.monotonic()
        self._collect()
        memory = {role: round(one.memory_mib) for role, one in self._watch.look().items()}
        self.say(f"{dict(self._tally.outcomes)} MiB {memory}")

    def _collect(self) -> None:
        results, tally = self.results, self._tally
        with tally.lock:
            results.outcomes, results.kinds = dict(tally.outcomes), dict(tally.kinds)
            results.faults = list(tally.faults)
        results.num_grammars = self._requests.num_grammars
        results.num_compared = self._requests.num_compared
        if self._start is not None:
            results.elapsed_s = time.monotonic() - self._start
        if self._arguments.json:
            text = json.dumps(results.record(), indent=1)
            Path(self._arguments.json).write_text(text + "\n", encoding="utf-8")

    def _rest(self, name: str) -> None:
        self._clients.rest()
        for prompt in FIXED_PROMPTS:
            for streams in (False, True):
                self._ask_fixed(prompt, streams)
        # Memory of the cache is taken when a block is first used: all of it, before it is measured.
        for _ in range(CACHE_FILLS):
            ask(self._tally, self._requests.fill_cache, self._chance, self._stop)
        self._await_idle()
        tally = self._exchange.post("/admin/check_integrity", {})
        processes = self._watch.look()
        self.results.rests.append(
            Rest(name, processes, tally["used_blocks"], tally["open_requests"])
        )
        self.say(f"at rest ({name}): {tally}, {processes}")

    def _ask_fixed(self, prompt: str, streams: bool) -> None:
        def fixed(chance: random.Random) -> None:
            self._requests.ask_fixed(prompt, streams)

        ask(self._tally, fixed, self._chance, self._stop)

    def _await_idle(self) -> None:
        """Requests whose clients have left end a little later than their connections."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            status, data = self._exchange.get("/load")
            if status == 200 and json.loads(data)["server_load"] == 0:
                return
            time.sleep(0.2)
        raise StoppedError("the server is not idle 60 s after its last request")

    def _kill_engine(self) -> None:
        engine = self._watch.look().get("engine")
        if engine is None:
            raise StoppedError("there is no engine process")
        started = time.monotonic()
        with self._tally.lock:
            self._tally.down.append([started, float("inf")])
        for pid in engine.pids:
            os.kill(pid, signal.SIGKILL)
        self._await_health(120, engine.pids)
        taken = time.monotonic() - started
        self.results.restarts_s.append(taken)
        # Those who asked before the engine was back may read their error a little later.
        with self._tally.lock:
            self._tally.down[-1][1] = time.monotonic() + 2
        self.say(f"the engine was killed and is back after {taken:.1f} s")

    def _await_health(self, patience_s: float, killed: tuple[int, ...] = ()) -> None:
        """Until its end is noticed, a server whose engine was `killed` calls itself healthy."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if self._server.process.poll() is not None:
                raise StoppedError(f"the server ended with status {self._server.process.poll()}")
            with contextlib.suppress(LostAnswerError):
                engine = self._watch.look().get("engine")
                is_new = engine is not None and engine.pids != killed
                if is_new and self._exchange.get("/health")[0] == 200:
                    return
            if self._stop.wait(0.2):
                raise StoppedError("interrupted")
        raise StoppedError(f"the server is not healthy after {patience_s:g} s")


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _start_server(arguments: argparse.Namespace, log: TextIO) -> Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    words = [sys.executable, "-m", "quire", "serve", "--host", "127.0.0.1", "--port", str(port)]
    model = ["--model", arguments.model] if arguments.model else []
    flags = [*words, *model, *SERVE, *arguments.serve_flags]
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *_python_path()])}
    # In a session of its own: Ctrl-C is for the soak, which then stops the server.
    process = subprocess.Popen(
        flags, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    return Server(process, port)


def _python_path() -> list[str]:
    return [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]


@contextlib.contextmanager
def _model(arguments: argparse.Namespace) -> Iterator[None]:
    """`--model tiny`: one with random weights, made on the spot."""
    if arguments.model != "tiny":
        yield
        return
    from server_systems import write_model

    with tempfile.TemporaryDirectory() as folder:
        arguments.model = str(write_model(Path(folder) / "tiny"))
        arguments.serve_flags = ["--load-format", "dummy", *arguments.serve_flags]
        settings = Path(arguments.model) / "tokenizer_config.json"
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        values = {**json.loads(settings.read_text(encoding="utf-8")), "chat_template": template}
        settings.write_text(json.dumps(values), encoding="utf-8")
        yield


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the load (60)")
    parser.add_argument("--clients", type=int, default=6, help="requests at a time (6)")
    parser.add_argument("--model", help="a folder, a .gguf file, 'tiny' (embedded model)")
    parser.add_argument("--no-kills", dest="kills", action="store_false", help="leave the engine")
    parser.add_argument("--seed", type=int, default=0, help="of the load (0)")
    parser.add_argument("--log", default="soak.log", help="what happens, and the server's log")
    parser.add_argument("--json", help="file for the results, also while they are partial")
    parser.add_argument("serve_flags", nargs="*", help="flags of quire serve, after --")
    arguments = parser.parse_args()
    if arguments.minutes <= 0 or arguments.clients < 1:
        parser.error("--minutes and --clients must be above 0")
    return arguments


def main() -> int:
    arguments = _arguments()
    with Path(arguments.log).open("a", encoding="utf-8") as log, _model(arguments):
        soak = Soak(arguments, log)
        soak.run()
        results = soak.results
        broken = results.broken_bounds()
        lines = [results.table(), "", results.sentences()]
        lines += [f"fault: {fault}" for fault in results.faults[:20]]
        lines += [f"BROKEN: {reason}" for reason in broken] or ["All bounds were kept."]
        for line in lines:
            print(line, flush=True)
        soak.say("\n".join(lines))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
