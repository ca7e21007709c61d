"""Small random transformers models, saved as users find them, and a paged run of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from quire.config.model import ModelConfig
from quire.layers.attention.backend import AttentionBackend, AttentionInputs
from quire.layers.attention.layer import StepContext
from quire.layers.attention.torch import TorchBackend
from quire.models.registry import CausalLM
from quire.worker.rows import Staging

VOCAB = 160
MAX_POSITIONS = 128

_LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
_NO_TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
"""Defaults lie beyond this vocabulary."""
EAGER = ("gemma2", "gemma3", "gpt_oss")
"""Other implementations of transformers leave out softcaps and sinks."""
_LATENT = {
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA_LIKE),
    "mistral": ("MistralConfig", {**_LLAMA_LIKE, "sliding_window": None}),
    "qwen2": ("Qwen2Config", _LLAMA_LIKE),
    "qwen3": ("Qwen3Config", {**_LLAMA_LIKE, "head_dim": 16}),
    "granite": (
        "GraniteConfig",
        {
            **_LLAMA_LIKE,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {**_LLAMA_LIKE, "no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    ),
    "phi3": (
        "Phi3Config",
        {
            **_LLAMA_LIKE,
            **_NO_TOKENS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.75,
            },
            "sliding_window": 21,
        },
    ),
    "olmo2": ("Olmo2Config", {**_LLAMA_LIKE, **_NO_TOKENS, "rms_norm_eps": 1e-3}),
    "glm4": (
        "Glm4Config",
        {
            **_LLAMA_LIKE,
            **_NO_TOKENS,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            **_LLAMA_LIKE,
            **_NO_TOKENS,
            "head_dim": 24,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 7.0,
            "sliding_window": 19,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_LLAMA_LIKE,
            **_NO_TOKENS,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 11,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7000.0},
            },
        },
    ),
    "mixtral": ("MixtralConfig", {**_LLAMA_LIKE, "num_local_experts": 5}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_LLAMA_LIKE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_LLAMA_LIKE,
            "head_dim": 16,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {
            **_LLAMA_LIKE,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_LLAMA_LIKE,
            **_NO_TOKENS,
            "head_dim": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 11,
            "swiglu_limit": 0.8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 15000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "truncate": False,
            },
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **_LLAMA_LIKE,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.4,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **_LLAMA_LIKE,
            **_LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_LLAMA_LIKE,
            **_LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 28,
        },
    ),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": MAX_POSITIONS,
        },
    ),
}


def random_model(
    family: str, seed: int = 0, spread: float = 0.15, **changes: Any
) -> PreTrainedModel:
    """A transformers model with weights large enough that every part of it shows in the logits."""
    class_name, settings = FAMILIES[family]
    config: PretrainedConfig = getattr(transformers, class_name)(**{**settings, **changes})
    how = {"attn_implementation": "eager"} if family in EAGER else {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        with torch.no_grad():
            parameter.normal_(1.0 if is_norm else 0.0, spread, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, spread, generator=generator)
    return model


def save_safetensors(model: PreTrainedModel, folder: Path, shards: bool = False) -> Path:
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "5GB")
    assert (folder / "model.safetensors.index.json").exists() == shards
    return folder


def save_bin(model: PreTrainedModel, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder with config.json and a pickled state dict under names of the caller's choice."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' logits of a whole sequence in one pass, without any cache."""
    return model(torch.tensor([list(tokens)], device=model.device), use_cache=False).logits[0]


def random_tokens(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()


class PagedRun:
    """Sequences computed piece by piece through a paged KV cache with blocks in random order."""

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        sequences: Sequence[Sequence[int]],
        backend: type[AttentionBackend] = TorchBackend,
        block_size: int = 4,
        num_ranks: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.sequences, self.block_size = model, sequences, block_size
        self.device = next(model.parameters()).device
        self.computed = [0] * len(sequences)
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]
        max_blocks = -(-max(map(len, sequences)) // block_size)
        num_blocks = max_blocks * len(sequences) + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        self.tables = order[: max_blocks * len(sequences)].view(len(sequences), max_blocks).int()
        num_heads = config.num_heads // num_ranks
        num_kv_heads = max(1, config.num_kv_heads // num_ranks)
        num_parts = 2 if config.latent is None else 1
        shape = (
            config.num_layers,
            num_parts,
            num_blocks,
            num_kv_heads,
            block_size,
            config.head_dim,
        )
        # Stale content must never be read.
        kv = torch.full(shape, float("nan"), dtype=dtype, device=self.device)
        self.backend = backend(
            kv, num_heads, num_kv_heads, config.head_dim, block_size, None, config.latent
        )

    def step(self, work: dict[int, int]) -> None:
        """Computes the next `work[i]` tokens of each sequence i, all in one batch."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start = [0]
        for index, count in work.items():
            first = self.computed[index]
            new = range(first, first + count)
            token_ids += self.sequences[index][first : first + count]
            positions += new
            slots += [self._slot(index, position) for position in new]
            self.computed[index] += count
            query_start.append(len(token_ids))
        self.on_step(work)
        context_lens = [self.computed[index] for index in work]
        device = self.device
        inputs = AttentionInputs(
            query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
            block_tables=self.tables[list(work)].to(device),
            slots=torch.tensor(slots, device=device),
            query_lens=np.array(list(work.values()), np.int32),
            send=Staging(device).send,
            max_context_lens=np.array(context_lens, np.int32),
        )
        with torch.inference_mode():
            hidden = self.model(
                StepContext(
                    torch.tensor(positions, device=device),
                    (self.backend.plan(inputs),),
                    torch.tensor(token_ids, device=device),
                )
            )
            logits = self.model.lm_head.gather(self.model.logits(hidden))
        for index, piece in zip(work, logits.split(list(work.values())), strict=True):
            self.logits[index].append(piece)

    def on_step(self, work: dict[int, int]) -> None:
        """Called before each forward pass."""

    def _slot(self, index: int, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return int(self.tables[index, block]) * self.block_size + offset

    def all_logits(self) -> list[torch.Tensor]:
        """[len, vocab] of every sequence."""
        return [torch.cat(pieces) for pieces in self.logits]
