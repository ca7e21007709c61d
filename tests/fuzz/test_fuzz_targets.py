"""Inputs that once failed do not fail again; fuzzing finds faults, and finds none here in 10 s."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.text.tool_calls.json_scanner import JsonScanner
from tests.fuzz.run import TARGETS, Fuzzer, load_target
from tests.fuzz.target import Target

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    target = load_target(name)
    try:
        paths = target.corpus()
        assert paths, "a target without a corpus"
        for path in paths:
            target.check(path.read_bytes())
    finally:
        target.close()


class Planted(Target):
    """Fails in a place that takes three steps, each of which reaches new lines."""

    name = "planted"
    tokens = (b"[", b"]", b"1", b",", b"true")

    def check(self, data: bytes) -> None:
        scanner = JsonScanner()
        scanner.feed(data.decode("latin-1"), 0)
        assert not (scanner.complete and data.startswith(b"[") and b"true" in data)

    def corpus(self) -> list[Path]:
        return []


def test_a_planted_fault_is_found_and_shortened(tmp_path: Path) -> None:
    fuzzer = Fuzzer(Planted(), 0, tmp_path)
    fuzzer.add(b"[1")
    fuzzer.run(120, stops=True)
    fuzzer.shorten(20)
    ((data, trace),) = fuzzer.failures.values()
    assert len(data) <= len(b"[true]") and "AssertionError" in trace
    assert fuzzer.report() == 1 and [path.read_bytes() for path in tmp_path.rglob("*-*")] == [data]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    """In a process of its own, whose memory is limited and which may be ended by an input."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.run", name]
    flags = ["--seconds", str(SECONDS), "--found", str(tmp_path)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=280, cwd=ROOT)
    left = [(path.name, path.read_bytes()[:2000]) for path in tmp_path.rglob("*") if path.is_file()]
    assert done.returncode == 0, (done.stdout[-8000:], done.stderr[-4000:], left)
