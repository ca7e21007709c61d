"""Rotary angles against transformers for every scaling; the rotation against complex numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.kernels.torch.qkv import rotate
from quire.layers.rotary import Rotary
from quire.protocol.errors import ModelError

HEAD_DIM, POSITIONS, CPU = 64, 4096, torch.device("cpu")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
    "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_angles_match_transformers(scaling: dict, theta: float) -> None:
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    positions = torch.tensor([0, 1, 17, 1023, 1024, 4095])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = Rotary(HEAD_DIM, POSITIONS, theta, scaling, CPU)(positions).angles
    half = HEAD_DIM // 2
    torch.testing.assert_close(ours[0][:, 0], cos[0, :, :half], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(ours[1][:, 0], sin[0, :, :half], rtol=1e-6, atol=2e-6)


def test_rotation_is_multiplication_by_a_unit_complex_number() -> None:
    """Element i pairs with element i + head_dim / 2, as in Hugging Face checkpoints."""
    positions = torch.tensor([0, 3, 250])
    rotary = Rotary(8, 256, 10000.0, None, CPU)
    x = torch.randn(3, 2, 8)
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turns = torch.polar(torch.ones(3, 4).double(), positions[:, None] * frequencies)
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double()) * turns[:, None]
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)
    torch.testing.assert_close(
        rotate(x, *rotary(positions).angles).double(), expected, rtol=1e-4, atol=1e-4
    )
    assert rotate(x.bfloat16(), *rotary(positions).angles).dtype == torch.bfloat16


def test_unsupported_scaling_is_refused_by_name() -> None:
    for kind in ("dynamic", "longrope", "su"):
        with pytest.raises(ModelError, match=f"{kind!r}.*linear, llama3, yarn"):
            Rotary(8, 16, 10000.0, {"type": kind, "factor": 2.0}, CPU)


def test_incomplete_scaling_names_the_missing_key() -> None:
    with pytest.raises(ModelError, match="low_freq_factor"):
        Rotary(8, 16, 10000.0, {"rope_type": "llama3", "factor": 2.0}, CPU)
    with pytest.raises(ModelError, match=r"factor.*'2'"):
        Rotary(8, 16, 10000.0, {"rope_type": "linear", "factor": "2"}, CPU)
    with pytest.raises(ModelError, match=r"partial_rotary_factor=0\.5"):
        Rotary(8, 16, 10000.0, {"rope_type": "default", "partial_rotary_factor": 0.5}, CPU)
