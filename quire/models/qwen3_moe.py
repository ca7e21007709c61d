"""Qwen3-MoE: Qwen3 with experts in most layers."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.model import ModelConfig
from quire.layers.experts import SparseMLP
from quire.layers.weights import Build
from quire.models.llama import LlamaLayer, LlamaMLP, LlamaModel
from quire.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeLayer(LlamaLayer):
    @staticmethod
    def network(config: ModelConfig, layer_index: int, build: Build) -> nn.Module:
        assert config.experts is not None
        if not config.experts.is_sparse[layer_index]:
            return LlamaMLP(config, build)
        return SparseMLP(config.experts, config.hidden_size, build)


class Qwen3MoeModel(LlamaModel):
    layer_class = Qwen3MoeLayer


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    model_class = Qwen3MoeModel
    weight_map = replace(
        Qwen3ForCausalLM.weight_map,
        experts={
            "gate_up_proj": {("gate",): "{}.gate_proj", ("up",): "{}.up_proj"},
            "down_proj": {(): "{}.down_proj"},
        },
        routers=(".mlp.gate",),
    )
