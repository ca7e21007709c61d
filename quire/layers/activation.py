"""Activation functions by the names that model configurations use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels import dispatch
from quire.protocol.errors import ModelError

Activation = Callable[[torch.Tensor], torch.Tensor]

_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) of gates that are numbers of a token."""
    return dispatch.sigmoid(x)


def activation(name: str) -> Activation:
    """The function called `name` in a model's configuration."""
    if name not in ACTIVATIONS:
        raise ModelError(
            f"Activation function {name!r} (hidden_act or activation_function in config.json) is "
            f"not supported; supported are {', '.join(sorted(ACTIVATIONS))}."
        )
    return ACTIVATIONS[name]


class GatedActivation(nn.Module):
    """act(gate) * up, for gate and up joined in the last dimension."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.activation = activation(name)
        self.is_silu = self.activation is F.silu

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.is_silu:
            return dispatch.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up
