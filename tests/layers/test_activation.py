"""Activation functions are those that transformers knows by the same names."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from quire.layers.activation import ACTIVATIONS, GatedActivation, activation
from quire.protocol.errors import ModelError


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_named_functions_match_transformers(name: str) -> None:
    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x), rtol=1e-5, atol=1e-6)


def test_gate_comes_first() -> None:
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.equal(GatedActivation("silu")(torch.cat((gate, up), -1)), expected)


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'mish'.*gelu_new"):
        activation("mish")
