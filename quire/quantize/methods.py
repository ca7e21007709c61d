"""The formats of compressed-tensors that are written: how a matrix is rounded, stored under which
names, and described."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels.torch.quantize import to_fp8, to_groups, to_int8
from quire.kernels.torch.quantized_weights import GroupedWeights, QuantizedWeights, ScaledWeights
from quire.protocol.errors import OptionError

BITS = 4
GROUP_SIZES = (32, 64, 128)


class Method(ABC):
    """Rounds matrices [outputs, inputs] and says how they are stored."""

    name: str
    format: str
    group_size: int
    """Inputs that share a scale; 1 where all of an output do."""

    @abstractmethod
    def round(
        self, weight: Tensor, dtype: torch.dtype, search: bool, importance: Tensor | None = None
    ) -> QuantizedWeights:
        """Where the format has scales of 16 bits, they are of that `dtype`."""

    @abstractmethod
    def tensors(self, weights: QuantizedWeights) -> Iterator[tuple[str, Tensor]]:
        """What is stored of a matrix, by the names of parameters of its layer."""

    @abstractmethod
    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """What a matrix takes."""

    @abstractmethod
    def arguments(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """How weights, and inputs if they are, are quantised, for `config_groups`."""

    def config(self, exact: Sequence[str] = ()) -> dict[str, Any]:
        """`quantization_config` of config.json. Modules that are `exact` are not quantised, nor is
        the output head."""
        weights, inputs = self.arguments()
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", *exact],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def check_inputs(self, name: str, num_inputs: int) -> None:
        """Refuse a matrix that the format cannot hold."""
        if num_inputs % self.group_size:
            fitting = [size for size in GROUP_SIZES if num_inputs % size == 0]
            remedy = f"use --group-size {max(fitting)}" if fitting else "use --method fp8 or w8a8"
            raise OptionError(
                f"{name} has {num_inputs} inputs, which is no multiple of --group-size "
                f"{self.group_size}; {remedy}."
            )


class EightBits(Method):
    """A scale for each output; inputs are rounded alike, token by token."""

    def __init__(self, name: str) -> None:
        self.name, self.group_size = name, 1
        self.format = "float-quantized" if name == "fp8" else "int-quantized"

    def round(
        self, weight: Tensor, dtype: torch.dtype, search: bool, importance: Tensor | None = None
    ) -> QuantizedWeights:
        return to_fp8(weight) if self.name == "fp8" else to_int8(weight)

    def tensors(self, weights: QuantizedWeights) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(weights, ScaledWeights)
        yield "weight", weights.values
        yield "weight_scale", weights.scales[:, None]

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        return num_outputs * (num_inputs + 4)

    def arguments(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        common = {
            "num_bits": 8,
            "type": "float" if self.name == "fp8" else "int",
            "symmetric": True,
        }
        weights = {**common, "strategy": "channel", "dynamic": False}
        return weights, {**common, "strategy": "token", "dynamic": True}


class FourBits(Method):
    """Weights of 4 bits with a scale for each group of inputs, which are left as they are."""

    name, format = "w4a16", "pack-quantized"

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def round(
        self, weight: Tensor, dtype: torch.dtype, search: bool, importance: Tensor | None = None
    ) -> QuantizedWeights:
        return to_groups(
            weight, BITS, self.group_size, search, importance=importance, scale_dtype=dtype
        )

    def tensors(self, weights: QuantizedWeights) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(weights, GroupedWeights)
        yield "weight_packed", pack_nibbles(weights.codes)
        yield "weight_scale", weights.scales
        yield "weight_shape", torch.tensor(weights.shape)

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        return num_outputs * (num_inputs // 2 + 2 * (num_inputs // self.group_size))

    def arguments(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        weights = {
            "num_bits": BITS,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": self.group_size,
            "dynamic": False,
        }
        return weights, None


def pack_nibbles(codes: Tensor) -> Tensor:
    """int32 [outputs, inputs / 8], eight codes in each, the first in the lowest bits."""
    eights = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)).unflatten(1, (-1, 8))
    packed = torch.zeros(eights.shape[:2], dtype=torch.int32, device=codes.device)
    for place in range(8):
        packed |= eights[..., place].int() << (BITS * place)
    return packed


def make_method(name: str, group_size: int | None) -> Method:
    if name in ("fp8", "w8a8"):
        if group_size is not None:
            raise OptionError(
                f"--group-size {group_size} is for --method w4a16: {name} has one scale for each "
                "output; leave --group-size out."
            )
        return EightBits(name)
    if name != "w4a16":
        raise OptionError(f"--method must be fp8, w8a8 or w4a16, got {name!r}.")
    size = 128 if group_size is None else group_size
    if size not in GROUP_SIZES:
        raise OptionError(f"--group-size must be one of {GROUP_SIZES}, got {size}.")
    return FourBits(size)
