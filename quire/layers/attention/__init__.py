"""Attention over the paged KV cache: the layer, and the backends that compute it."""

from quire.layers.attention.backend import (
    AttentionBackend,
    AttentionInputs,
    AttentionStep,
    BackendSupport,
    select_backend,
)
from quire.layers.attention.layer import Attention

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionInputs",
    "AttentionStep",
    "BackendSupport",
    "select_backend",
]
