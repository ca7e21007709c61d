"""Mistral: Llama with a sliding attention window in every layer."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.models.llama import AttentionTraits, LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        return AttentionTraits(window=config.layer_window(layer_index))
