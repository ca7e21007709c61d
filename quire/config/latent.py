"""What a model's configuration says of multi-head latent attention (MLA). No torch."""

from __future__ import annotations

from dataclasses import dataclass

from quire.files.json_file import CheckedValues

LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")
MAX_DIM = 1 << 16


@dataclass(frozen=True)
class LatentConfig:
    """Keys and values of all heads are made of one latent for each token, which is what the cache
    keeps, with the rotated part of the keys, which all heads share."""

    q_rank: int | None
    """Width of the latent that queries are made of; None: they are made of hidden states."""
    kv_rank: int
    nope_dim: int
    """Of a head's query and key, without the rotated part."""
    rope_dim: int
    value_dim: int

    @property
    def cached_dim(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def num_layer_weights(self, hidden_size: int, num_heads: int) -> int:
        """The large matrices of a layer's attention."""
        queries = num_heads * self.query_dim
        if self.q_rank is None:
            query_weights = hidden_size * queries
        else:
            query_weights = self.q_rank * (hidden_size + queries)
        expanded = self.kv_rank * num_heads * (self.nope_dim + self.value_dim)
        return (
            query_weights + hidden_size * (self.cached_dim + num_heads * self.value_dim) + expanded
        )


def read_latent(values: CheckedValues, model_type: str) -> LatentConfig | None:
    """None for families whose heads have keys and values of their own."""
    if model_type not in LATENT_FAMILIES:
        return None
    has_rank = "q_lora_rank" not in values.values or values.values["q_lora_rank"] is not None
    config = LatentConfig(
        values.count("q_lora_rank", 1536, MAX_DIM) if has_rank else None,
        values.count("kv_lora_rank", 512, MAX_DIM),
        values.count("qk_nope_head_dim", 128, MAX_DIM),
        values.count("qk_rope_head_dim", 64, MAX_DIM),
        values.count("v_head_dim", 128, MAX_DIM),
    )
    if config.rope_dim % 2:
        values.fail("qk_rope_head_dim", "an even number", config.rope_dim)
    if not values.boolean("rope_interleave", True):
        values.fail("rope_interleave", "true, as in all released checkpoints", False)
    return config
