"""SmolLM3: Llama with some layers that have no rotary positions."""

from __future__ import annotations

from quire.config.model import ModelConfig, rotated_layers
from quire.models.llama import AttentionTraits, LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        return AttentionTraits(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            window=config.layer_window(layer_index),
            rotates=rotated_layers(config.values, config.num_layers)[layer_index],
        )
