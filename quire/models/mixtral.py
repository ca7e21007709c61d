"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.model import ModelConfig
from quire.layers.experts import SparseMLP
from quire.layers.weights import Build
from quire.models.llama import AttentionTraits, LlamaForCausalLM, LlamaLayer, LlamaModel


class MixtralLayer(LlamaLayer):
    @staticmethod
    def network(config: ModelConfig, layer_index: int, build: Build) -> nn.Module:
        assert config.experts is not None
        return SparseMLP(config.experts, config.hidden_size, build)


class MixtralModel(LlamaModel):
    layer_class = MixtralLayer


def _rename(name: str) -> str:
    return name.replace(".block_sparse_moe.", ".mlp.")


def _as_stored(name: str) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.")


class MixtralForCausalLM(LlamaForCausalLM):
    model_class = MixtralModel
    weight_map = replace(
        LlamaForCausalLM.weight_map,
        rename=_rename,
        as_stored=_as_stored,
        experts={
            "gate_up_proj": {("gate",): "{}.w1", ("up",): "{}.w3"},
            "down_proj": {(): "{}.w2"},
        },
        routers=(".mlp.gate",),
    )

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        return AttentionTraits(window=config.layer_window(layer_index))
