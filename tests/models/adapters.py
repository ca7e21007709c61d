"""Random adapters as peft computes with them, and paged runs of ours with adapters."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quire.layers.lora import AdapterLayers
from tests.models.reference import PagedRun


@dataclass
class Weights:
    """What an adapter has for one module."""

    a: Tensor | None = None
    b: Tensor | None = None
    scaling: float = 1.0
    bias: Tensor | None = None
    magnitude: Tensor | None = None
    saved: dict[str, Tensor] = field(default_factory=dict)


FIELDS = {
    "lora_A": "a",
    "lora_B": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
}


def random_adapter(
    base: PreTrainedModel, seed: int, spread: float = 0.2, **settings: Any
) -> tuple[PreTrainedModel, dict[str, Weights]]:
    """peft's model with an adapter on a copy of `base`, and the adapter's weights by module."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            with torch.no_grad():
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
        elif "lora_" in name or "modules_to_save" in name or parameter.requires_grad:
            with torch.no_grad():
                parameter.normal_(0.0, spread, generator=generator)
    scalings = {
        name.removeprefix("base_model.model."): module.scaling["default"]
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    weights: dict[str, Weights] = {}
    for name, tensor in peft.get_peft_model_state_dict(model).items():
        name, tensor = name.removeprefix("base_model.model."), tensor.clone()
        found = re.fullmatch(r"(.*?)\.(lora_[A-Za-z_]+?)(\.weight|\.bias)?", name)
        if found is not None:
            path, kind, ending = found.groups()
            one = weights.setdefault(path, Weights(scaling=scalings[path]))
            setattr(one, "bias" if ending == ".bias" else FIELDS[kind], tensor)
        elif ".base_layer.weight" not in name:
            path, _, part = name.replace(".base_layer", "").rpartition(".")
            one = weights.setdefault(path, Weights(scaling=scalings.get(path, 1.0)))
            one.saved[part] = tensor
    return model, weights


class AdaptedRun(PagedRun):
    """Sequences that each use the adapter in a slot, or none (-1)."""

    def __init__(
        self, layers: AdapterLayers, slots: Sequence[int], *args: Any, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._layers, self._slots = layers, slots

    def on_step(self, work: dict[int, int]) -> None:
        slots = torch.tensor(
            [self._slots[index] for index, count in work.items() for _ in range(count)],
            dtype=torch.int32,
            device=self.device,
        )
        is_base = bool((slots < 0).all())
        self._layers.begin_step(None if is_base else slots, None if is_base else slots)


def place(layers: AdapterLayers, adapters: Sequence[Mapping[str, Weights]]) -> None:
    """Adapters in slots 0 and on, each in chunks from both ends of what is free."""
    free = list(range(len(layers.pool.chunks)))
    for slot, weights in enumerate(adapters):
        prepared = layers.prepare(weights)
        chunks = [free.pop(-1 if i % 2 else 0) for i in range(prepared.num_chunks)]
        layers.place(slot, chunks, prepared)
