"""The tensors of an adapter, one entry for each module whatever the layout of its file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quire.files.adapter import AdapterFile, AdapterModule, ExpertPart, Part
from quire.files.tensor_places import TensorPlace, opened, read_exactly, shown
from quire.loading.dtypes import TORCH_FLOATS
from quire.protocol.errors import AdapterError


@dataclass(frozen=True)
class LoraWeights:
    """What an adapter does to one module, in the types of its file:
    y = W x + scaling (B A x + bias). Of an embedding, x is the number of a column of A."""

    a: Tensor | None = None
    """[r, inputs]; None, as is `b`, where weight or bias are only replaced."""
    b: Tensor | None = None
    """[outputs, r], not scaled."""
    scaling: float = 1.0
    bias: Tensor | None = None
    """[outputs], not scaled: the one of B (`lora_bias`)."""
    magnitude: Tensor | None = None
    """[outputs]: DoRA."""
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    """What takes the place of the base's own "weight" or "bias"."""


def load_adapter(file: AdapterFile, *, alternates: bool = False) -> dict[str, LoraWeights]:
    """All modules by path. `alternates` is the base's: whether a joined tensor of gates and ups has
    their rows in turns (`ExpertsConfig.alternates`).

    The content must still be that which was hashed, and finite.
    """
    return _modules(file, _read(file), alternates)


def adapter_shapes(file: AdapterFile, *, alternates: bool = False) -> dict[str, LoraWeights]:
    """The same on the meta device: what a base can be compared with before anything is read."""
    tensors = {
        name: torch.empty(place.shape, dtype=TORCH_FLOATS[place.dtype], device="meta")
        for name, place in file.places.items()
    }
    return _modules(file, tensors, alternates)


def _modules(
    file: AdapterFile, tensors: Mapping[str, Tensor], alternates: bool
) -> dict[str, LoraWeights]:
    stacks = _Stacks(tensors)
    return {
        path: _weights(module, tensors)
        if module.expert is None
        else stacks.weights(module, module.expert, alternates)
        for path, module in file.modules.items()
    }


def _read(file: AdapterFile) -> dict[str, Tensor]:
    path, tensors = Path(file.file), {}
    with opened(path) as stream:
        for name, place in file.places.items():
            tensor = torch.empty(place.shape, dtype=TORCH_FLOATS[place.dtype])
            data = tensor.flatten().view(torch.uint8).numpy().data
            read_exactly(stream, path, place.start, data)
            if hashlib.sha256(data).hexdigest() != file.hashes[name]:
                raise AdapterError(
                    f"{path} was changed while it was loaded; load the adapter when it is written "
                    "completely."
                )
            _check_finite(path, name, place, tensor)
            tensors[name] = tensor
    return tensors


def _check_finite(path: Path, name: str, place: TensorPlace, tensor: Tensor) -> None:
    if not torch.isfinite(tensor).all():
        count = int((~torch.isfinite(tensor)).sum())
        raise AdapterError(
            f"{path}: tensor {shown(name)} ({place}) has {count} numbers that are NaN or infinite; "
            "save the adapter again from a training run that did not diverge."
        )


def _weights(module: AdapterModule, tensors: Mapping[str, Tensor]) -> LoraWeights:
    found = {part: tensors[name] for part, name in module.tensors.items()}
    return LoraWeights(
        found.get("a"),
        found.get("b"),
        module.scaling,
        found.get("bias"),
        found.get("magnitude"),
        {
            own: found[part]
            for own, part in (("weight", "saved_weight"), ("bias", "saved_bias"))
            if part in found
        },
    )


class _Stacks:
    """Tensors of all experts of a layer, taken apart once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._taken: dict[str, Tensor] = {}

    def weights(self, module: AdapterModule, expert: ExpertPart, alternates: bool) -> LoraWeights:
        rows = self._of("a", module, expert)  # [r, inputs]
        columns = self._of("b", module, expert)  # [outputs, r]
        a, b = (columns.mT, rows.mT) if expert.is_swapped else (rows, columns)
        if expert.half is not None:
            count = len(b) // 2
            first = expert.half * count
            b = b[expert.half :: 2] if alternates else b[first : first + count]
        return LoraWeights(a.contiguous(), b.contiguous(), module.scaling)

    def _of(self, part: Part, module: AdapterModule, expert: ExpertPart) -> Tensor:
        """One expert's A or B. A has the rows of an expert together; in the columns of B experts
        take turns."""
        name = module.tensors[part]
        if name not in self._taken:
            stored = self._tensors[name]
            if part == "a":
                apart = stored.view(expert.count, -1, stored.shape[1])
            else:
                by_rank = stored.view(len(stored), -1, expert.count)
                apart = by_rank.permute(2, 0, 1).contiguous()
            self._taken[name] = apart
        return self._taken[name][expert.index]
