"""Rotary positions: a precomputed table of angles, and the rotation of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quire.layers.attention.layer import Rotation
from quire.protocol.errors import ModelError

Scaling = Mapping[str, Any]


class Rotary(nn.Module):
    """cos and sin of every position's angles, in fp32, [max_positions, rotary_dim / 2] each."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        rotary_dim: int,
        max_positions: int,
        theta: float,
        scaling: Scaling | None,
        device: torch.device,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.interleaved = interleaved
        frequencies, magnitude = rotary_frequencies(rotary_dim, theta, scaling)
        if device.type == "meta":  # where sizes are counted: arithmetic imports torch's compiler
            cos, sin = torch.empty(2, max_positions, len(frequencies), device=device)
        else:
            # On a CPU, whose rounding all devices share.
            positions = torch.arange(max_positions, dtype=torch.float32)
            angles = positions.unsqueeze(1) * frequencies
            cos, sin = (angles.cos() * magnitude).to(device), (angles.sin() * magnitude).to(device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """The rotation of a step's tokens, made once for all layers."""
        return Rotation(self.cos, self.sin, positions, self.interleaved)


def rotary_frequencies(
    rotary_dim: int, theta: float, scaling: Scaling | None
) -> tuple[torch.Tensor, float]:
    """Radians per position, [rotary_dim / 2], and the factor on cos and sin.

    `scaling` is config.json's rope_scaling or rope_parameters. Formulas are those of transformers,
    in fp32 like there, since trained models carry that rounding.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / (theta**exponents)
    scaling = scaling or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "default":
        return frequencies, 1.0
    if kind not in _SCALINGS:
        raise ModelError(
            f"rope_scaling of type {kind!r} in config.json is not supported; supported are "
            f"default, {', '.join(sorted(_SCALINGS))}."
        )
    return _SCALINGS[kind](frequencies, theta, scaling)


def _number(scaling: Scaling, key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ModelError(
            f"rope_scaling in config.json needs {key}, a number above 0, got {value!r}."
        )
    return float(value)


def _linear(
    frequencies: torch.Tensor, theta: float, scaling: Scaling
) -> tuple[torch.Tensor, float]:
    """All positions are compressed by one factor."""
    return frequencies / _number(scaling, "factor"), 1.0


def _llama3(
    frequencies: torch.Tensor, theta: float, scaling: Scaling
) -> tuple[torch.Tensor, float]:
    """Long wavelengths are compressed, short ones kept, those between blended (Llama 3.1)."""
    factor = _number(scaling, "factor")
    low = _number(scaling, "low_freq_factor")
    high = _number(scaling, "high_freq_factor")
    context = _number(scaling, "original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    blend = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies, 1.0


def _yarn(frequencies: torch.Tensor, theta: float, scaling: Scaling) -> tuple[torch.Tensor, float]:
    """Compression ramps in over the dimensions, and attention is sharpened a little (YaRN)."""
    factor = _number(scaling, "factor")
    context = _number(scaling, "original_max_position_embeddings")
    head_dim = 2 * len(frequencies)

    def dimension_of(rotations: float) -> float:
        """The dimension that turns `rotations` times within the original context."""
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(_number(scaling, "beta_fast", 32))
    high = dimension_of(_number(scaling, "beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(len(frequencies)) - low) / width).clamp(0, 1)
    scaled = frequencies / factor * ramp + frequencies * (1 - ramp)
    return scaled, _yarn_magnitude(factor, scaling)


def _yarn_magnitude(factor: float, scaling: Scaling) -> float:
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return growth(_number(scaling, "mscale")) / growth(_number(scaling, "mscale_all_dim"))
    return growth(1.0)


def _longrope(
    frequencies: torch.Tensor, theta: float, scaling: Scaling
) -> tuple[torch.Tensor, float]:
    """A factor for each pair of dimensions, and others where sequences may be longer than the
    original length (Phi-3). The choice is made once, so that cached keys stay valid."""
    original = _number(scaling, "original_max_position_embeddings")
    is_long = _number(scaling, "max_model_len") > original
    factors = torch.tensor(scaling["long_factor" if is_long else "short_factor"])
    growth = _number(scaling, "max_position_embeddings") / original
    growth = _number(scaling, "factor", growth)
    magnitude = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    powers = theta ** (torch.arange(len(frequencies)) / len(frequencies))
    return 1.0 / (factors * powers), _number(scaling, "attention_factor", magnitude)


_SCALINGS: dict[str, Callable[[torch.Tensor, float, Scaling], tuple[torch.Tensor, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
