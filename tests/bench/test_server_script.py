"""`benchmarks/server.py` runs to its end: servers start, are measured in turns and stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("quire.server.app", reason="the server's packages are not installed")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    """The engine and the server on each event loop have figures for each load, and a peer that
    cannot start is left out with its reason."""
    path = tmp_path / "figures.json"
    words = ["--quick", "--rounds", "1", "--loops", "--json", str(path)]
    words += ["--peer", "vllm=/no/such/python"]
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "server.py"), *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert "vllm does not take part" in result.stderr
    figures = json.loads(path.read_text())
    for name in ("stream", "short", "alone"):
        systems = figures["results"][name]
        assert systems.keys() == {"engine", "quire", "quire, asyncio"}
        assert all(one["output_tokens_per_s"] > 0 for one in systems.values())
    assert result.stdout.count("\n| ") == 4
