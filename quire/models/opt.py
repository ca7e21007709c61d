"""OPT: learned positions, LayerNorm before the blocks (after them in opt-350m), ReLU."""

from __future__ import annotations

import torch
from torch import nn

from quire.config.model import ModelConfig
from quire.layers.activation import activation
from quire.layers.attention.layer import QKV, Attention, StepContext
from quire.layers.decoder import NumberedLayers
from quire.layers.embedding import Embedding, LMHead, VocabEmbedding
from quire.layers.linear import ColumnLinear, Linear, OutputLinear, QKVLinear, RowLinear
from quire.layers.norm import LayerNorm
from quire.layers.weights import Build, whole
from quire.models.registry import CausalLM, WeightMap

POSITION_OFFSET = 2
"""Rows at the head of OPT's position table that no token uses."""


def _norm(config: ModelConfig, build: Build) -> LayerNorm:
    affine = config.raw.get("layer_norm_elementwise_affine", True)
    return LayerNorm(config.hidden_size, config.norm_eps, build, affine)


class OPTAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, build: Build) -> None:
        super().__init__()
        hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        bias = config.attention_bias
        self.qkv_proj = QKVLinear(
            hidden, head_dim, heads, config.num_kv_heads, bias, build / "qkv_proj"
        )
        self.out_proj = OutputLinear(
            head_dim, heads, config.num_kv_heads, hidden, bias, build / "out_proj"
        )
        self.attend = Attention(layer_index, head_dim**-0.5)

    def forward(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        return self.out_proj(self.attend(QKV(*self.qkv_proj(x)), step))


class OPTLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, build: Build) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.norm_first = config.raw.get("do_layer_norm_before", True)
        self.self_attn_layer_norm = _norm(config, build / "self_attn_layer_norm")
        self.self_attn = OPTAttention(config, layer_index, build / "self_attn")
        self.final_layer_norm = _norm(config, build / "final_layer_norm")
        self.fc1 = ColumnLinear(hidden, inner, bias, build / "fc1")
        self.activation = activation(config.hidden_act)
        self.fc2 = RowLinear(inner, hidden, bias, build / "fc2")

    def forward(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        if self.norm_first:
            x = x + self.self_attn(self.self_attn_layer_norm(x), step)
            return x + self.mlp(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x, step))
        return self.final_layer_norm(x + self.mlp(x))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class OPTDecoder(nn.Module):
    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        hidden, stage = config.hidden_size, build.stage
        self.embed_dim = config.raw.get("word_embed_proj_dim") or hidden
        self.embed_tokens: VocabEmbedding | None = None
        if stage.has_embedding(config.tie_word_embeddings):
            self.embed_tokens = VocabEmbedding(
                config.vocab_size, self.embed_dim, build / "embed_tokens"
            )
        if stage.is_first:
            num_positions = config.max_position_tokens + POSITION_OFFSET
            self.embed_positions = Embedding(num_positions, hidden, build / "embed_positions")
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if self.embed_dim != hidden and stage.is_first:
            self.project_in = Linear(
                whole(self.embed_dim), whole(hidden), False, build / "project_in"
            )
        if self.embed_dim != hidden and stage.is_last:
            self.project_out = Linear(
                whole(hidden), whole(self.embed_dim), False, build / "project_out"
            )
        self.layers = NumberedLayers(
            {
                index: OPTLayer(config, index, build / f"layers.{index}")
                for index in stage.layers(config.num_layers)
            }
        )
        self.final_layer_norm: nn.Module = nn.Identity()
        norm_first = config.raw.get("do_layer_norm_before", True)
        is_left_out = config.raw.get("_remove_final_layer_norm", False)
        if norm_first and not is_left_out and stage.is_last:
            self.final_layer_norm = _norm(config, build / "final_layer_norm")

    def forward(self, step: StepContext) -> torch.Tensor:
        x = step.hidden
        if x is None:
            x = self.project_in(step.embed(self.embed_tokens))
            x = x + self.embed_positions(step.positions + POSITION_OFFSET)
        for layer in self.layers:
            x = layer(x, step)
        return self.project_out(self.final_layer_norm(x))


class OPTModel(nn.Module):
    """Exists for the sake of its name in checkpoints."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config, build / "decoder")


def _rename(name: str) -> str:
    return f"model.{name}" if name.startswith("decoder.") else name


class OPTForCausalLM(CausalLM):
    weight_map = WeightMap(
        fused={"qkv_proj": {("q",): "q_proj", ("k",): "k_proj", ("v",): "v_proj"}},
        rename=_rename,
        ignored=("decoder.version",),
        embedding="model.decoder.embed_tokens.weight",
    )

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        self.model = OPTModel(config, build / "model")
        decoder = self.model.decoder
        tied = decoder.embed_tokens if config.tie_word_embeddings else None
        if build.stage.is_last:
            self.lm_head = LMHead(config.vocab_size, decoder.embed_dim, build / "lm_head", tied)

    def forward(self, step: StepContext) -> torch.Tensor:
        return self.model.decoder(step)
