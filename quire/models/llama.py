"""Llama: pre-norm, rotary positions, gated MLP; the frame that its relatives share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from quire.config.model import ModelConfig
from quire.layers.activation import GatedActivation
from quire.layers.attention.layer import QKV, Attention, QKNorms, Rotation, StepContext
from quire.layers.decoder import DecoderLayers
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import MergedLinear, OutputLinear, QKVLinear, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import Rotary
from quire.layers.weights import Build
from quire.models.registry import CausalLM, WeightMap


@dataclass(frozen=True)
class AttentionTraits:
    """Where the attention of Llama's relatives differs."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head before the rotation."""
    window: int | None = None
    scale: float | None = None
    """Of scores, where it is not head_dim ** -0.5."""
    softcap: float | None = None
    rotates: bool = True


class LlamaAttention(nn.Module):
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__()
        hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        self.qkv_proj = QKVLinear(
            hidden, head_dim, heads, config.num_kv_heads, traits.qkv_bias, build / "qkv_proj"
        )
        self.o_proj = OutputLinear(
            head_dim, heads, config.num_kv_heads, hidden, traits.output_bias, build / "o_proj"
        )
        self.qk_norm = traits.qk_norm
        if traits.qk_norm:
            self.q_norm = self.norm_class(head_dim, config.norm_eps, build / "q_norm")
            self.k_norm = self.norm_class(head_dim, config.norm_eps, build / "k_norm")
        scale = head_dim**-0.5 if traits.scale is None else traits.scale
        self.attend = Attention(layer_index, scale, traits.window, traits.softcap)
        self.rotates = traits.rotates

    def forward(self, x: torch.Tensor, rotation: Rotation, step: StepContext) -> torch.Tensor:
        q, k, v = self.qkv_proj(x)
        qkv = QKV(q, k, v, rotation if self.rotates else None, self.qk_norms)
        return self.o_proj(self.attend(qkv, step))

    @property
    def qk_norms(self) -> QKNorms | None:
        if not self.qk_norm:
            return None
        return QKNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, build: Build, inner: int | None = None) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, inner or config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedLinear(
            hidden, {"gate": inner, "up": inner}, bias, build / "gate_up_proj"
        )
        self.activation = GatedActivation(config.hidden_act)
        self.down_proj = RowLinear(inner, hidden, bias, build / "down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))


class LlamaLayer(nn.Module):
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    attention_class: ClassVar[type[nn.Module]] = LlamaAttention

    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__()
        self.input_layernorm = self.norm_class(
            config.hidden_size, config.norm_eps, build / "input_layernorm"
        )
        self.self_attn = self.attention_class(config, layer_index, traits, build / "self_attn")
        self.post_attention_layernorm = self.norm_class(
            config.hidden_size, config.norm_eps, build / "post_attention_layernorm"
        )
        self.mlp = self.network(config, layer_index, build / "mlp")

    @staticmethod
    def network(config: ModelConfig, layer_index: int, build: Build) -> nn.Module:
        """What comes after attention; relatives override this."""
        return LlamaMLP(config, build)

    def forward(self, x: torch.Tensor, rotation: Rotation, step: StepContext) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, step)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    layer_class: ClassVar[type[LlamaLayer]] = LlamaLayer
    interleaved: ClassVar[bool] = False
    """Whether neighbouring dimensions are rotated with each other."""

    def __init__(self, config: ModelConfig, traits: list[AttentionTraits], build: Build) -> None:
        super().__init__()
        hidden, stage = config.hidden_size, build.stage
        self.embed_tokens: VocabEmbedding | None = None
        if stage.has_embedding(config.tie_word_embeddings):
            self.embed_tokens = VocabEmbedding(config.vocab_size, hidden, build / "embed_tokens")
        self.rotary = make_rotary(config, build, self.interleaved)
        self.layers = DecoderLayers(
            {
                index: self.layer_class(config, index, traits[index], build / f"layers.{index}")
                for index in stage.layers(config.num_layers)
            }
        )
        self.norm: RMSNorm | None = None
        if stage.is_last:
            norm_class = self.layer_class.norm_class
            self.norm = norm_class(hidden, config.norm_eps, build / "norm")

    def forward(self, step: StepContext) -> torch.Tensor:
        x = step.embed(self.embed_tokens) if step.hidden is None else step.hidden
        return self.layers(x, self.rotary(step.positions), step, self.norm)


def make_rotary(config: ModelConfig, build: Build, interleaved: bool = False) -> Rotary:
    scaling = config.rope_scaling
    if scaling is not None:
        trained = config.raw.get("max_position_embeddings")
        scaling = {
            "original_max_position_embeddings": trained,
            "max_position_embeddings": trained,
            "max_model_len": build.max_model_len or config.max_position_tokens,
            **scaling,
        }
    return Rotary(
        config.rotary_dim,
        config.max_position_tokens,
        config.rope_theta,
        scaling,
        build.device,
        interleaved,
    )


class LlamaForCausalLM(CausalLM):
    model_class: ClassVar[type[LlamaModel]] = LlamaModel
    weight_map = WeightMap(
        fused={
            "qkv_proj": {("q",): "q_proj", ("k",): "k_proj", ("v",): "v_proj"},
            "gate_up_proj": {("gate",): "gate_proj", ("up",): "up_proj"},
        },
        ignored=("rotary_emb.inv_freq",),
    )

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        traits = [self.attention_traits(config, index) for index in range(config.num_layers)]
        self.model = self.model_class(config, traits, build / "model")
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        if build.stage.is_last:
            self.lm_head = LMHead(config.vocab_size, config.hidden_size, build / "lm_head", tied)

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        """What is particular about a layer's attention; relatives override this."""
        return AttentionTraits(config.attention_bias, config.attention_bias)

    def forward(self, step: StepContext) -> torch.Tensor:
        return self.model(step)
