"""Fusion: layers of a loaded model are replaced by ones that do the same in fewer calls."""

from __future__ import annotations

from torch import nn

from quire.layers.decoder import DecoderLayers, FusedLayers, LayerParts
from quire.models.llama import LlamaAttention, LlamaLayer, LlamaMLP
from quire.models.registry import CausalLM


def fuse(model: CausalLM) -> None:
    """Replaces all `DecoderLayers` whose layers are known, once their weights are loaded."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is DecoderLayers:
                parts = [layer_parts(layer) for layer in child]
                known = [one for one in parts if one is not None]
                if known and len(known) == len(parts):
                    setattr(module, name, FusedLayers(child, known))


def layer_parts(layer: nn.Module) -> LayerParts | None:
    """What a layer is made of; None where it is of another class, and so may do something else."""
    if type(layer) is not LlamaLayer:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not LlamaAttention or type(mlp) is not LlamaMLP:
        return None
    if not attention.rotates:
        return None
    return LayerParts(
        attention_norm=layer.input_layernorm,
        qkv=attention.qkv_proj,
        qk_norms=attention.qk_norms,
        attend=attention.attend,
        output=attention.o_proj,
        network_norm=layer.post_attention_layernorm,
        gate_up=mlp.gate_up_proj,
        activation=mlp.activation,
        down=mlp.down_proj,
    )
