"""SmolLM3: Llama with some layers that have no rotary positions."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.models.llama import AttentionTraits, LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        return AttentionTraits(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            window=config.layer_window(layer_index),
            rotates=_rotates(config, layer_index),
        )


def _rotates(config: ModelConfig, layer_index: int) -> bool:
    """`no_rope_layers` has a 1 for each layer that rotates; without it, every fourth does not."""
    listed = config.raw.get("no_rope_layers")
    if isinstance(listed, list) and layer_index < len(listed):
        return bool(listed[layer_index])
    return (layer_index + 1) % int(config.number("no_rope_layer_interval", 4)) != 0
