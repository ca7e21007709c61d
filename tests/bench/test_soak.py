"""`benchmarks/soak.py`: it tells lost, doubled and wrong answers and growth; a minute of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import eventually

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield


def chunk(index: int = 0, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "finish_reason": reason}]}


def test_streams_have_one_end() -> None:
    soak = import_module("soak_exchange")
    whole = [chunk(), chunk(0, "stop"), chunk(1, "length"), "[DONE]"]
    assert len(soak.openai_chunks(whole, 2)) == 3
    for lost in (whole[:-1], [chunk(), "[DONE]"], []):
        with pytest.raises(soak.LostAnswerError):
            soak.openai_chunks(lost, 2)
    error = {"error": {"message": "the engine has stopped"}}
    for doubled in (
        [*whole, "[DONE]"],
        [*whole[:-1], chunk(0, "stop"), "[DONE]"],
        [chunk(0, "stop"), chunk(0), "[DONE]"],
        [error, error, "[DONE]"],
        [error, chunk(), "[DONE]"],
    ):
        with pytest.raises(soak.DoubledAnswerError):
            soak.openai_chunks(doubled, 2)
    with pytest.raises(soak.FailedRequestError, match="stopped"):
        soak.openai_chunks([chunk(), error, "[DONE]"], 2)
    ends, failures = ("message_stop",), ("error",)
    with pytest.raises(soak.LostAnswerError):
        soak.typed_events([{"type": "message_start"}], ends, failures)
    with pytest.raises(soak.DoubledAnswerError):
        soak.typed_events([{"type": "message_stop"}, {"type": "ping"}], ends, failures)


def test_slopes_are_of_processes_that_stay() -> None:
    soak = import_module("soak_processes")
    watch = soak.Watch(0)
    for i in range(60):
        engine = soak.Figures((1 if i < 20 else 2,), 100 + i, 10, 5)
        watch.samples.append((i, {"engine": engine, "API": soak.Figures((3,), 70 - i / 60, 9, 5)}))
    assert watch.slopes(0)["engine"] is None
    slopes = watch.slopes(25)
    assert slopes["engine"] == pytest.approx(60) and slopes["API"] == pytest.approx(-1)


def test_broken_bounds_have_reasons() -> None:
    soak, processes = import_module("soak"), import_module("soak_processes")

    def rest(name: str, descriptors: int, used_blocks: int = 0) -> Any:
        figures = processes.Figures((1,), 100.0, descriptors, 5)
        return soak.Rest(name, {"API": figures}, used_blocks, 0)

    results = soak.Results(60, rests=[rest("start", 5), rest("kills", 20), rest("end", 21)])
    results.slopes, results.outcomes = {"API": 0.1, "engine": None}, {"answered": 9, "retried": 2}
    assert results.broken_bounds() == []
    results.slopes["API"] = 0.3
    results.outcomes["lost"] = 1
    results.rests[-1] = rest("end", 30, used_blocks=2)
    results.stopped = "interrupted"
    assert [reason.split()[0] for reason in results.broken_bounds()] == [
        "it",
        "1",
        "memory",
        "2",
        "API",
    ]
    short = soak.Results(2)
    short.slopes = {"API": 30.0}
    assert short.broken_bounds() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute(tmp_path: Path) -> None:
    log, results = tmp_path / "soak.log", tmp_path / "soak.json"
    flags = ("--minutes", "1", "--log", str(log), "--json", str(results))
    command = [sys.executable, str(FOLDER / "soak.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=tmp_path)
    assert done.returncode == 0, (done.stdout, done.stderr, log.read_text()[-5000:])
    found = json.loads(results.read_text())
    assert not found["broken"] and found["outcomes"]["answered"] > 50
    assert len(found["restarts_s"]) == 1 and len(found["kinds"]) > 15
    assert "| engine |" in done.stdout and "Traceback" not in log.read_text()


@pytest.mark.slow
def test_interrupted(tmp_path: Path) -> None:
    """What was found so far is told, and the server is gone."""
    flags = ("--minutes", "30", "--log", "soak.log", "--json", "soak.json", "--model", "tiny")
    command = [sys.executable, str(FOLDER / "soak.py"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    log = tmp_path / "soak.log"
    eventually(lambda: log.exists() and "at rest (start)" in log.read_text(), "the first rest")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "it ended early: interrupted" in output
    assert json.loads((tmp_path / "soak.json").read_text())["stopped"] == "interrupted"
    assert "answered" in output and "| engine |" in output
