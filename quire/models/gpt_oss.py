"""gpt-oss: Llama with attention sinks, windows in every other layer, and experts with biases and
clamped gates."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from quire.config.model import ModelConfig
from quire.layers.attention.layer import QKV, Rotation, StepContext
from quire.layers.experts import SparseMLP
from quire.layers.norm import WideRMSNorm
from quire.layers.weights import Build, Shard, WeightedLayer
from quire.models.llama import (
    AttentionTraits,
    LlamaAttention,
    LlamaForCausalLM,
    LlamaLayer,
    LlamaModel,
)
from quire.models.qwen3_moe import Qwen3MoeForCausalLM


class Sinks(WeightedLayer):
    """One more score of each head, of a key without a value; divided by heads."""

    weight: nn.Parameter

    def __init__(self, num_heads: int, num_kv_heads: int, build: Build) -> None:
        super().__init__(build)
        own = build.parallel.heads(num_heads, num_kv_heads)
        axis = (Shard(num_heads, own.first, own.count),)
        self.add_weight("weight", (axis,), build, torch.float32)


class GptOssAttention(LlamaAttention):
    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__(config, layer_index, traits, build)
        self.sinks = Sinks(config.num_heads, config.num_kv_heads, build / "sinks")

    def forward(self, x: torch.Tensor, rotation: Rotation, step: StepContext) -> torch.Tensor:
        q, k, v = self.qkv_proj(x)
        return self.o_proj(self.attend(QKV(q, k, v, rotation), step, self.sinks.weight))


class GptOssLayer(LlamaLayer):
    norm_class = WideRMSNorm
    attention_class = GptOssAttention

    @staticmethod
    def network(config: ModelConfig, layer_index: int, build: Build) -> nn.Module:
        assert config.experts is not None
        return SparseMLP(config.experts, config.hidden_size, build)


class GptOssModel(LlamaModel):
    layer_class = GptOssLayer


ENDINGS = {
    ".self_attn.sinks": ".self_attn.sinks.weight",
    ".experts.gate_up_proj": ".experts.gate_up_proj.weight",
    ".experts.gate_up_proj_bias": ".experts.gate_up_proj.bias",
    ".experts.gate_up_proj_blocks": ".experts.gate_up_proj.blocks",
    ".experts.gate_up_proj_scales": ".experts.gate_up_proj.scales",
    ".experts.down_proj": ".experts.down_proj.weight",
    ".experts.down_proj_bias": ".experts.down_proj.bias",
    ".experts.down_proj_blocks": ".experts.down_proj.blocks",
    ".experts.down_proj_scales": ".experts.down_proj.scales",
}
"""What names of tensors end with, there and here."""


def _rename(name: str) -> str:
    for theirs, ours in ENDINGS.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


def _as_stored(name: str) -> str:
    for theirs, ours in ENDINGS.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name


class GptOssForCausalLM(LlamaForCausalLM):
    model_class = GptOssModel
    weight_map = replace(
        LlamaForCausalLM.weight_map,
        fused={
            "qkv_proj": LlamaForCausalLM.weight_map.fused["qkv_proj"],
            "gate": {(): "router"},
        },
        rename=_rename,
        as_stored=_as_stored,
        experts=Qwen3MoeForCausalLM.weight_map.experts,
        stacks_experts=True,
        transposed=(".experts.gate_up_proj.weight", ".experts.down_proj.weight"),
        routers=(".mlp.gate",),
    )

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        bias, window = config.attention_bias, config.layer_window(layer_index)
        return AttentionTraits(qkv_bias=bias, output_bias=bias, window=window)
