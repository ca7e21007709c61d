"""GLM-4 (0414): Llama with norms before and after each branch; neighbouring dimensions in the first
half of each head rotate."""

from __future__ import annotations

import torch

from quire.config.model import ModelConfig
from quire.layers.attention.layer import Rotation, StepContext
from quire.layers.norm import RMSNorm
from quire.layers.weights import Build
from quire.models.llama import AttentionTraits, LlamaForCausalLM, LlamaLayer, LlamaModel
from quire.models.registry import WeightMap


class Glm4Layer(LlamaLayer):
    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__(config, layer_index, traits, build)
        hidden, eps = config.hidden_size, config.norm_eps
        self.post_self_attn_layernorm = RMSNorm(hidden, eps, build / "post_self_attn_layernorm")
        self.post_mlp_layernorm = RMSNorm(hidden, eps, build / "post_mlp_layernorm")

    def forward(self, x: torch.Tensor, rotation: Rotation, step: StepContext) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotation, step)
        x = x + self.post_self_attn_layernorm(attended)
        return x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))


class Glm4Model(LlamaModel):
    layer_class = Glm4Layer
    interleaved = True


class Glm4ForCausalLM(LlamaForCausalLM):
    model_class = Glm4Model
    weight_map = WeightMap(
        fused={"qkv_proj": LlamaForCausalLM.weight_map.fused["qkv_proj"]},
        ignored=LlamaForCausalLM.weight_map.ignored,
    )

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        return AttentionTraits(qkv_bias=config.attention_bias)
