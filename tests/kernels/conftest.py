"""Fixtures for the native CPU library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic

from quire.kernels import cpu
from quire.kernels.cpu.library import ISAS


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, native: None) -> Iterator[str]:
    """Each instruction set in turn."""
    if request.param not in cpu.isas():
        pytest.skip(f"this processor has no {request.param}")
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN, so that an element that is never written shows."""
    assert deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Lets a test change the number of threads, of torch and with it of the native library."""
    before = torch.get_num_threads()
    cpu.set_num_threads(None)
    yield
    torch.set_num_threads(before)
