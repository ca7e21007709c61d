"""Fixtures for the native CPU library."""

from __future__ import annotations

from tests.kernels.conftest import isa, num_threads, poisoned_memory

__all__ = ["isa", "num_threads", "poisoned_memory"]
