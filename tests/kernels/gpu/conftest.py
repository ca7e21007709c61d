"""These tests run on a GPU where there is one, and by Triton's interpreter elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU `-m gpu` selects them; the interpreter must not be kept from them."""
    if torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)
