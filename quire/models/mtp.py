"""MTP: the layer behind a target's last one, which predicts one token more (DeepSeek, GLM)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import nn

from quire.config.model import ModelConfig
from quire.layers.attention.layer import StepContext
from quire.layers.decoder import NumberedLayers
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.weights import Build, whole
from quire.models.deepseek_v3 import DeepseekV3ForCausalLM
from quire.models.draft_head import DraftHead
from quire.models.glm4_moe import Glm4MoeForCausalLM
from quire.models.llama import LlamaForCausalLM, make_rotary
from quire.models.registry import WeightMap

REPEATED = ("embed_tokens.weight", "shared_head.head.weight")
"""What checkpoints have of the target once more."""


@dataclass(frozen=True)
class MTPWeightMap(WeightMap):
    """The tensors of the layer behind the last one alone."""

    layer: str = ""

    @classmethod
    def beside(cls, target: WeightMap) -> MTPWeightMap:
        return cls(**{one.name: getattr(target, one.name) for one in fields(WeightMap)})

    def of_model(self, config: ModelConfig) -> MTPWeightMap:
        found = super().of_model(config)
        assert isinstance(found, MTPWeightMap)
        return replace(found, layer=f"model.layers.{config.num_layers - 1}.")

    def is_elsewhere(self, name: str) -> bool:
        return not name.startswith(self.layer) or name.endswith(REPEATED)


class SharedHead(nn.Module):
    """The norm before the target's output head."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, build / "norm")


class MTPHead(DraftHead):
    target_class: ClassVar[type[LlamaForCausalLM]]

    def __init__(self, config: ModelConfig, build: Build) -> None:
        """`config` is the target's with the layer that drafts as its last one."""
        super().__init__(config, build)
        self.model = MTPModel(config, self.target_class, build / "model")

    def combine(self, streams: torch.Tensor) -> torch.Tensor:
        return streams

    def forward(self, step: StepContext) -> torch.Tensor:
        assert step.hidden is not None, "a head is given hidden states"
        return self.model(step.embed(self.embed), step.hidden, step)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.lm_head.gather(self.target.logits(hidden))


class MTPModel(nn.Module):
    def __init__(
        self, config: ModelConfig, target_class: type[LlamaForCausalLM], build: Build
    ) -> None:
        super().__init__()
        hidden, eps, index = config.hidden_size, config.norm_eps, config.num_layers - 1
        model_class = target_class.model_class
        build_layer = build / f"layers.{index}"
        traits = target_class.attention_traits(config, index)
        layer = model_class.layer_class(config, index, traits, build_layer)
        # Checkpoints have them among the parts of the layer.
        layer.enorm = RMSNorm(hidden, eps, build_layer / "enorm")
        layer.hnorm = RMSNorm(hidden, eps, build_layer / "hnorm")
        layer.eh_proj = Linear(whole(2 * hidden), whole(hidden), False, build_layer / "eh_proj")
        layer.shared_head = SharedHead(config, build_layer / "shared_head")
        self.layers = NumberedLayers({index: layer})
        self.rotary = make_rotary(config, build, model_class.interleaved)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        layer: Any
        (layer,) = self.layers
        x = layer.eh_proj(torch.cat((layer.enorm(embedded), layer.hnorm(hidden)), dim=-1))
        return layer.shared_head.norm(layer(x, self.rotary(step.positions), step))


class DeepseekV3MTP(MTPHead):
    target_class = DeepseekV3ForCausalLM
    weight_map = MTPWeightMap.beside(DeepseekV3ForCausalLM.weight_map)


class Glm4MoeMTP(MTPHead):
    target_class = Glm4MoeForCausalLM
    weight_map = MTPWeightMap.beside(Glm4MoeForCausalLM.weight_map)
