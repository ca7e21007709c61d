"""Token and position embeddings, and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels import dispatch
from quire.layers.parallel import Axis, Part, Placement, WeightedLayer, whole


def vocabulary_axis(vocab_size: int, place: Placement) -> Axis:
    """Each rank keeps an equal number of vocabulary entries; the last ones may be padding."""
    share = -(-vocab_size // place.parallel.size)
    return (Part(vocab_size, place.parallel.rank * share, share),)


class Embedding(WeightedLayer):
    """A table that every rank keeps entirely, such as learned positions."""

    weight: nn.Parameter

    def __init__(self, num_rows: int, dim: int, place: Placement) -> None:
        super().__init__()
        self.add_weight("weight", (whole(num_rows), whole(dim)), place)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return dispatch.embedding(ids, self.weight)


class VocabEmbedding(WeightedLayer):
    """Token embeddings, divided among ranks by token id."""

    def __init__(self, vocab_size: int, dim: int, place: Placement) -> None:
        super().__init__()
        self.parallel = place.parallel
        rows = vocabulary_axis(vocab_size, place)
        self.first, self.num_rows = rows[0].start, rows[0].size
        self.scheme = place.scheme
        self.scheme.create_weights(self, rows, whole(dim), place)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.parallel.size == 1:
            return self.scheme.rows(self, token_ids)
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= self.num_rows)
        found = self.scheme.rows(self, local.masked_fill(elsewhere, 0))
        return self.parallel.all_reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0))


class LMHead(WeightedLayer):
    """Logits over the vocabulary. With `tied`, the weight is that embedding's."""

    def __init__(
        self, vocab_size: int, dim: int, place: Placement, tied: VocabEmbedding | None = None
    ) -> None:
        super().__init__()
        self.parallel = place.parallel
        self.vocab_size = vocab_size
        self.scheme = place.scheme
        # In a tuple: as a submodule its weight would be looked for under two names.
        self._weighted: tuple[WeightedLayer, ...] = (tied if tied is not None else self,)
        if tied is None:
            outputs = vocabulary_axis(vocab_size, place)
            self.scheme.create_weights(self, outputs, whole(dim), place)
        self.dtype, self.device = place.dtype, place.device

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        (weighted,) = self._weighted
        if self.parallel.size == 1:
            return self.scheme.apply(weighted, hidden, None, out)
        logits = self.parallel.all_gather(self.scheme.apply(weighted, hidden, None))
        logits = logits[:, : self.vocab_size]
        return logits if out is None else out.copy_(logits)
