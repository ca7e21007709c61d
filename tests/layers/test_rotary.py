"""Rotary angles against transformers for every scaling; the rotation against complex numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

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


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_part_of_each_head_rotates(interleaved: bool) -> None:
    """Pairs of neighbours, or of halves, in the first 6 of 10 dimensions; the others stay."""
    positions = torch.tensor([0, 3, 250])
    rotary = Rotary(6, 256, 10000.0, None, CPU, interleaved)
    x = torch.randn(3, 2, 10)
    found = rotate(x, *rotary(positions).angles, rotary(positions).interleaved)
    places = [(0, 1), (2, 3), (4, 5)] if interleaved else [(0, 3), (1, 4), (2, 5)]
    for pair, (a, b) in enumerate(places):
        turn = torch.polar(torch.ones(3).double(), positions.double() * 10000.0 ** (-2 * pair / 6))
        expected = torch.complex(x[..., a].double(), x[..., b].double()) * turn[:, None]
        torch.testing.assert_close(found[..., a].double(), expected.real, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[..., b].double(), expected.imag, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[..., 6:], x[..., 6:])


@pytest.mark.parametrize("length", [64, 512])
def test_longrope_matches_transformers(length: int) -> None:
    """Short factors up to the original length, long ones beyond it."""
    factors = {
        "short_factor": torch.linspace(1, 2, 24).tolist(),
        "long_factor": torch.linspace(2, 30, 24).tolist(),
    }
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors}
    config = Phi3Config(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters={**scaling, "rope_theta": 5000.0, "partial_rotary_factor": 0.75},
    )
    positions = torch.arange(length)
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    lengths = {"max_position_embeddings": 512, "max_model_len": length}
    ours = Rotary(48, 512, 5000.0, {**scaling, **lengths}, CPU)(positions).angles
    torch.testing.assert_close(ours[0][:, 0], cos[0, :, :24], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(ours[1][:, 0], sin[0, :, :24], rtol=1e-6, atol=2e-6)


def test_unsupported_scaling_is_refused_by_name() -> None:
    for kind in ("dynamic", "su"):
        with pytest.raises(ModelError, match=f"{kind!r}.*linear, llama3, longrope, yarn"):
            Rotary(8, 16, 10000.0, {"type": kind, "factor": 2.0}, CPU)


def test_incomplete_scaling_names_the_missing_key() -> None:
    with pytest.raises(ModelError, match="low_freq_factor"):
        Rotary(8, 16, 10000.0, {"rope_type": "llama3", "factor": 2.0}, CPU)
    with pytest.raises(ModelError, match=r"factor.*'2'"):
        Rotary(8, 16, 10000.0, {"rope_type": "linear", "factor": "2"}, CPU)
