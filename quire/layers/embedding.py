"""Token and position embeddings, and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels import dispatch
from quire.layers.weights import Build, MatrixLayer, WeightedLayer, divided, whole


class Embedding(WeightedLayer):
    """A table that every rank keeps entirely, such as learned positions."""

    weight: nn.Parameter

    def __init__(self, num_rows: int, dim: int, build: Build) -> None:
        super().__init__(build)
        self.add_weight("weight", (whole(num_rows), whole(dim)), build)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return dispatch.embedding(ids, self.weight)


class VocabEmbedding(MatrixLayer):
    """Token embeddings, divided among ranks by token id."""

    def __init__(self, vocab_size: int, dim: int, build: Build) -> None:
        super().__init__(build)
        self.parallel = build.parallel
        rows = divided(vocab_size, build.parallel)
        self.first, self.num_rows = rows[0].start, rows[0].size
        self.method.create_weights(self, rows, whole(dim), build)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.parallel.size == 1:
            return self.method.rows(self, token_ids)
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= self.num_rows)
        found = self.method.rows(self, local.masked_fill(elsewhere, 0))
        return self.parallel.all_reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0))


class LMHead(MatrixLayer):
    """Logits over a rank's share of the vocabulary, of which the last ranks' may have padding. With
    `tied`, the weight is that embedding's."""

    def __init__(
        self, vocab_size: int, dim: int, build: Build, tied: VocabEmbedding | None = None
    ) -> None:
        super().__init__(build)
        self.parallel = build.parallel
        self.vocab_size = vocab_size
        outputs = divided(vocab_size, build.parallel)
        self.first, self.width, self.kept = outputs[0].start, outputs[0].size, outputs[0].kept
        # In a tuple: as a submodule its weight would be looked for under two names.
        self._weighted: tuple[MatrixLayer, ...] = (tied if tied is not None else self,)
        if tied is None:
            self.method.create_weights(self, outputs, whole(dim), build)
        else:
            self.method = tied.method

    @property
    def weighted(self) -> MatrixLayer:
        """The layer that has the weight."""
        return self._weighted[0]

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.method.apply(self.weighted, hidden, None, out)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary of all ranks' `logits`."""
        if self.parallel.size == 1:
            return logits
        return self.parallel.all_gather(logits)[:, : self.vocab_size].contiguous()

    def gather_argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The id of the highest of all ranks' `logits` in each line, the lowest of several."""
        # float32 holds every id of a vocabulary, and all values that are narrower, exactly.
        found = logits.new_full((2, len(logits)), -torch.inf, dtype=torch.float32)
        if self.kept:
            best = dispatch.argmax(logits[:, : self.kept])
            found[0] = logits.gather(1, best.unsqueeze(1)).squeeze(1)
            found[1] = best + self.first
        values, ids = self.parallel.all_gather(found.view(-1)).view(-1, *found.shape).unbind(1)
        return ids.masked_fill(values < values.amax(0), torch.inf).amin(0).int()
