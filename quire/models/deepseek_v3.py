"""DeepSeek-V3 and R1: V2 with other routing, which its configuration says."""

from __future__ import annotations

from quire.models.deepseek_v2 import DeepseekV2ForCausalLM


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    pass
