"""Qwen3 (dense): Llama with queries and keys normalised per head."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.models.llama import AttentionTraits, LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        return AttentionTraits(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
            window=config.layer_window(layer_index),
        )
