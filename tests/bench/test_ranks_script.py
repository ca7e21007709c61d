"""`benchmarks/ranks.py` runs to its end: engines take turns, and ranks leave their time stamps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_quick_run() -> None:
    words = ["--requests", "8", "--turns", "2", "--steps", "8"]
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "ranks.py"), *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    summary, *engines = result.stdout.split(":\n")
    assert summary.count("its median is") == len(engines) == 4
    for said in engines[1:]:  # those with processes of ranks
        assert "until the first rank has it" in said and "until the engine has it" in said
    assert "rank: of it in collectives" in engines[2]
