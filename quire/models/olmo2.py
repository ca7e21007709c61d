"""OLMo 2: Llama with norms behind its branches instead of before them; queries and keys are
normalised over all heads at once."""

from __future__ import annotations

import torch

from quire.config.model import ModelConfig
from quire.layers.attention.layer import QKV, Rotation, StepContext
from quire.layers.norm import WideRMSNorm
from quire.layers.weights import Build, Shard
from quire.models.llama import (
    AttentionTraits,
    LlamaAttention,
    LlamaForCausalLM,
    LlamaLayer,
    LlamaModel,
)


class Olmo2Attention(LlamaAttention):
    """A rank has the weights of its own heads, and sums up squares with the other ranks."""

    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__(config, layer_index, traits, build)
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.parallel, own = build.parallel, build.parallel.heads(heads, kv_heads)
        q_axis = (Shard(heads, own.first, own.count).times(head_dim),)
        k_axis = (Shard(kv_heads, own.kv_first, own.kv_count).times(head_dim),)
        self.q_norm = WideRMSNorm(q_axis, config.norm_eps, build / "q_norm")
        self.k_norm = WideRMSNorm(k_axis, config.norm_eps, build / "k_norm")
        self.widths = (heads * head_dim, kv_heads * head_dim)
        self.copies = own.copies

    def forward(self, x: torch.Tensor, rotation: Rotation, step: StepContext) -> torch.Tensor:
        q, k, v = self.qkv_proj(x)
        q, k = self.normalize(q, k)
        return self.o_proj(self.attend(QKV(q, k, v, rotation), step))

    def normalize(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = [one.flatten(1).float() for one in (q, k)]
        squares = torch.stack([one.square().sum(-1) for one in wide])
        squares[1] /= self.copies
        squares = self.parallel.all_reduce(squares)
        out = []
        for one, norm, width, total in zip(
            wide, (self.q_norm, self.k_norm), self.widths, squares, strict=True
        ):
            scale = torch.rsqrt(total / width + norm.eps).unsqueeze(-1)
            out.append((one * scale * norm.weight).to(q.dtype))
        return out[0].view(q.shape), out[1].view(k.shape)


class Olmo2Layer(LlamaLayer):
    norm_class = WideRMSNorm
    attention_class = Olmo2Attention

    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__(config, layer_index, traits, build)
        del self.input_layernorm
        hidden, eps = config.hidden_size, config.norm_eps
        self.post_feedforward_layernorm = WideRMSNorm(
            hidden, eps, build / "post_feedforward_layernorm"
        )

    def forward(self, x: torch.Tensor, rotation: Rotation, step: StepContext) -> torch.Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, rotation, step))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Olmo2Model(LlamaModel):
    layer_class = Olmo2Layer


class Olmo2ForCausalLM(LlamaForCausalLM):
    model_class = Olmo2Model
