"""Granite: Llama with four factors: on embeddings, scores, branches and logits."""

from __future__ import annotations

import torch

from quire.config.model import ModelConfig
from quire.layers.attention.layer import Rotation, StepContext
from quire.layers.weights import Build
from quire.models.llama import AttentionTraits, LlamaForCausalLM, LlamaLayer, LlamaModel


class GraniteLayer(LlamaLayer):
    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__(config, layer_index, traits, build)
        self.factor = config.number("residual_multiplier", 1.0)

    def forward(self, x: torch.Tensor, rotation: Rotation, step: StepContext) -> torch.Tensor:
        x = x + self.factor * self.self_attn(self.input_layernorm(x), rotation, step)
        return x + self.factor * self.mlp(self.post_attention_layernorm(x))


class GraniteModel(LlamaModel):
    layer_class = GraniteLayer

    def __init__(self, config: ModelConfig, traits: list[AttentionTraits], build: Build) -> None:
        super().__init__(config, traits, build)
        self.factor = config.number("embedding_multiplier", 1.0)

    def forward(self, step: StepContext) -> torch.Tensor:
        x = step.embed(self.embed_tokens) * self.factor if step.hidden is None else step.hidden
        return self.layers(x, self.rotary(step.positions), step, self.norm)


class GraniteForCausalLM(LlamaForCausalLM):
    model_class = GraniteModel

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        self.divisor = config.number("logits_scaling", 1.0)

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        scale = config.number("attention_multiplier", 1.0)
        return AttentionTraits(config.attention_bias, config.attention_bias, scale=scale)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().logits(hidden, out).div_(self.divisor)
