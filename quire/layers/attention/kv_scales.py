"""Scales that a checkpoint prescribes for keys and values in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quire.layers.attention.layer import Attention
from quire.layers.parallel import HeadShare
from quire.layers.weights import TensorError

KEYS, VALUES = 0, 1
PARTS: Mapping[str, tuple[int, ...]] = {
    "k_scale": (KEYS,),
    "v_scale": (VALUES,),
    "kv_scale": (KEYS, VALUES),
    "k_proj.k_scale": (KEYS,),
    "v_proj.v_scale": (VALUES,),
    "k_proj.output_scale": (KEYS,),
    "v_proj.output_scale": (VALUES,),
    "q_scale": (),
    "q_proj.output_scale": (),
    "prob_scale": (),
}
"""What names of tensors end with, behind the path of a model's attention. Queries and weights stay
as they are, so their scales are of no use. Zero points have these names too."""


def load_kv_scale(model: nn.Module, name: str, tensor: Tensor, num_kv_heads: int) -> bool:
    """Hands a tensor to the attention layer whose scale it is; False where it is none. Those of
    layers that are not in this stage are left out."""
    for ending, parts in PARTS.items():
        zero_ending = ending.replace("scale", "zero_point")
        path, found, rest = name.rpartition(f".{zero_ending}")
        if found and not rest:
            if parts and tensor.float().any():
                raise TensorError(
                    name,
                    "has zero points, which are supported for keys and values if they are 0",
                    "quantise the cache symmetrically, or remove the scales to have them computed",
                )
            return True
        path, found, rest = name.rpartition(f".{ending}")
        if not found or rest or path.endswith(("q_proj", "k_proj", "v_proj")):
            continue
        if parts:
            scales = _checked(name, tensor, num_kv_heads)
        for attention_path, module in model.named_modules():
            if isinstance(module, Attention) and attention_path.rpartition(".")[0] == path:
                for part in parts:
                    module.kv_scales[part] = scales
        return True
    return False


def _checked(name: str, tensor: Tensor, num_kv_heads: int) -> Tensor:
    scales = tensor.detach().float().flatten().cpu()
    if len(scales) not in (1, num_kv_heads):
        raise TensorError(
            name,
            f"has {len(scales)} scales; it can have one, or one for each of the {num_kv_heads} KV "
            "heads",
        )
    if not (scales.isfinite() & (scales > 0)).all():
        raise TensorError(
            name, f"is {scales.tolist()}; scales of the KV cache are positive numbers"
        )
    return scales


def given_kv_scales(
    model: nn.Module, kv_group: int, num_slots: int, heads: HeadShare, device: torch.device
) -> Tensor:
    """[slots, 2, KV heads of this rank] for the layers of a KV group, 0 where none are given."""
    given = torch.zeros(num_slots, 2, heads.kv_count)
    for module in model.modules():
        if isinstance(module, Attention) and module.kv_group == kv_group:
            for part, scales in module.kv_scales.items():
                own = scales[heads.kv_first :] if len(scales) > 1 else scales.expand(heads.kv_count)
                own = own[: heads.kv_count]
                given[module.layer_slot, part, : len(own)] = own
    return given.to(device)


def describe_kv_scales(model: nn.Module) -> str:
    """Where the scales of a cache in 8 bits come from."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    own = sum(len(layer.kv_scales) < 2 for layer in layers)
    if not own:
        return "scales of the checkpoint"
    if own == len(layers):
        return "one scale for each token and KV head"
    return f"scales of the checkpoint, but for {own} layers one for each token and KV head"
