"""Shared fixtures, and what tests may count on: no network, no GPU unless marked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Examples are the same on every run, so that a red test is red for everyone; set
# HYPOTHESIS_PROFILE=explore to look for new ones.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are."""
    marked = [(item, _gpus_needed(item)) for item in items]
    if not any(needed for _, needed in marked):
        return
    import torch

    found = torch.cuda.device_count()
    for item, needed in marked:
        if needed > found:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {found}"))


def _gpus_needed(item: pytest.Item) -> int:
    if item.get_closest_marker("multi_gpu"):
        return 2
    return 1 if item.get_closest_marker("gpu") else 0


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of outside data that QUIRE_TEST_DATA names."""
    folder = os.environ.get("QUIRE_TEST_DATA")
    if not folder:
        pytest.skip("QUIRE_TEST_DATA is not set")
    return Path(folder)


@pytest.fixture
def native() -> None:
    """The library; it may only be missing where there is no compiler."""
    from quire.kernels import cpu

    is_there, reason = cpu.available()
    if not is_there:
        if any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
            pytest.fail(f"{reason} (there is a compiler)")
        pytest.skip(reason)
