"""`ModelConfig`: everything Quire must know about a model before it loads weights. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.config import embedded
from quire.config.eagle3 import EAGLE3, translate_eagle3
from quire.config.experts import ExpertsConfig, read_experts
from quire.config.gguf_model import translate_gguf
from quire.config.latent import LatentConfig, read_latent
from quire.config.locate import ModelSource, locate_model
from quire.config.options import ModelOptions
from quire.config.quantization import QuantizationConfig, read_quantization
from quire.files.gguf import GGUFFile
from quire.files.json_file import REPAIR, REQUIRED, CheckedValues, read_json_object
from quire.files.safetensors import FLOATS, tensor_infos
from quire.files.shards import weight_files
from quire.protocol.errors import ModelError, OptionError
from quire.protocol.kv_spec import ITEM_BYTES

SUPPORTED_ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Glm4ForCausalLM": "glm4",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GraniteMoeForCausalLM": "granitemoe",
    "GptOssForCausalLM": "gpt_oss",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "OPTForCausalLM": "opt",
    "GPT2LMHeadModel": "gpt2",
}
"""Architectures that Quire runs, and the module of `quire.models` that holds each."""
MTP_ARCHITECTURES = {
    "DeepseekV3ForCausalLM": "DeepseekV3MTP",
    "Glm4MoeForCausalLM": "Glm4MoeMTP",
}
"""What the layers behind the last of some architectures are, which predict further tokens."""
DRAFT_ARCHITECTURES = {EAGLE3: "eagle3", **dict.fromkeys(MTP_ARCHITECTURES.values(), "mtp")}
"""Heads that draft from a target's hidden states, and their modules."""
ROPE_FACTORS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""Numbers that each kind of rope scaling needs."""
SHAPE = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_tokens",
)
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM = 4096, 1 << 16, 1 << 16
MAX_POSITIONS = 1 << 25
"""The longest context of a published model has 10 million tokens."""
ALWAYS_TRIED = 1 << 24
"""Weights that are allocated without a look at the files: a missing tensor is then told by name."""
ALL_SLIDING = ("mistral", "mixtral", "phi3", "qwen3_moe")
"""Families whose layers all have the window, if there is one."""
ASKED_WINDOWS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
"""Families whose windows count if `use_sliding_window`."""
MIXED_WINDOWS = ("gemma2", "gemma3", "gpt_oss", "qwen2", "qwen2_moe", "qwen3", "smollm3")
"""Families in which some layers may have the window and others not."""
SLIDING, FULL = "sliding_attention", "full_attention"
"""Entries of `layer_types`."""
STRETCHED_ROPES = ("linear", "dynamic", "yarn")
"""Scalings whose `max_position_embeddings` is the length before scaling."""


@dataclass(frozen=True)
class ModelConfig:
    """One model: its place, its shape, its token ids."""

    source: ModelSource
    architecture: str
    """As in config.json, e.g. "LlamaForCausalLM"."""
    model_type: str
    """The module of `quire.models` that implements it, e.g. "llama"."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_tokens: int
    """Longest context the model's positions allow, rope scaling included."""
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """Always with the key `rope_type`; None where positions are not scaled."""
    tie_word_embeddings: bool
    sliding_window: int | None
    """Window of the layers that have one: see `layer_window`."""
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    dtype: str
    """As stored: bfloat16, float16 or float32."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None
    """What config.json, or a file beside it, says of quantised weights."""
    generation: dict[str, Any]
    """generation_config.json, empty if there is none."""
    raw: dict[str, Any]
    """config.json (or GGUF metadata under the same names) with overrides; rope settings are always
    in `rope_theta` and `rope_scaling`."""
    experts: ExpertsConfig | None = None
    """Of a mixture of experts."""
    latent: LatentConfig | None = None
    """Of latent attention: `num_kv_heads` is then 1, `head_dim` what the cache has of a token."""
    num_draft_layers: int = 0
    """Layers behind the last that predict further tokens (MTP)."""

    @property
    def rotary_dim(self) -> int:
        """The first dimensions of a head, which are rotated."""
        if self.latent is not None:
            return self.latent.rope_dim
        factor = self.raw.get("partial_rotary_factor", 1.0)
        return int(self.head_dim * factor)

    @property
    def num_weights(self) -> int:
        """The large matrices: attention, MLP and embeddings, a tied head counted once."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        is_gated = self.model_type not in ("opt", "gpt2")
        attention = self.hidden_size * heads
        if self.latent is not None:
            attention = self.latent.num_layer_weights(self.hidden_size, self.num_heads)
        network = self.hidden_size * (3 if is_gated else 2) * self.intermediate_size
        networks = self.num_layers * network
        if self.experts is not None:
            sparse = self.experts.num_layer_weights(self.hidden_size)
            networks += self.experts.num_sparse * (sparse - network)
        rows = self.vocab_size * (1 if self.tie_word_embeddings else 2)
        rows += 0 if is_gated else self.max_position_tokens
        return self.num_layers * attention + networks + rows * self.hidden_size

    def number(self, key: str, default: float) -> float:
        """A positive number that only some families have."""
        return self.values.number(key, default)

    @property
    def values(self) -> CheckedValues:
        """Checked access to `raw`, for what only some families have."""
        return CheckedValues(self.source.path / "config.json", self.raw)

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of one layer."""
        return self.sliding_window if self.slides(layer) else None

    def slides(self, layer: int) -> bool:
        """Whether a layer is of the kind that has a window, if the model has one."""
        kinds = self.raw.get("layer_types")
        return self.model_type in ALL_SLIDING or (kinds is not None and kinds[layer] == SLIDING)


@dataclass(frozen=True)
class _Family:
    """How one model type names its numbers, and what it takes for granted."""

    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str | None = "num_key_value_heads"
    intermediate: str = "intermediate_size"
    positions: str = "max_position_embeddings"
    default_positions: int = 2048
    eps: str = "rms_norm_eps"
    default_eps: float = 1e-6
    act: str = "hidden_act"
    default_act: str = "silu"
    head_dim: int | None = None
    """Used where config.json gives none; None means width / heads."""
    tied: bool = False
    theta: float = 10000.0
    bias: bool | str = False
    """Whether attention has biases, or the key that says so."""
    mlp_bias: bool | str = False
    partial_rotary: float | None = None
    """Share of a head that is rotated where config.json does not say; None: always all of it."""
    stretched: bool = True
    """Whether `max_position_embeddings` is the length before `STRETCHED_ROPES` scale it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What published files leave out."""


_FAMILIES = {
    "llama": _Family(bias="attention_bias", mlp_bias="mlp_bias"),
    "eagle3": _Family(bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": _Family(default_positions=131072),
    "qwen2": _Family(default_positions=32768, bias=True),
    "qwen3": _Family(default_positions=32768, bias="attention_bias", head_dim=128),
    "granite": _Family(bias="attention_bias", mlp_bias="mlp_bias"),
    "smollm3": _Family(
        default_positions=32768, bias="attention_bias", mlp_bias="mlp_bias", tied=True, theta=2e6
    ),
    "phi3": _Family(default_positions=4096, default_eps=1e-5, partial_rotary=1.0),
    "olmo2": _Family(default_eps=1e-5, bias="attention_bias"),
    "glm4": _Family(
        default_positions=131072,
        default_eps=1.5625e-7,
        head_dim=128,
        bias="attention_bias",
        partial_rotary=0.5,
        defaults={"attention_bias": True, "num_key_value_heads": 2},
    ),
    "gemma2": _Family(
        default_positions=8192,
        act="hidden_activation",
        default_act="gelu_pytorch_tanh",
        head_dim=256,
        tied=True,
        bias="attention_bias",
        defaults={
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
    ),
    "gemma3": _Family(
        default_positions=131072,
        act="hidden_activation",
        default_act="gelu_pytorch_tanh",
        head_dim=256,
        tied=True,
        theta=1e6,
        bias="attention_bias",
        stretched=False,
        defaults={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 4096,
        },
    ),
    "mixtral": _Family(default_positions=131072, default_eps=1e-5, theta=1e6),
    "qwen2_moe": _Family(default_positions=32768, bias="qkv_bias"),
    "qwen3_moe": _Family(default_positions=32768, bias="attention_bias"),
    "granitemoe": _Family(bias="attention_bias"),
    "gpt_oss": _Family(
        default_positions=131072,
        default_eps=1e-5,
        head_dim=64,
        theta=150000.0,
        bias="attention_bias",
        defaults={
            "attention_bias": True,
            "sliding_window": 128,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        },
    ),
    "glm4_moe": _Family(
        default_positions=131072, default_eps=1e-5, bias="attention_bias", partial_rotary=0.5
    ),
    "deepseek_v2": _Family(bias="attention_bias", mlp_bias="mlp_bias"),
    "deepseek_v3": _Family(default_positions=4096, bias="attention_bias"),
    "opt": _Family(
        kv_heads=None,
        intermediate="ffn_dim",
        eps="layer_norm_eps",
        default_eps=1e-5,
        act="activation_function",
        default_act="relu",
        tied=True,
        bias="enable_bias",
        mlp_bias="enable_bias",
    ),
    "gpt2": _Family(
        hidden="n_embd",
        layers="n_layer",
        heads="n_head",
        kv_heads=None,
        intermediate="n_inner",
        positions="n_positions",
        default_positions=1024,
        eps="layer_norm_epsilon",
        default_eps=1e-5,
        act="activation_function",
        default_act="gelu_new",
        tied=True,
        bias=True,
        mlp_bias=True,
    ),
}


def load_model_config(
    name: str | os.PathLike[str] | None,
    *,
    revision: str | None = None,
    token: str | None = None,
    hf_overrides: dict[str, Any] | None = None,
    load_format: str = "auto",
    download_dir: str | None = None,
    before_weights: Callable[[ModelConfig], None] | None = None,
) -> ModelConfig:
    """Find a model (None: the embedded one) and read its configuration; weights stay untouched.

    Where they have to be fetched, `before_weights` is called before that, and may refuse the
    model."""
    if hf_overrides is not None and not isinstance(hf_overrides, dict):
        raise OptionError(f"hf_overrides must be a dictionary, got {hf_overrides!r}.")

    def check(source: ModelSource) -> None:
        if before_weights is not None:
            before_weights(_read(source, hf_overrides))

    source = locate_model(
        name,
        revision=revision,
        token=token,
        load_format=load_format,
        download_dir=download_dir,
        before_weights=check,
    )
    config = _read(source, hf_overrides)
    if load_format != "dummy":
        check_size(config, _description(source))
    return config


def read_model(
    wanted: ModelOptions, before_weights: Callable[[ModelConfig], None] | None = None
) -> ModelConfig:
    """The configuration of the model that options name, as `load_model_config` reads it."""
    return load_model_config(
        wanted.model,
        revision=wanted.revision,
        token=wanted.hf_token,
        hf_overrides=wanted.hf_overrides,
        load_format=wanted.load_format,
        download_dir=wanted.download_dir,
        before_weights=before_weights,
    )


def _description(source: ModelSource) -> Path:
    """The file that describes a model."""
    return source.path if source.kind == "gguf" else source.path / "config.json"


def _read(source: ModelSource, hf_overrides: dict[str, Any] | None) -> ModelConfig:
    generation: dict[str, Any] = {}
    if source.is_embedded:
        generation = dict(embedded.GENERATION)
    file = _description(source)
    if source.kind == "gguf":
        raw = translate_gguf(GGUFFile(file))
    else:
        raw = translate_eagle3(file, read_json_object(file))
        if (source.path / "generation_config.json").is_file():
            generation = read_json_object(source.path / "generation_config.json")
    raw = {
        **_normalise_rope(file, _text_part(file, raw)),
        **_normalise_rope(file, hf_overrides or {}),
    }
    return _build(source, CheckedValues(file, raw), generation)


def check_size(config: ModelConfig, file: Path) -> None:
    """Refuse a shape that the weight files are far too small for, before memory is taken for it."""
    source = config.source
    files = [source.path] if source.kind == "gguf" else weight_files(source.path)
    stored = sum(path.stat().st_size for path in files)
    # One bit for each weight is less than any format takes.
    if stored and config.num_weights > max(8 * stored, ALWAYS_TRIED):
        shape = ", ".join(f"{name}={getattr(config, name)}" for name in SHAPE)
        raise ModelError(
            f"{file} describes a model of {config.num_weights} weights ({shape}), but its weight "
            f"files have {stored} bytes; {REPAIR}."
        )


def _build(source: ModelSource, values: CheckedValues, generation: dict[str, Any]) -> ModelConfig:
    architecture = _architecture(values)
    model_type = {**SUPPORTED_ARCHITECTURES, **DRAFT_ARCHITECTURES}[architecture]
    family = _FAMILIES[model_type]
    values = _with_defaults(values, family, model_type)
    hidden = values.count(family.hidden)
    latent = read_latent(values, model_type)
    if latent is None:
        num_heads, num_kv_heads, head_dim = _heads(values, family, model_type, hidden)
    else:
        num_heads, num_kv_heads = values.count(family.heads, maximum=MAX_HEADS), 1
        head_dim = latent.cached_dim
    rope_scaling = _rope_scaling(values, model_type, head_dim)
    # GPT-2 leaves its MLP width null to mean four times the model width.
    ffn_default = 4 * hidden if model_type == "gpt2" else REQUIRED
    folder = None if source.kind == "gguf" else source.path
    generated = CheckedValues(source.path / "generation_config.json", generation)
    bos = values.token_ids("bos_token_id") or generated.token_ids("bos_token_id")
    num_layers = values.count(family.layers, maximum=MAX_LAYERS)
    hidden_act = values.text(family.act, family.default_act)
    experts = read_experts(values, model_type, num_layers, hidden_act)
    if experts is not None and source.kind == "gguf":
        experts = replace(experts, alternates=False)  # gates and ups are tensors of their own there
    return ModelConfig(
        source=source,
        architecture=architecture,
        model_type=model_type,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=values.count(family.intermediate, ffn_default),
        vocab_size=values.count("vocab_size"),
        max_position_tokens=_max_positions(values, family, rope_scaling),
        norm_eps=values.number(family.eps, family.default_eps),
        rope_theta=values.number("rope_theta", family.theta),
        rope_scaling=rope_scaling,
        tie_word_embeddings=values.boolean("tie_word_embeddings", family.tied),
        sliding_window=_sliding_window(values, model_type),
        attention_bias=_bias(values, family.bias),
        mlp_bias=_bias(values, family.mlp_bias),
        hidden_act=hidden_act,
        experts=experts,
        latent=latent,
        num_draft_layers=_draft_layers(values),
        dtype=_dtype(values, folder),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=generated.token_ids("eos_token_id") or values.token_ids("eos_token_id"),
        quantization=read_quantization(values, folder),
        generation=generation,
        raw=values.values,
    )


def _architecture(values: CheckedValues) -> str:
    names = values.values.get("architectures")
    if names is None:
        model_type = values.text("model_type")
        names = [n for n, module in SUPPORTED_ARCHITECTURES.items() if module == model_type]
        names = names or [model_type]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        values.fail("architectures", "a list of names", names)
    for name in names:
        if name in SUPPORTED_ARCHITECTURES or name == EAGLE3:
            return str(name)
    raise ModelError(
        f"{values.file}: architecture {', '.join(names) or 'none'} is not supported; "
        f"Quire runs {', '.join(SUPPORTED_ARCHITECTURES)}."
    )


def _heads(
    values: CheckedValues, family: _Family, model_type: str, hidden: int
) -> tuple[int, int, int]:
    """Query heads, key/value heads and the size of a head."""
    num_heads = values.count(family.heads, maximum=MAX_HEADS)
    num_kv_heads = num_heads
    if family.kv_heads is not None:
        # Only the first Llama models left the key out.
        absent_is_error = (
            model_type not in ("llama", "eagle3") and family.kv_heads not in values.values
        )
        num_kv_heads = values.count(family.kv_heads, REQUIRED if absent_is_error else num_heads)
    if num_heads % num_kv_heads:
        values.fail(
            str(family.kv_heads), f"a divisor of {family.heads} ({num_heads})", num_kv_heads
        )
    head_dim = None
    if family.kv_heads:
        head_dim = values.integer("head_dim", family.head_dim, maximum=MAX_HEAD_DIM)
    if head_dim is None:
        if hidden % num_heads:
            values.fail(family.heads, f"a divisor of {family.hidden} ({hidden})", num_heads)
        head_dim = hidden // num_heads
    return num_heads, num_kv_heads, head_dim


def _normalise_rope(file: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Turn transformers 5's `rope_parameters` into `rope_theta` and `rope_scaling`."""
    raw = dict(raw)
    if raw.get("rope_parameters") is None:
        return raw
    checked = CheckedValues(file, raw)
    parameters = dict(checked.mapping("rope_parameters") or {})
    if SLIDING in parameters and FULL in parameters:
        parameters = _layer_ropes(checked, raw, parameters)
    if any(isinstance(value, dict) for value in parameters.values()):
        checked.fail("rope_parameters", "the same for all layers", parameters)
    del raw["rope_parameters"]
    if parameters.get("partial_rotary_factor") is not None:
        raw["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    theta = parameters.pop("rope_theta", None)
    if theta is not None:
        raw["rope_theta"] = theta
    raw["rope_scaling"] = parameters or None
    return raw


def _layer_ropes(
    checked: CheckedValues, raw: dict[str, Any], parameters: dict[str, Any]
) -> dict[str, Any]:
    """Gemma 3: a base of its own for layers with a window, which go into `rope_local_base_freq`."""
    local, parameters = parameters[SLIDING], parameters[FULL]
    if not isinstance(local, dict) or not isinstance(parameters, dict):
        checked.fail("rope_parameters", f"an object for {SLIDING} and {FULL}", raw)
    if local.get("rope_type", "default") != "default":
        checked.fail(f"rope_parameters[{SLIDING!r}]", "of rope_type default", local)
    if local.get("rope_theta") is not None:
        raw["rope_local_base_freq"] = local["rope_theta"]
    return dict(parameters)


def _text_part(file: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration that also has one of images."""
    text = CheckedValues(file, raw).mapping("text_config")
    if text is None:
        return raw
    outer = {key: value for key, value in raw.items() if not key.endswith("_config")}
    quantized = {key: raw[key] for key in ("quantization_config",) if key in raw}
    own = {key: value for key, value in text.items() if key not in ("architectures", "model_type")}
    return {**own, **outer, **quantized}


def _with_defaults(values: CheckedValues, family: _Family, model_type: str) -> CheckedValues:
    """With what the family takes for granted, the kind of each layer where there are several, and
    how much of a head rotates; refuses what its model has no code for."""
    given = values.values
    raw = {**family.defaults, **given}
    values = CheckedValues(values.file, raw)
    if model_type in MIXED_WINDOWS:
        raw["layer_types"] = _layer_types(values, family, model_type)
    share = values.number("partial_rotary_factor", family.partial_rotary or 1.0)
    if share > 1 or (share != 1 and family.partial_rotary is None):
        values.fail("partial_rotary_factor", "1.0, since whole heads are rotated", share)
    raw["partial_rotary_factor"] = share
    if values.boolean("use_bidirectional_attention", False):
        values.fail("use_bidirectional_attention", "false for a model that generates text", True)
    return values


def _layer_types(values: CheckedValues, family: _Family, model_type: str) -> list[str]:
    """`SLIDING` or `FULL` for each layer, as config.json says or its family has it."""
    num_layers = values.count(family.layers, maximum=MAX_LAYERS)
    kinds: list[str] | None = values.values.get("layer_types")
    if kinds is not None:
        is_list = isinstance(kinds, list) and len(kinds) >= num_layers
        if not is_list or not {SLIDING, FULL}.issuperset(kinds):
            values.fail("layer_types", f"{num_layers} times {SLIDING} or {FULL}", kinds)
        return kinds
    if model_type in ("gemma2", "gpt_oss"):
        slides = [layer % 2 == 0 for layer in range(num_layers)]
    elif model_type == "gemma3":
        pattern = values.count("sliding_window_pattern", 6)
        slides = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    elif model_type == "qwen2_moe":
        most = values.count("max_window_layers", 28)
        slides = [layer % 2 == 0 and layer < most for layer in range(num_layers)]
    elif model_type == "smollm3":
        slides = [not rotates for rotates in rotated_layers(values, num_layers)]
    else:
        first = values.values.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            values.fail("max_window_layers", "an integer", first)
        slides = [layer >= first for layer in range(num_layers)]
    return [SLIDING if one else FULL for one in slides]


def rotated_layers(values: CheckedValues, num_layers: int) -> list[bool]:
    """SmolLM3: `no_rope_layers` has a 1 for each layer that rotates; without it, every fourth does
    not."""
    listed = values.values.get("no_rope_layers")
    if listed is None:
        interval = values.count("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers:
        values.fail("no_rope_layers", f"a list of {num_layers} numbers", listed)
    return [bool(one) for one in listed]


def _rope_scaling(values: CheckedValues, model_type: str, head_dim: int) -> dict[str, Any] | None:
    scaling = values.mapping("rope_scaling")
    if not scaling:
        return None
    scaling = dict(scaling)
    kind = scaling.pop("type", None)
    kind = scaling.setdefault("rope_type", kind)
    if not isinstance(kind, str):
        values.fail("rope_scaling", "an object with a rope_type", scaling)
    if kind == "default":
        return None
    if model_type == "phi3" and kind in ("su", "yarn"):  # older names
        kind = scaling["rope_type"] = "longrope"
    if kind == "longrope":
        _check_longrope(values, scaling, head_dim)
        return scaling
    for key in ROPE_FACTORS.get(kind, ()):
        number: Any = scaling.get(key)
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not 0 < number <= sys.float_info.max:
            values.fail(f"rope_scaling[{key!r}]", f"a positive number for {kind}", number)
    return scaling


def _check_longrope(values: CheckedValues, scaling: dict[str, Any], head_dim: int) -> None:
    """A factor for each pair of dimensions, for contexts within the original length and beyond."""
    count = int(head_dim * values.number("partial_rotary_factor", 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        factors: Any = scaling.get(key)
        is_list = isinstance(factors, list) and len(factors) == count
        if not is_list or not all(type(one) in (int, float) and one > 0 for one in factors):
            values.fail(f"rope_scaling[{key!r}]", f"a list of {count} positive numbers", factors)
    if scaling.get("original_max_position_embeddings") is None:
        scaling["original_max_position_embeddings"] = values.count(
            "original_max_position_embeddings", 4096
        )


def _max_positions(
    values: CheckedValues, family: _Family, rope_scaling: dict[str, Any] | None
) -> int:
    positions = values.count(family.positions, family.default_positions, MAX_POSITIONS)
    if rope_scaling is None or not family.stretched:
        return positions
    if rope_scaling["rope_type"] not in STRETCHED_ROPES:
        return positions
    original = rope_scaling.get("original_max_position_embeddings", positions)
    is_number = isinstance(original, (int, float)) and not isinstance(original, bool)
    if not is_number or not 1 <= original <= MAX_POSITIONS:
        values.fail(
            "rope_scaling['original_max_position_embeddings']", "a positive integer", original
        )
    stretched = original * rope_scaling["factor"]
    if not stretched <= MAX_POSITIONS:
        values.fail(
            "rope_scaling['factor']",
            f"such that positions stay below {MAX_POSITIONS}",
            rope_scaling["factor"],
        )
    return max(positions, int(stretched))


def _sliding_window(values: CheckedValues, model_type: str) -> int | None:
    if model_type == "mistral":
        # Null means no window; a missing key means the window of the first Mistral.
        return values.integer("sliding_window", None if "sliding_window" in values.values else 4096)
    if model_type in ASKED_WINDOWS:
        has_windows = values.boolean("use_sliding_window", False)
    else:
        has_windows = model_type in ("mixtral", "phi3", "gemma2", "gemma3", "gpt_oss")
    if not has_windows or SLIDING not in values.values.get("layer_types", (SLIDING,)):
        return None
    return values.integer("sliding_window", None)


def _draft_layers(values: CheckedValues) -> int:
    key = "num_nextn_predict_layers"
    return 0 if values.values.get(key) in (None, 0) else values.count(key, maximum=MAX_LAYERS)


def _bias(values: CheckedValues, rule: bool | str) -> bool:
    if isinstance(rule, bool):
        return rule
    return values.boolean(rule, rule in ("enable_bias", "qkv_bias"))


def _dtype(values: CheckedValues, folder: Path | None) -> str:
    key = "dtype" if values.values.get("dtype") is not None else "torch_dtype"
    if values.values.get(key) is None:
        return _stored_dtype(folder)
    dtype = values.text(key).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        values.fail(key, f"one of {', '.join(sorted(ITEM_BYTES))}", dtype)
    return dtype


def _stored_dtype(folder: Path | None) -> str:
    """The type of most float weights in a folder's safetensors files, if there are any yet; what is
    wrong with a file is told where it is loaded."""
    sizes: dict[str, int] = {}
    for file in weight_files(folder) if folder is not None else ():
        if file.suffix != ".safetensors":
            continue
        with suppress(ModelError):
            for tensor in tensor_infos(file).values():
                if tensor.dtype in FLOATS:
                    sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.count
    return FLOATS[max(sizes, key=sizes.__getitem__, default="F32")]
