"""What a model's configuration says of its experts. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from quire.files.json_file import CheckedValues

Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]
MAX_EXPERTS = 4096


@dataclass(frozen=True)
class ClampedGate:
    """gate * sigmoid(slope * gate) * (up + 1), for a gate of at most `limit` and an up between
    -limit and limit."""

    limit: float
    slope: float


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts of the sparse layers, and how tokens choose among them."""

    count: int
    top_k: int
    """Experts of a token."""
    intermediate_size: int
    """Width of one expert."""
    is_sparse: tuple[bool, ...]
    """Layer by layer; the others have a dense network."""
    scoring: Scoring = "softmax"
    """Of all experts before the choice, or of the chosen ones alone."""
    normalizes: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    factor: float = 1.0
    """What their weights are multiplied with."""
    num_groups: int = 1
    top_groups: int = 1
    """Groups that a token chooses its experts from."""
    shared_size: int = 0
    """Width of what all tokens pass beside the experts."""
    exact_router: bool = False
    """Whether the router's logits are float32, whatever the type of activations."""
    has_biases: bool = False
    """Of the router and of each expert."""
    gate: ClampedGate | None = None
    """None: silu(gate) * up."""
    alternates: bool = False
    """Whether checkpoints have the rows of gates and ups in turns."""

    @property
    def num_sparse(self) -> int:
        return sum(self.is_sparse)

    def num_layer_weights(self, hidden_size: int) -> int:
        """The large matrices of a sparse layer's network."""
        width = self.count * self.intermediate_size + self.shared_size
        return hidden_size * (3 * width + self.count)


def read_experts(
    values: CheckedValues, model_type: str, num_layers: int, hidden_act: str
) -> ExpertsConfig | None:
    """None for families without experts."""
    if model_type not in _READERS:
        return None
    config = _READERS[model_type](values, num_layers)
    if config.top_k > config.count:
        values.fail("num_experts_per_tok", f"at most {config.count}", config.top_k)
    if config.count % config.num_groups:
        values.fail("n_group", f"a divisor of {config.count}", config.num_groups)
    if config.top_groups > config.num_groups:
        values.fail("topk_group", f"at most {config.num_groups}", config.top_groups)
    in_groups = config.count // config.num_groups * config.top_groups
    if config.top_k > in_groups:
        values.fail("num_experts_per_tok", f"at most {in_groups}", config.top_k)
    if hidden_act not in ("silu", "swish"):
        values.fail("hidden_act", "silu, the only activation of experts", hidden_act)
    return config


def _mixtral(values: CheckedValues, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        _count(values, 8),
        values.count("num_experts_per_tok", 2),
        values.count("intermediate_size"),
        (True,) * num_layers,
    )


def _granitemoe(values: CheckedValues, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        _count(values, 8),
        values.count("num_experts_per_tok", 2),
        values.count("intermediate_size"),
        (True,) * num_layers,
        scoring="softmax_of_chosen",
    )


def _gpt_oss(values: CheckedValues, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        _count(values, 128),
        values.count("num_experts_per_tok", 4),
        values.count("intermediate_size"),
        (True,) * num_layers,
        scoring="softmax_of_chosen",
        has_biases=True,
        gate=ClampedGate(values.number("swiglu_limit", 7.0), values.number("swiglu_alpha", 1.702)),
        alternates=True,
    )


def _qwen2_moe(values: CheckedValues, num_layers: int) -> ExpertsConfig:
    shared = values.count("shared_expert_intermediate_size", 5632)
    return _qwen_moe(values, num_layers, _Qwen(60, 4, 1408, shared))


def _qwen3_moe(values: CheckedValues, num_layers: int) -> ExpertsConfig:
    return _qwen_moe(values, num_layers, _Qwen(128, 8, 768, 0))


@dataclass(frozen=True)
class _Qwen:
    """What is taken for granted where config.json says nothing."""

    count: int
    top_k: int
    width: int
    shared_size: int


def _qwen_moe(values: CheckedValues, num_layers: int, usual: _Qwen) -> ExpertsConfig:
    dense = values.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        values.fail("mlp_only_layers", "a list of layer numbers", dense)
    period = values.count("decoder_sparse_step", 1)
    sparse = (layer not in dense and (layer + 1) % period == 0 for layer in range(num_layers))
    return ExpertsConfig(
        _count(values, usual.count),
        values.count("num_experts_per_tok", usual.top_k),
        values.count("moe_intermediate_size", usual.width),
        tuple(sparse),
        normalizes=values.boolean("norm_topk_prob", False),
        shared_size=usual.shared_size,
    )


def _glm4_moe(values: CheckedValues, num_layers: int) -> ExpertsConfig:
    width = values.count("moe_intermediate_size", 1408)
    return ExpertsConfig(
        _count(values, 128),
        values.count("num_experts_per_tok", 8),
        width,
        _behind_dense_layers(values, num_layers, 1),
        "sigmoid",
        values.boolean("norm_topk_prob", True),
        values.number("routed_scaling_factor", 1.0),
        values.count("n_group", 1),
        values.count("topk_group", 1),
        values.count("n_shared_experts", 1) * width,
        exact_router=True,
    )


def _deepseek_v2(values: CheckedValues, num_layers: int) -> ExpertsConfig:
    method = values.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        values.fail("topk_method", "greedy or group_limited_greedy", method)
    _check_usual(values, {"scoring_func": "softmax", "moe_layer_freq": 1})
    # Without limits all groups are open.
    is_limited = method == "group_limited_greedy"
    return ExpertsConfig(
        _count(values, 64),
        values.count("num_experts_per_tok", 2),
        values.count("moe_intermediate_size", 1407),
        _behind_dense_layers(values, num_layers, 0),
        normalizes=values.boolean("norm_topk_prob", False),
        factor=values.number("routed_scaling_factor", 1.0),
        num_groups=values.count("n_group", 1) if is_limited else 1,
        top_groups=values.count("topk_group", 1) if is_limited else 1,
        shared_size=values.count("n_shared_experts", 2)
        * values.count("moe_intermediate_size", 1407),
        exact_router=True,
    )


def _deepseek_v3(values: CheckedValues, num_layers: int) -> ExpertsConfig:
    usual = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    _check_usual(values, usual)
    width = values.count("moe_intermediate_size", 2048)
    return ExpertsConfig(
        _count(values, 256),
        values.count("num_experts_per_tok", 8),
        width,
        _behind_dense_layers(values, num_layers, 3),
        "sigmoid",
        values.boolean("norm_topk_prob", True),
        values.number("routed_scaling_factor", 2.5),
        values.count("n_group", 8),
        values.count("topk_group", 4),
        values.count("n_shared_experts", 1) * width,
        exact_router=True,
    )


def _check_usual(values: CheckedValues, usual: Mapping[str, object]) -> None:
    """Refuses what would change a model's numbers, and no released checkpoint has."""
    for key, value in usual.items():
        found = values.values.get(key)
        if found is not None and found != value:
            values.fail(key, f"{value}, as in all released checkpoints", found)


def _behind_dense_layers(values: CheckedValues, num_layers: int, usual: int) -> tuple[bool, ...]:
    first = values.values.get("first_k_dense_replace", usual)
    if type(first) is not int or first < 0:
        values.fail("first_k_dense_replace", "a number of layers", first)
    return tuple(layer >= first for layer in range(num_layers))


def _count(values: CheckedValues, usual: int) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    key = next((name for name in names if name in values.values), names[0])
    return values.count(key, usual, MAX_EXPERTS)


_READERS: dict[str, Callable[[CheckedValues, int], ExpertsConfig]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "granitemoe": _granitemoe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
