"""The architectures Quire can run, and the module of `quire.models` that holds each. No torch."""

from __future__ import annotations

SUPPORTED_ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "OPTForCausalLM": "opt",
    "GPT2LMHeadModel": "gpt2",
}
