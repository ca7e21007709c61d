"""Headers of safetensors files, read without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.files.safetensors import tensor_names
from quire.protocol.errors import ModelError


def test_names_are_read_without_torch(tmp_path: Path) -> None:
    """Importing torch takes seconds, and a header needs none of it."""
    file = tmp_path / "model.safetensors"
    save_file({"b.weight": np.zeros((2, 3), np.float32), "a.bias": np.ones(3, np.int8)}, file)
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from quire.files.safetensors import tensor_names\n"
        "print(sorted(tensor_names(Path(sys.argv[1]))), 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", program, str(file)]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['a.bias', 'b.weight'] False"


def test_a_header_must_fit_its_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(100, np.float32)}, file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or incomplete"):
        tensor_names(file)
