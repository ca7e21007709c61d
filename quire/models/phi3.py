"""Phi-3, Phi-3.5 and Phi-4: Llama with QKV, and gate and up, joined in checkpoints; a part of each
head rotates."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.models.llama import AttentionTraits, LlamaForCausalLM
from quire.models.registry import WeightMap


class Phi3ForCausalLM(LlamaForCausalLM):
    weight_map = WeightMap(ignored=LlamaForCausalLM.weight_map.ignored)

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        return AttentionTraits(window=config.layer_window(layer_index))
