"""What the GPU benchmarks share: model shapes, the engine under test, tables and JSON."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quire

if TYPE_CHECKING:
    from quire import LLM

BYTES_PER_ELEMENT = 2
"""Weights and cache are in bfloat16, if nothing else is said."""


@dataclass(frozen=True)
class Sparse:
    """Experts of a model, and what its configuration says beside sizes."""

    count: int
    top_k: int
    width: int
    others: dict[str, Any]


@dataclass(frozen=True)
class Quantized:
    """How the linear layers of a model are stored, but for its head."""

    config: dict[str, Any]
    """`quantization_config`."""
    dtype: str
    """Of the rest."""
    bytes_per_weight: float
    speed: int = 1
    """Of products of large batches, next to those in 16 bits."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a published model; its weights are random."""

    model_type: str
    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool
    eos: int
    sparse: Sparse | None = None
    quantized: Quantized | None = None

    def config(self) -> dict[str, Any]:
        """As config.json has it."""
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "torch_dtype": "bfloat16" if self.quantized is None else self.quantized.dtype,
            "hidden_act": "silu",
            "attention_bias": False,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "eos_token_id": self.eos,
            **({} if self.sparse is None else self.sparse.others),
            **({} if self.quantized is None else {"quantization_config": self.quantized.config}),
        }

    @property
    def num_sparse(self) -> int:
        """Layers with experts."""
        return self.layers - self._num_dense

    @property
    def _num_dense(self) -> int:
        if self.sparse is None:
            return self.layers
        return int(self.sparse.others.get("first_k_dense_replace", 0))

    @property
    def _latent(self) -> dict[str, int] | None:
        others = {} if self.sparse is None else self.sparse.others
        if "kv_lora_rank" not in others:
            return None
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {name: others[name] for name in names}

    def linears(self) -> dict[str, tuple[int, int, int]]:
        """The linear layers as (outputs, inputs, how many of them), less those of experts that
        tokens choose."""
        return {
            **(self._attention_linears() if self._latent is None else self._latent_linears()),
            "gate and up": (2 * self.inner, self.hidden, self._num_dense),
            "down": (self.hidden, self.inner, self._num_dense),
            **self._sparse_linears(),
            "head": (self.vocab, self.hidden, 1),
        }

    def _attention_linears(self) -> dict[str, tuple[int, int, int]]:
        width = self.heads * self.head_dim
        return {
            "qkv": (width + 2 * self.kv_heads * self.head_dim, self.hidden, self.layers),
            "output": (self.hidden, width, self.layers),
        }

    def _latent_linears(self) -> dict[str, tuple[int, int, int]]:
        """Of latents that are attended to as they are: their expansion goes into queries and
        results."""
        assert self._latent is not None
        rank, nope, rope, value = self._latent.values()
        return {
            "q": (self.heads * (nope + rope), self.hidden, self.layers),
            "latents": (rank + rope, self.hidden, self.layers),
            "expansion": (self.heads * (nope + value), rank, self.layers),
            "output": (self.hidden, self.heads * value, self.layers),
        }

    def _sparse_linears(self) -> dict[str, tuple[int, int, int]]:
        if self.sparse is None:
            return {}
        shared = self.sparse.width * self.sparse.others.get("n_shared_experts", 0)
        return {
            "router": (self.sparse.count, self.hidden, self.num_sparse),
            "shared gate and up": (2 * shared, self.hidden, self.num_sparse),
            "shared down": (self.hidden, shared, self.num_sparse),
        }

    def bytes_per_weight(self, layer: str) -> float:
        """Of one of `linears`."""
        if self.quantized is None or layer == "head":
            return BYTES_PER_ELEMENT
        return self.quantized.bytes_per_weight

    def speed(self, layer: str) -> int:
        """Of its products of large batches, next to those in 16 bits."""
        return 1 if self.quantized is None or layer == "head" else self.quantized.speed

    @property
    def linear_bytes(self) -> float:
        """All weights that a step multiplies with, less those of experts that tokens choose."""
        return sum(
            self.bytes_per_weight(layer) * outputs * inputs * count
            for layer, (outputs, inputs, count) in self.linears().items()
        )

    @property
    def expert_weights(self) -> int:
        """Of one expert."""
        return 0 if self.sparse is None else 3 * self.hidden * self.sparse.width

    @property
    def kv_bytes_per_token(self) -> int:
        numbers = 2 * self.kv_heads * self.head_dim
        if self._latent is not None:
            numbers = self._latent["kv_lora_rank"] + self._latent["qk_rope_head_dim"]
        return BYTES_PER_ELEMENT * self.layers * numbers


SHAPES = {
    "llama-8b": Shape(
        model_type="llama",
        architecture="LlamaForCausalLM",
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        inner=14336,
        vocab=128256,
        max_positions=8192,
        rope_theta=500000.0,
        norm_eps=1e-5,
        tied=False,
        eos=128001,
    ),
    "qwen3-0.6b": Shape(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        hidden=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        inner=3072,
        vocab=151936,
        max_positions=40960,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        tied=True,
        eos=151645,
    ),
}
"""Dense models."""

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_INT4 = {"bits": 4, "group_size": 128}
QUANTIZED_SHAPES = {
    f"llama-8b-{name}": replace(SHAPES["llama-8b"], quantized=quantized)
    for name, quantized in {
        "fp8": Quantized(_FP8, "bfloat16", 1.0, 2),
        "fp8block": Quantized({**_FP8, "weight_block_size": [128, 128]}, "bfloat16", 1.0, 2),
        "gptq": Quantized(
            {**_INT4, "quant_method": "gptq", "desc_act": False, "sym": True},
            "float16",
            0.5 + 2 / 128,
        ),
        "awq": Quantized(
            {**_INT4, "quant_method": "awq", "zero_point": True, "version": "gemm"},
            "float16",
            0.5 + 3 / 128,
        ),
    }.items()
}
"""Dense models from quantised checkpoints."""

SPARSE_SHAPES = {
    "qwen3-30b-a3b": Shape(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        inner=6144,
        vocab=151936,
        max_positions=40960,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        tied=False,
        eos=151645,
        sparse=Sparse(
            128,
            8,
            768,
            {
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
        ),
    ),
    "deepseek-v2-lite": Shape(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        hidden=2048,
        layers=27,
        heads=16,
        kv_heads=16,
        head_dim=64,
        inner=10944,
        vocab=102400,
        max_positions=163840,
        rope_theta=10000.0,
        norm_eps=1e-6,
        tied=False,
        eos=100001,
        sparse=Sparse(
            64,
            6,
            1408,
            {
                "n_routed_experts": 64,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 1408,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
                "norm_topk_prob": False,
                "topk_method": "greedy",
                "n_group": 1,
                "topk_group": 1,
                "routed_scaling_factor": 1.0,
                "q_lora_rank": None,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 0.707,
                    "mscale_all_dim": 0.707,
                    "original_max_position_embeddings": 4096,
                },
            },
        ),
    ),
}
"""Mixtures of experts."""

ENGINE_OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 4096,
    "max_num_seqs": 1024,
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": True,
}


def start_engine(model: str, **options: Any) -> LLM:
    """An engine with random weights of the named shape."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps((SHAPES | QUANTIZED_SHAPES | SPARSE_SHAPES)[model].config())
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        return quire.LLM(model=folder, **{**ENGINE_OPTIONS, **options})


def require_gpu() -> None:
    """End with a message where there is nothing to measure."""
    import torch

    if not torch.cuda.is_available():
        script = Path(sys.argv[0]).name
        raise SystemExit(f"{script}: needs a GPU, and torch {torch.__version__} finds none here.")


def circumstances() -> dict[str, str]:
    """Where figures come from."""
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "quire": quire.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_json(path: str | None, figures: dict[str, Any]) -> None:
    """Write the figures and where they come from, if a file was asked for."""
    if path is not None:
        text = json.dumps({**circumstances(), **figures}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")


def say(text: str) -> None:
    print(text, flush=True)
