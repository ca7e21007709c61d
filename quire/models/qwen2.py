"""Qwen2 and Qwen2.5: Llama with biased q, k and v, and a window in some layers if at all."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.models.llama import AttentionTraits, LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        return AttentionTraits(qkv_bias=True, window=config.layer_window(layer_index))
