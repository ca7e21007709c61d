"""GPT-2: learned positions, LayerNorm before the blocks, weights stored [in, out]."""

from __future__ import annotations

import torch
from torch import nn

from quire.config.model import ModelConfig
from quire.layers.activation import activation
from quire.layers.attention.layer import QKV, Attention, StepContext
from quire.layers.decoder import NumberedLayers
from quire.layers.embedding import Embedding, LMHead, VocabEmbedding
from quire.layers.linear import ColumnLinear, OutputLinear, QKVLinear, RowLinear
from quire.layers.norm import LayerNorm
from quire.layers.weights import Build
from quire.models.registry import CausalLM, WeightMap


def _attention_scale(config: ModelConfig, layer_index: int) -> float:
    scale = config.head_dim**-0.5 if config.raw.get("scale_attn_weights", True) else 1.0
    if config.raw.get("scale_attn_by_inverse_layer_idx", False):
        scale /= layer_index + 1
    return scale


class GPT2Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, build: Build) -> None:
        super().__init__()
        hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        self.c_attn = QKVLinear(
            hidden, head_dim, heads, config.num_kv_heads, True, build / "c_attn"
        )
        self.c_proj = OutputLinear(
            head_dim, heads, config.num_kv_heads, hidden, True, build / "c_proj"
        )
        self.attend = Attention(layer_index, _attention_scale(config, layer_index))

    def forward(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        return self.c_proj(self.attend(QKV(*self.c_attn(x)), step))


class GPT2MLP(nn.Module):
    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.c_fc = ColumnLinear(config.hidden_size, config.intermediate_size, True, build / "c_fc")
        self.activation = activation(config.hidden_act)
        self.c_proj = RowLinear(
            config.intermediate_size, config.hidden_size, True, build / "c_proj"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.activation(self.c_fc(x)))


class GPT2Block(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, build: Build) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.hidden_size, config.norm_eps, build / "ln_1")
        self.attn = GPT2Attention(config, layer_index, build / "attn")
        self.ln_2 = LayerNorm(config.hidden_size, config.norm_eps, build / "ln_2")
        self.mlp = GPT2MLP(config, build / "mlp")

    def forward(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), step)
        return x + self.mlp(self.ln_2(x))


class GPT2Model(nn.Module):
    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        hidden, stage = config.hidden_size, build.stage
        self.wte: VocabEmbedding | None = None
        if stage.has_embedding(config.tie_word_embeddings):
            self.wte = VocabEmbedding(config.vocab_size, hidden, build / "wte")
        if stage.is_first:
            self.wpe = Embedding(config.max_position_tokens, hidden, build / "wpe")
        self.h = NumberedLayers(
            {
                index: GPT2Block(config, index, build / f"h.{index}")
                for index in stage.layers(config.num_layers)
            }
        )
        self.ln_f = LayerNorm(hidden, config.norm_eps, build / "ln_f") if stage.is_last else None

    def forward(self, step: StepContext) -> torch.Tensor:
        x = step.hidden
        if x is None:
            x = step.embed(self.wte) + self.wpe(step.positions)
        for block in self.h:
            x = block(x, step)
        return x if self.ln_f is None else self.ln_f(x)


def _rename(name: str) -> str:
    known = name.startswith(("transformer.", "lm_head."))
    return name if known else f"transformer.{name}"


class GPT2LMHeadModel(CausalLM):
    weight_map = WeightMap(
        rename=_rename,
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        ignored=(".attn.bias", ".attn.masked_bias"),
        embedding="transformer.wte.weight",
    )

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        self.transformer = GPT2Model(config, build / "transformer")
        tied = self.transformer.wte if config.tie_word_embeddings else None
        if build.stage.is_last:
            self.lm_head = LMHead(config.vocab_size, config.hidden_size, build / "lm_head", tied)

    def forward(self, step: StepContext) -> torch.Tensor:
        return self.transformer(step)
