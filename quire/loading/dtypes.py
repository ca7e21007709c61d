"""torch's types of the floats that files name."""

from __future__ import annotations

import torch

from quire.files.safetensors import FLOATS

TORCH_FLOATS: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in FLOATS.items()
}
