"""EAGLE-3: a layer over the token's embedding and residual streams of the target, side by side."""

from __future__ import annotations

import torch

from quire.config.eagle3 import Eagle3Config
from quire.config.model import ModelConfig
from quire.layers.attention.layer import Rotation, StepContext
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import Linear, QKVLinear
from quire.layers.norm import RMSNorm
from quire.layers.weights import Build, WeightedLayer, whole
from quire.models.draft_head import DraftHead
from quire.models.llama import (
    AttentionTraits,
    LlamaAttention,
    LlamaForCausalLM,
    LlamaLayer,
    make_rotary,
)
from quire.models.registry import WeightMap
from quire.protocol.errors import ModelError


class Eagle3Attention(LlamaAttention):
    """Reads the normalised embedding and hidden state side by side."""

    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__(config, layer_index, traits, build)
        self.qkv_proj = QKVLinear(
            2 * config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            traits.qkv_bias,
            build / "qkv_proj",
        )


class Eagle3Layer(LlamaLayer):
    attention_class = Eagle3Attention

    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__(config, layer_index, traits, build)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps, build / "hidden_norm")
        self.norm_before_residual = Eagle3Config.of(config.values).norm_before_residual

    def decode(
        self, embedded: torch.Tensor, x: torch.Tensor, rotation: Rotation, step: StepContext
    ) -> torch.Tensor:
        normal = self.hidden_norm(x)
        inputs = torch.cat((self.input_layernorm(embedded), normal), dim=-1)
        residual = normal if self.norm_before_residual else x
        x = residual + self.self_attn(inputs, rotation, step)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftVocabulary(WeightedLayer):
    """Which tokens of the target those of the head are: d2t[i] + i."""

    d2t: torch.Tensor

    def __init__(self, size: int, target_size: int, build: Build) -> None:
        super().__init__(build)
        self.target_size = target_size
        self.add_weight("d2t", (whole(size),), build, torch.int64)

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.zero_()

    def finish_loading(self) -> None:
        ids = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.target_size):
            raise ModelError(
                f"d2t of an EAGLE-3 head names tokens from {int(ids.min())} to {int(ids.max())}, "
                f"but the vocabulary has {self.target_size}; check that its files belong together."
            )
        self.d2t.copy_(ids)

    @property
    def target_ids(self) -> torch.Tensor:
        return self.d2t


def _rename(name: str) -> str:
    """SafeAILab's names stand for those of speculators too."""
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    return "vocabulary.d2t" if name == "d2t" else name


def _as_stored(name: str) -> str:
    return "d2t" if name == "vocabulary.d2t" else name


class Eagle3LlamaForCausalLM(DraftHead):
    weight_map = WeightMap(
        fused=LlamaForCausalLM.weight_map.fused,
        rename=_rename,
        as_stored=_as_stored,
        ignored=("rotary_emb.inv_freq", "t2d", "vocabulary.d2t"),
        embedding="embed_tokens.weight",
    )

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        eagle, hidden = Eagle3Config.of(config.values), config.hidden_size
        num_streams = len(eagle.layers_of(0))
        inputs = whole(num_streams * eagle.target_hidden_size)
        self.fc = Linear(inputs, whole(hidden), False, build / "fc")
        self.embed_tokens: VocabEmbedding | None = None
        if config.values.boolean("has_own_embedding", False):
            self.embed_tokens = VocabEmbedding(config.vocab_size, hidden, build / "embed_tokens")
        traits = AttentionTraits(config.attention_bias, config.attention_bias)
        self.rotary = make_rotary(config, build)
        self.midlayer = Eagle3Layer(config, 0, traits, build / "midlayer")
        self.norm = RMSNorm(hidden, config.norm_eps, build / "norm")
        self.lm_head = LMHead(eagle.draft_vocab_size, hidden, build / "lm_head")
        self.vocabulary: DraftVocabulary | None = None
        if eagle.draft_vocab_size < config.vocab_size:
            self.vocabulary = DraftVocabulary(
                eagle.draft_vocab_size, config.vocab_size, build / "vocabulary"
            )
        self.vocab_size = config.vocab_size

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens(token_ids)
        return super().embed(token_ids)

    def combine(self, streams: torch.Tensor) -> torch.Tensor:
        return self.fc(streams)

    def forward(self, step: StepContext) -> torch.Tensor:
        assert step.hidden is not None, "a head is given hidden states"
        embedded = step.embed(self.embed)
        return self.midlayer.decode(embedded, step.hidden, self.rotary(step.positions), step)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head.gather(self.logits(self.norm(hidden)))
        if self.vocabulary is None:
            return logits
        # No infinity: penalties may multiply it, and drafts would be no numbers.
        least = torch.finfo(logits.dtype).min / 2
        spread = logits.new_full((len(logits), self.vocab_size), least)
        spread[:, self.vocabulary.target_ids] = logits
        return spread
