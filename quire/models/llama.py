"""Llama, and the frame that its relatives share: pre-norm, rotary positions, gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from quire.config.model import ModelConfig
from quire.kernels.cpu.decoder import Decoder
from quire.layers.activation import GatedActivation
from quire.layers.attention.backend import AttentionStep
from quire.layers.attention.cpu import CpuStep
from quire.layers.attention.heads import HeadNorms, Heads, Rotation
from quire.layers.decoder import DecoderLayerParts, native_decoder
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import MergedLinear, QKVLinear, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.parallel import Placement
from quire.layers.rotary import Rotary
from quire.models.registry import CausalLM, WeightMap


@dataclass(frozen=True)
class AttentionTraits:
    """Where the attention of Llama's relatives differs."""

    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: bool = False
    """Queries and keys are normalised per head before the rotation."""
    window: int | None = None


class LlamaAttention(nn.Module):
    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, place: Placement
    ) -> None:
        super().__init__()
        hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        self.qkv_proj = QKVLinear(
            hidden, head_dim, heads, config.num_kv_heads, traits.qkv_bias, place
        )
        self.o_proj = RowLinear(heads * head_dim, hidden, traits.output_bias, place)
        self.head_norm = traits.head_norm
        if traits.head_norm:
            self.q_norm = RMSNorm(head_dim, config.norm_eps, place)
            self.k_norm = RMSNorm(head_dim, config.norm_eps, place)
        self.layer_index, self.window, self.scale = layer_index, traits.window, head_dim**-0.5

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norms = None
        if self.head_norm:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        joined, residual = self.qkv_proj.after_norm(norm, x, residual)
        q, k, v = self.qkv_proj.split(joined)
        heads = Heads(q, k, v, rotation, norms)
        out = attention.attend(self.layer_index, heads, self.scale, self.window)
        return self.o_proj(out.flatten(1)), residual


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedLinear(hidden, {"gate": inner, "up": inner}, bias, place)
        self.activation = GatedActivation(config.hidden_act)
        self.down_proj = RowLinear(inner, hidden, bias, place)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inner, residual = self.gate_up_proj.after_norm(norm, x, residual, self.activation)
        return self.down_proj(inner), residual


class LlamaLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, place: Placement
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place)
        self.self_attn = LlamaAttention(config, layer_index, traits, place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place)
        self.mlp = LlamaMLP(config, place)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds `x` to the residual stream (None: starts it); returns the next addend and it."""
        x, residual = self.self_attn(self.input_layernorm, x, residual, rotation, attention)
        return self.mlp(self.post_attention_layernorm, x, residual)

    def parts(self) -> DecoderLayerParts | None:
        """What `forward` is made of, if other code knows how to do it."""
        attention, mlp = self.self_attn, self.mlp
        if not mlp.activation.is_silu:
            return None
        return DecoderLayerParts(
            attention_norm=self.input_layernorm,
            qkv=attention.qkv_proj,
            head_norms=(attention.q_norm, attention.k_norm) if attention.head_norm else None,
            output=attention.o_proj,
            network_norm=self.post_attention_layernorm,
            gate_up=mlp.gate_up_proj,
            down=mlp.down_proj,
            num_heads=attention.qkv_proj.heads[0],
            scale=attention.scale,
            window=attention.window,
        )


class LlamaModel(nn.Module):
    def __init__(
        self, config: ModelConfig, traits: list[AttentionTraits], place: Placement
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, place)
        scaling = config.rope_scaling
        if scaling is not None:
            trained = config.raw.get("max_position_embeddings")
            scaling = {"original_max_position_embeddings": trained, **scaling}
        self.rotary = Rotary(
            config.head_dim, config.max_position_tokens, config.rope_theta, scaling, place.device
        )
        self.layers = nn.ModuleList(
            LlamaLayer(config, index, layer_traits, place)
            for index, layer_traits in enumerate(traits)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, place)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionStep
    ) -> torch.Tensor:
        x, residual = self.embed_tokens(token_ids), None
        rotation = self.rotary(positions)
        if isinstance(attention, CpuStep) and self.native_decoder is not None:
            return self.norm(*attention.decode(self.native_decoder, x, rotation))[0]
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, attention)
        return self.norm(x, residual)[0]

    @cached_property
    def native_decoder(self) -> Decoder | None:
        """All layers in one call where their weights, which must be there by now, allow it."""
        layers = [layer for layer in self.layers if isinstance(layer, LlamaLayer)]
        parts = [part for layer in layers if (part := layer.parts()) is not None]
        return native_decoder(parts) if len(parts) == len(self.layers) else None


class LlamaForCausalLM(CausalLM):
    weight_map = WeightMap(
        fused={
            "qkv_proj": {"q": "q_proj", "k": "k_proj", "v": "v_proj"},
            "gate_up_proj": {"gate": "gate_proj", "up": "up_proj"},
        },
        ignored=("rotary_emb.inv_freq",),
    )

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__(config, place)
        traits = [self.attention_traits(config, index) for index in range(config.num_layers)]
        self.model = LlamaModel(config, traits, place)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, place, tied)

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        """What is particular about a layer's attention; relatives override this."""
        return AttentionTraits(config.attention_bias, config.attention_bias)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionStep
    ) -> torch.Tensor:
        return self.model(token_ids, positions, attention)
