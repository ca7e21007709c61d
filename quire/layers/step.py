"""`StepContext`: all that a forward pass is given beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.layers.attention.backend import AttentionStep


@dataclass(frozen=True, slots=True)
class StepContext:
    """One flat line of T tokens, which may belong to many requests."""

    positions: Tensor
    """int64 [T]"""
    attention: tuple[AttentionStep, ...]
    """The planned step of each KV group."""
    token_ids: Tensor | None = None
    """int64 [T]; None where there are `embeddings`."""
    embeddings: Tensor | None = None
    """[T, H], in place of what the model's own table has for the token ids; may be overwritten."""
    adapter_slots: Tensor | None = None
    """int32 [T]: which loaded adapter each token uses, -1 for none; None: no token uses one."""

    def embed(self, table: Callable[[Tensor], Tensor]) -> Tensor:
        """Input embeddings [T, H]: those given, or the rows of `table` that the token ids name."""
        if self.embeddings is not None:
            return self.embeddings
        assert self.token_ids is not None, "a step has token ids or embeddings"
        return table(self.token_ids)
