"""GraniteMoE: Granite with experts in every layer, which checkpoints have as one tensor for all of
them."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.model import ModelConfig
from quire.layers.experts import SparseMLP
from quire.layers.weights import Build
from quire.models.granite import GraniteForCausalLM, GraniteLayer, GraniteModel


class GraniteMoeLayer(GraniteLayer):
    @staticmethod
    def network(config: ModelConfig, layer_index: int, build: Build) -> nn.Module:
        assert config.experts is not None
        return SparseMLP(config.experts, config.hidden_size, build)


class GraniteMoeModel(GraniteModel):
    layer_class = GraniteMoeLayer


NAMES = {
    "block_sparse_moe.router.layer": "mlp.gate",
    "block_sparse_moe.input_linear": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear": "mlp.experts.down_proj",
}


def _rename(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _as_stored(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(ours, theirs)
    return name


class GraniteMoeForCausalLM(GraniteForCausalLM):
    model_class = GraniteMoeModel
    weight_map = replace(
        GraniteForCausalLM.weight_map,
        fused={"qkv_proj": GraniteForCausalLM.weight_map.fused["qkv_proj"]},
        rename=_rename,
        as_stored=_as_stored,
        stacks_experts=True,
        routers=(".mlp.gate",),
    )
