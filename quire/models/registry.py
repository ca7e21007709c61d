"""What a model is to the rest of Quire, and which class runs which architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module

import torch
from torch import nn

from quire.config.model import DRAFT_ARCHITECTURES, SUPPORTED_ARCHITECTURES, ModelConfig
from quire.layers.attention.layer import StepContext
from quire.layers.embedding import LMHead
from quire.layers.weights import Build, ShardKey
from quire.protocol.errors import ModelError


def _same_name(name: str) -> str:
    return name


@dataclass(frozen=True)
class WeightMap:
    """How a checkpoint's tensors differ in name and layout from the model's parameters."""

    fused: Mapping[str, Mapping[ShardKey, str]] = field(default_factory=dict)
    """Module -> shard -> the checkpoint's module: one of ours for several of theirs."""
    rename: Callable[[str], str] = _same_name
    """Turns a checkpoint's name into a name of the same kind as the model's own."""
    as_stored: Callable[[str], str] = _same_name
    """The other way, for messages."""
    transposed: tuple[str, ...] = ()
    """Endings of names whose tensors are stored [in, out]."""
    experts: Mapping[str, Mapping[ShardKey, str]] = field(default_factory=dict)
    """The same as `fused` for modules below one called "experts": "{}" is the expert's number."""
    stacks_experts: bool = False
    """Whether checkpoints have the matrices of all experts of a layer in one tensor; GGUF files
    are read as if each had its own."""
    num_experts: int = 0
    routers: tuple[str, ...] = ()
    """Endings of modules that choose experts, and are never rounded."""
    dense: tuple[str, ...] = ()
    """Endings of modules whose matrices are taken apart: kept as floats in the model's dtype."""
    ignored: tuple[str, ...] = ()
    """Endings of names that checkpoints may hold and the model has no use for."""
    ignored_parts: tuple[str, ...] = ()
    """Beginnings, with or without `model.`, of names of other parts than the language model."""
    draft_layers: tuple[str, ...] = ()
    """Beginnings of the names of layers behind the last, which predict further tokens (MTP)."""
    embedding: str = "model.embed_tokens.weight"
    """The tensor that a tied output head shares."""
    head: str = "lm_head.weight"
    """The output head's own name: where tied, a checkpoint may repeat the embedding under it."""

    def of_model(self, config: ModelConfig) -> WeightMap:
        """With as many experts and draft layers as the model has."""
        first, count = config.num_layers, config.num_draft_layers
        layers = tuple(f"model.layers.{layer}." for layer in range(first, first + count))
        num_experts = 0 if config.experts is None else config.experts.count
        is_stacked = self.stacks_experts and config.source.kind != "gguf"
        experts = {} if is_stacked else self.experts
        return replace(self, experts=experts, num_experts=num_experts, draft_layers=layers)

    def ignores(self, name: str) -> bool:
        """Whether the model has no use for a checkpoint's tensor."""
        own_name = name.removeprefix("model.")
        is_other_part = own_name.startswith(self.ignored_parts)
        return is_other_part or name.endswith(self.ignored) or name.startswith(self.draft_layers)

    def is_elsewhere(self, name: str) -> bool:
        """Whether a checkpoint's tensor is another model's, and is not even read."""
        return name.startswith(self.draft_layers)

    def modules(self, path: str) -> dict[ShardKey, str]:
        """The checkpoint's modules that the layer with this path stands for."""
        parent, _, own_name = path.rpartition(".")
        if parent.endswith(".experts") and own_name in self.experts:
            return {
                (expert, *key): f"{parent}.{name.format(expert)}"
                for expert in range(self.num_experts)
                for key, name in self.experts[own_name].items()
            }
        fused = self.fused.get(own_name) or {(): own_name}
        return {key: ".".join(filter(None, (parent, name))) for key, name in fused.items()}


class CausalLM(nn.Module, ABC):
    """A language model over one flat line of tokens, which may belong to many requests.

    Modules are named as in checkpoints, but for what `weight_map` says.
    """

    weight_map: WeightMap
    lm_head: LMHead
    """Of the last stage."""
    elsewhere: frozenset[str] = frozenset()
    """Modules of a checkpoint that other stages alone have, or ranks with other experts."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        """Makes the layers of a rank's stage as `build` says; their weights are left
        uninitialised."""
        super().__init__()
        self.weight_map = self.weight_map.of_model(config)
        self._hidden_size, self.dtype, self._device = config.hidden_size, build.dtype, build.device

    @abstractmethod
    def forward(self, step: StepContext) -> torch.Tensor:
        """Hidden states [T, H] of the step's tokens: after the final norm, or for the next stage's
        `step.hidden`."""

    def new_hidden(self, num_tokens: int) -> torch.Tensor:
        """Room for the hidden states of that many tokens between two stages."""
        shape = num_tokens, self._hidden_size
        return torch.zeros(shape, dtype=self.dtype, device=self._device)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, share of the vocabulary] for hidden states [S, H] of the last stage; into `out`, such
        as `new_logits` makes, if given."""
        return self.lm_head(hidden, out)

    def new_logits(self, num_lines: int) -> torch.Tensor:
        """Room for that many lines of logits."""
        shape = num_lines, self.lm_head.width
        return torch.empty(shape, dtype=self.dtype, device=self._device)


def model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture as config.json names it, imported when first asked for."""
    modules = {**SUPPORTED_ARCHITECTURES, **DRAFT_ARCHITECTURES}
    if architecture not in modules:
        raise ModelError(
            f"Architecture {architecture!r} is not supported; supported are "
            f"{', '.join(sorted(SUPPORTED_ARCHITECTURES))}."
        )
    module = import_module(f"quire.models.{modules[architecture]}")
    return getattr(module, architecture)


def weight_map_of(config: ModelConfig) -> WeightMap:
    return model_class(config.architecture).weight_map.of_model(config)
