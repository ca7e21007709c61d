"""GLM-4.5 and 4.6: Llama's attention, half of each head rotated, and DeepSeek-V3's experts."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.models.deepseek_v2 import DeepseekLayer
from quire.models.llama import AttentionTraits, LlamaForCausalLM, LlamaLayer, LlamaModel
from quire.models.qwen3_moe import Qwen3MoeForCausalLM


class Glm4MoeLayer(LlamaLayer):
    network = staticmethod(DeepseekLayer.network)


class Glm4MoeModel(LlamaModel):
    layer_class = Glm4MoeLayer


class Glm4MoeForCausalLM(LlamaForCausalLM):
    model_class = Glm4MoeModel
    weight_map = Qwen3MoeForCausalLM.weight_map

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        has_norms = config.values.boolean("use_qk_norm", False)
        return AttentionTraits(qkv_bias=config.attention_bias, qk_norm=has_norms)
