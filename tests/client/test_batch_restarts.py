"""`quire run-batch` against a real server that dies under it, and a batch that is killed itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.running import ROOT, TINY, RunningServer, eventually
from tests.tiny import save_tiny

pytestmark = pytest.mark.slow
NUM_LINES = 60


@pytest.fixture
def batch(tmp_path: Path) -> tuple[Path, Path]:
    lines = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [1 + i % 90, 2], "max_tokens": 400, "temperature": 0}
            | {"ignore_eos": True},
        }
        for i in range(NUM_LINES)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return source, tmp_path / "out.jsonl"


def start_batch(batch: tuple[Path, Path], url: str) -> subprocess.Popen[str]:
    source, target = batch
    words = ["run-batch", "-i", str(source), "-o", str(target), "--url", url]
    return subprocess.Popen(
        [sys.executable, "-m", "quire", *words, "--concurrency", "4"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def texts(path: Path) -> dict[str, str]:
    results: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(results) == NUM_LINES
    found = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in results}
    assert len(found) == NUM_LINES, "no result is lost or doubled"
    return found


def test_nothing_is_lost_when_servers_and_batches_die(
    batch: tuple[Path, Path], tmp_path: Path
) -> None:
    """The engine is killed, then the whole server, which comes back; then the batch itself."""
    folder = tmp_path / "model"
    save_tiny(folder, max_position_embeddings=1024)
    server = RunningServer.start("--model", str(folder), *TINY)
    address = urlsplit(server.url)
    target = batch[1]
    running = start_batch(batch, server.url)
    try:
        eventually(lambda: num_lines(target) >= 5, "the first results")
        os.kill(server.engine_pid(), signal.SIGKILL)
        before = num_lines(target)
        eventually(lambda: num_lines(target) >= before + 5, "results of the new engine")
        server.process.kill()
        server.process.wait()
        time.sleep(1.0)
        server = RunningServer.start("--model", str(folder), *TINY, "--port", str(address.port))
        before = num_lines(target)
        eventually(lambda: num_lines(target) >= before + 5, "results of the new server")
        running.kill()
        running.wait()
        assert num_lines(target) < NUM_LINES, "the batch was over too early to test anything"
        with target.open("ab") as file:
            file.write(b'{"id": "batch_req_12')  # a crash in mid-write
        running = start_batch(batch, server.url)
        _, errors = running.communicate(timeout=120)
        assert running.returncode == 0, errors
        assert "0 failed" in errors and "done before" in errors
        interrupted = texts(target)
        target.unlink()
        running = start_batch(batch, server.url)
        assert running.wait(120) == 0
        assert texts(target) == interrupted
    finally:
        running.kill()
        server.stop()
