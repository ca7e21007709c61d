"""References for what happens to QKV before attention: normalisation and rotation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32. A weight in float32
    multiplies before the result is rounded to the type of x, others after that."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (wide * scale * weight).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates the first dimensions of [T, heads, head_dim] by angles [T, 1, rotary_dim / 2].

    Element i of their first half makes a pair with element i of the second, or neighbours do where
    `interleaved`. Dimensions behind them stay.
    """
    half = cos.shape[-1]
    rotated, rest = x.float().split((2 * half, x.shape[-1] - 2 * half), dim=-1)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    first, second = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        rotated = torch.stack((first, second), dim=-1).flatten(-2)
    else:
        rotated = torch.cat((first, second), dim=-1)
    return torch.cat((rotated, rest), dim=-1).to(x.dtype)
