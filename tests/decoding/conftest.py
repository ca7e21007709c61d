"""Which code chooses tokens on the CPU."""

from __future__ import annotations

import pytest

from quire.kernels import cpu


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the native library was not built: plain torch chooses."""
    monkeypatch.setattr(cpu, "available", lambda: (False, "a test does without it"))


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """The library and plain torch in turn."""
    request.getfixturevalue("native" if request.param == "native" else "without_library")
    return str(request.param)
