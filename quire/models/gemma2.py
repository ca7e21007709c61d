"""Gemma 2: norms of 1 + weight before and after each branch, scaled embeddings, a window in every
other layer, scores and logits that are capped."""

from __future__ import annotations

import torch

from quire.config.model import ModelConfig
from quire.layers.attention.layer import Rotation, StepContext
from quire.layers.norm import OffsetRMSNorm
from quire.layers.weights import Build
from quire.models.llama import (
    AttentionTraits,
    LlamaAttention,
    LlamaForCausalLM,
    LlamaLayer,
    LlamaModel,
)


class GemmaAttention(LlamaAttention):
    norm_class = OffsetRMSNorm


class GemmaLayer(LlamaLayer):
    norm_class = OffsetRMSNorm
    attention_class = GemmaAttention

    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__(config, layer_index, traits, build)
        hidden, eps = config.hidden_size, config.norm_eps
        self.pre_feedforward_layernorm = OffsetRMSNorm(
            hidden, eps, build / "pre_feedforward_layernorm"
        )
        self.post_feedforward_layernorm = OffsetRMSNorm(
            hidden, eps, build / "post_feedforward_layernorm"
        )

    def forward(self, x: torch.Tensor, rotation: Rotation, step: StepContext) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotation, step)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma2Model(LlamaModel):
    layer_class = GemmaLayer

    def __init__(self, config: ModelConfig, traits: list[AttentionTraits], build: Build) -> None:
        super().__init__(config, traits, build)
        self.factor = float(torch.tensor(config.hidden_size**0.5, dtype=build.dtype))

    def forward(self, step: StepContext) -> torch.Tensor:
        return self.layers(self.embed(step), self.rotary(step.positions), step, self.norm)

    def embed(self, step: StepContext) -> torch.Tensor:
        if step.hidden is not None:
            return step.hidden
        x = step.embed(self.embed_tokens)
        return x * self.factor if step.embeddings is None else x


def softcap(config: ModelConfig, key: str) -> float | None:
    """A number that scores or logits stay below; None where there is none."""
    return config.number(key, 1.0) if config.raw.get(key) is not None else None


class Gemma2ForCausalLM(LlamaForCausalLM):
    model_class = Gemma2Model

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        self.softcap = softcap(config, "final_logit_softcapping")

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        return AttentionTraits(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            window=config.layer_window(layer_index),
            scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
            softcap=softcap(config, "attn_logit_softcapping"),
        )

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().logits(hidden, out)
        if self.softcap is None:
            return logits
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)
