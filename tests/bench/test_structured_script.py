"""`benchmarks/structured.py` on a few schemas: what the full run promises holds for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.config.embedded import find_embedded_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(find_embedded_model() is None, reason="the embedded model is not installed")
def test_masks_accept_what_llguidance_does(test_data: Path, tmp_path: Path) -> None:
    """No schema fewer, and no invalid instance accepted."""
    script, figures = ROOT / "benchmarks" / "structured.py", tmp_path / "figures.json"
    words = ["--parts", "schemas", "documents", "calls", "--schemas", "60", "--documents", "4"]
    words += ["--calls", "4"]
    words += ["--threads", "1", "--json", str(figures)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "QUIRE_TEST_DATA": str(test_data)}
    result = subprocess.run(
        [sys.executable, str(script), *words], env=environment, capture_output=True, text=True
    )
    assert "documents: " in result.stdout, result.stdout + result.stderr
    found = json.loads(figures.read_text())
    assert found["documents"]["met"] and found["calls"]["share"] > 0
    schemas = found["schemas"]
    assert schemas["passed"] >= schemas["passed_directly"] > 50 and schemas["invalid_accepted"] == 0
