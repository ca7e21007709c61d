"""One system of `benchmarks/cpu.py` in a process of its own, in whatever environment has it.

    python worker.py PEER OPTIONS

PEER names a file peer_PEER.py beside this one, OPTIONS is a JSON object for it. Answers come as
lines of JSON on standard output: first what the start took, then one line for each line of JSON on
standard input, which holds the requests of one workload. Only the standard library and the system
itself are imported, since Quire need not be installed here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

Request = tuple[list[int], int]
"""Prompt, and how many tokens to generate."""

FIRST: list[Request] = [(list(range(1000, 1016)), 1)]


class Peer(Protocol):
    """A started system."""

    version: str

    def generate(self, requests: list[Request]) -> list[list[int]] | list[int]:
        """All requests, greedily and each to its length. The tokens of each, or their number where
        the system does not tell them."""

    def forget(self) -> None:
        """Drop cached prefixes, where the system can."""


def main() -> None:
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    module = importlib.import_module(f"peer_{sys.argv[1]}")
    try:
        imported_bytes = 0
        if module.IMPORTS_TORCH:
            importlib.import_module("torch")
            imported_bytes = _private_bytes(os.getpid())
        peer: Peer = module.Peer(json.loads(sys.argv[2]))
        peer.generate(FIRST)
    except Exception as error:
        answer(failed=f"{type(error).__name__}: {error}")
        raise
    answer(version=peer.version, memory_bytes=memory_beyond(imported_bytes))
    for line in sys.stdin:
        requests = [(ids, count) for ids, count in json.loads(line)]
        peer.forget()
        started = time.perf_counter()
        outputs = peer.generate(requests)
        seconds = time.perf_counter() - started
        answer(seconds=seconds, outputs=outputs, memory_bytes=memory_beyond(imported_bytes))


def memory_beyond(imported_bytes: int) -> int:
    """Private resident memory of this process and those it started, less what importing torch took
    in each of them that has torch."""
    total = 0
    for process in _tree(os.getpid()):
        try:
            own = _private_bytes(process)
            if "libtorch" in Path(f"/proc/{process}/maps").read_text(encoding="utf-8"):
                own -= imported_bytes
        except OSError:  # it ended meanwhile
            continue
        total += own
    return total


def _tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def _private_bytes(process: int) -> int:
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
    kib = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")]
    return 1024 * sum(kib)


if __name__ == "__main__":
    main()
