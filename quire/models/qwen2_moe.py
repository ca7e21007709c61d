"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, and a gated one for all tokens beside them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from quire.config.experts import ExpertsConfig
from quire.config.model import ModelConfig
from quire.layers.activation import sigmoid
from quire.layers.experts import SparseMLP
from quire.layers.linear import Linear
from quire.layers.weights import Build, whole
from quire.models.llama import AttentionTraits, LlamaForCausalLM, LlamaLayer, LlamaMLP, LlamaModel
from quire.models.qwen3_moe import Qwen3MoeForCausalLM


class Qwen2SparseMLP(SparseMLP):
    def __init__(self, experts: ExpertsConfig, config: ModelConfig, build: Build) -> None:
        super().__init__(experts, config.hidden_size, build)
        self.shared_expert = LlamaMLP(config, build / "shared_expert", experts.shared_size)
        self.shared_expert_gate = Linear(
            whole(config.hidden_size), whole(1), False, build / "shared_expert_gate"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.shared_expert(x) * sigmoid(self.shared_expert_gate(x))
        return super().forward(x) + shared


class Qwen2MoeLayer(LlamaLayer):
    @staticmethod
    def network(config: ModelConfig, layer_index: int, build: Build) -> nn.Module:
        assert config.experts is not None
        if not config.experts.is_sparse[layer_index]:
            return LlamaMLP(config, build)
        return Qwen2SparseMLP(config.experts, config, build)


class Qwen2MoeModel(LlamaModel):
    layer_class = Qwen2MoeLayer


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    model_class = Qwen2MoeModel
    weight_map = replace(
        Qwen3MoeForCausalLM.weight_map, routers=(".mlp.gate", ".shared_expert_gate")
    )

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        window = config.layer_window(layer_index)
        return AttentionTraits(qkv_bias=config.attention_bias, window=window)
