"""DeepSeek-V2: latent attention (MLA), and experts with shared ones beside them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from quire.config.model import ModelConfig
from quire.layers.attention.layer import Attention, LatentQKV, Rotation, StepContext
from quire.layers.experts import SparseMLP
from quire.layers.linear import LatentLinear, Linear, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.weights import Build, Shard, whole
from quire.models.llama import AttentionTraits, LlamaForCausalLM, LlamaLayer, LlamaMLP, LlamaModel
from quire.models.qwen3_moe import Qwen3MoeForCausalLM

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever config.json says of the others."""


class LatentAttention(nn.Module):
    """One latent for each token stands for the keys and values of all heads: it is what the cache
    keeps, with the rotated part of the keys."""

    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None and traits.scale is not None
        self.latent, hidden, bias = latent, config.hidden_size, traits.qkv_bias
        own = build.parallel.heads(config.num_heads, 1)
        heads = Shard(config.num_heads, own.first, own.count)
        self.num_heads = own.count
        queries = (heads.times(latent.query_dim),)
        self.q_proj: Linear | None = None
        if latent.q_rank is None:
            self.q_proj = Linear(whole(hidden), queries, False, build / "q_proj")
        else:
            rank = whole(latent.q_rank)
            self.q_a_proj = Linear(whole(hidden), rank, bias, build / "q_a_proj")
            self.q_a_layernorm = RMSNorm(latent.q_rank, LATENT_EPS, build / "q_a_layernorm")
            self.q_b_proj = Linear(rank, queries, False, build / "q_b_proj")
        self.kv_a_proj_with_mqa = Linear(
            whole(hidden), whole(latent.cached_dim), bias, build / "kv_a_proj_with_mqa"
        )
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, LATENT_EPS, build / "kv_a_layernorm")
        self.kv_b_proj = LatentLinear(
            latent.kv_rank, latent.nope_dim, latent.value_dim, config.num_heads, build / "kv_b_proj"
        )
        values = (heads.times(latent.value_dim),)
        self.o_proj = RowLinear(values, hidden, traits.output_bias, build / "o_proj")
        self.attend = Attention(layer_index, traits.scale)

    def forward(self, x: torch.Tensor, rotation: Rotation, step: StepContext) -> torch.Tensor:
        q = self._queries(x).view(len(x), self.num_heads, self.latent.query_dim)
        norm = self.kv_a_layernorm
        compressed = self.kv_a_proj_with_mqa(x)
        latent = LatentQKV(q, compressed, norm.weight, norm.eps, rotation, self.kv_b_proj)
        return self.o_proj(self.attend(latent, step))

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        if self.q_proj is not None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


def yarn_sharpening(config: ModelConfig) -> float:
    """What YaRN multiplies scores with, as far as it is not in the rotation."""
    scaling = config.rope_scaling or {}
    factor, weight = scaling.get("factor", 1.0), scaling.get("mscale_all_dim") or 0.0
    if factor <= 1 or not weight:
        return 1.0
    return float(0.1 * weight * math.log(factor) + 1.0) ** 2


class DeepseekSparseMLP(SparseMLP):
    def __init__(self, config: ModelConfig, build: Build) -> None:
        assert config.experts is not None
        super().__init__(config.experts, config.hidden_size, build)
        self.shared_experts = LlamaMLP(config, build / "shared_experts", config.experts.shared_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shared_experts(x)


class DeepseekLayer(LlamaLayer):
    attention_class = LatentAttention

    @staticmethod
    def network(config: ModelConfig, layer_index: int, build: Build) -> nn.Module:
        assert config.experts is not None
        if not config.experts.is_sparse[layer_index]:
            return LlamaMLP(config, build)
        return DeepseekSparseMLP(config, build)


class DeepseekModel(LlamaModel):
    layer_class = DeepseekLayer
    interleaved = True


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    model_class = DeepseekModel
    weight_map = replace(Qwen3MoeForCausalLM.weight_map, dense=(".kv_b_proj",))

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        assert config.latent is not None
        scale = config.latent.query_dim**-0.5 * yarn_sharpening(config)
        bias = config.attention_bias
        return AttentionTraits(qkv_bias=bias, output_bias=bias, scale=scale)
