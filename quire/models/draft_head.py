"""What a head that drafts is to the rest of Quire: a layer over the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod

import torch

from quire.layers.attention.layer import Attention, StepContext
from quire.layers.decoder import DecoderLayers, KeptStreams
from quire.layers.embedding import VocabEmbedding
from quire.models.registry import CausalLM


class DraftHead(CausalLM):
    """Drafts the token after next: of position i it is given the target's hidden state, and the
    token at i + 1 in `step.token_ids`. Its own result takes the place of the target's hidden state
    where it drafts further."""

    def share(self, target: CausalLM) -> None:
        """Take from the loaded target what the head has no tensors of its own for."""
        embeddings = [one for one in target.modules() if isinstance(one, VocabEmbedding)]
        # In a tuple: as submodules they would be looked for in the head's checkpoint.
        self._shared = (target, embeddings[0])

    @property
    def target(self) -> CausalLM:
        return self._shared[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._shared[1](token_ids)

    @abstractmethod
    def combine(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, H]: what `step.hidden` is to be for the target's streams [T, layers * H]."""

    @abstractmethod
    def forward(self, step: StepContext) -> torch.Tensor:
        """Hidden states [T, H], for `logits` and for `step.hidden` of the next position."""

    @abstractmethod
    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, the target's vocabulary], of all ranks."""

    def bind(self) -> None:
        """The one layer has the only slot of the cache."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.bind(0, 0, None)


def keep_streams(target: CausalLM, streams: KeptStreams) -> None:
    """Have a target keep what a head reads, from its next step on."""
    for module in target.modules():
        if isinstance(module, DecoderLayers):
            module.streams = streams
