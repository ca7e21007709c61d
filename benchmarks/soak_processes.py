"""The processes of a server under load: memory, descriptors and threads, every two seconds."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
INTERVAL_S = 2.0
ROLES = {b"quire.engine.process": "engine", b"quire.server.launch.api_process": "API"}
"""By what a process's command line has; the rest are helpers of these."""


@dataclass(frozen=True)
class Figures:
    """One role's processes at one moment."""

    pids: tuple[int, ...]
    memory_mib: float
    """Anonymous memory, in RAM or swapped out: pages of files come and go by themselves."""
    descriptors: int
    threads: int


Sample = dict[str, Figures]


def sample_tree(root: int) -> Sample:
    """Figures by role of a process and all below it."""
    members: dict[str, list[tuple[int, float, int, int]]] = {}
    for pid in _descendants(root):
        try:
            status = _status(pid)
            role = "supervisor" if pid == root else _role(pid)
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:  # it has just ended
            continue
        if "RssAnon" in status:  # else it has ended and waits for its parent to notice
            memory = (status["RssAnon"] + status["VmSwap"]) * 1024 / MIB
            members.setdefault(role, []).append((pid, memory, descriptors, status["Threads"]))
    return {
        role: Figures(
            tuple(sorted(pid for pid, *_ in found)),
            sum(memory for _, memory, _, _ in found),
            sum(descriptors for _, _, descriptors, _ in found),
            sum(threads for *_, threads in found),
        )
        for role, found in members.items()
    }


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += parents.get(pid, [])
    return found


def _status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    words = (line.split() for line in lines)
    wanted = ("RssAnon:", "VmSwap:", "Threads:")
    return {name[0].rstrip(":"): int(name[1]) for name in words if name and name[0] in wanted}


def _role(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return next((role for mark, role in ROLES.items() if mark in command), "helpers")


@dataclass
class Watch:
    """Samples the processes on a thread of its own."""

    root: int
    samples: list[tuple[float, Sample]] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def start(self) -> Watch:
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        return self

    def stop(self) -> None:
        self._end.set()

    def look(self) -> Sample:
        sample = sample_tree(self.root)
        self.samples.append((time.monotonic(), sample))
        return sample

    def _run(self) -> None:
        while not self._end.wait(INTERVAL_S):
            self.look()

    def slopes(self, since: float) -> dict[str, float | None]:
        """MiB per minute by least squares since a time, of the processes that are there at the end;
        None for those that were not there from the beginning."""
        window = [(at, sample) for at, sample in self.samples if at >= since]
        if len(window) < 3:
            return {}
        last = window[-1][1]
        return {role: self._slope(window, role, figures.pids) for role, figures in last.items()}

    def series(self, since: float, step_s: float) -> dict[str, list[float]]:
        """Memory in MiB by role, a figure for each step."""
        found: dict[str, list[float]] = {}
        for at, sample in list(self.samples):
            if at >= since:
                since = max(at, since + step_s)
                for role, figures in sample.items():
                    found.setdefault(role, []).append(round(figures.memory_mib, 1))
        return found

    @staticmethod
    def _slope(window: list[tuple[float, Sample]], role: str, pids: Iterable[int]) -> float | None:
        points = [
            (at / 60, sample[role].memory_mib)
            for at, sample in window
            if role in sample and sample[role].pids == pids
        ]
        if len(points) < 0.9 * len(window):
            return None
        return statistics.linear_regression(*zip(*points, strict=True)).slope
