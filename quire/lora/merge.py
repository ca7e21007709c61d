"""`quire lora merge`: writes a model's weights with an adapter in them, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.config.gguf_model import translate_gguf
from quire.config.model import ModelConfig, load_model_config
from quire.files.adapter import STACKED, AdapterFile, Kind, canonical, listed, read_adapter
from quire.files.gguf import GGUFFile
from quire.files.json_file import read_json_object
from quire.loading.adapters import LoraWeights, load_adapter
from quire.loading.weights import iter_weights
from quire.models.registry import WeightMap, weight_map_of
from quire.protocol.errors import AdapterError, ModelError, OptionError
from quire.quantize.command import Progress, other_files
from quire.quantize.shards import DTYPES, ShardWriter

WRITTEN = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Summary:
    """What was written."""

    num_modules: int
    num_bytes: int
    is_untied: bool
    """Whether the output head, which was the embedding, has weights of its own now."""

    def line(self) -> str:
        untied = "; the output head has weights of its own now" if self.is_untied else ""
        return f"{self.num_modules} modules are merged, {self.num_bytes / 1e6:,.0f} MB{untied}."


def merge(
    base: str | None,
    adapter: str,
    out: str,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    progress: Progress = lambda line: None,
) -> Summary:
    """Writes the folder `out`. All that can be refused is refused before it is made; config.json
    comes last, so that a folder that has one is whole."""
    if dtype != "auto" and dtype not in WRITTEN:
        raise OptionError(f"--dtype must be auto, {', '.join(WRITTEN)}, got {dtype!r}.")
    folder = Path(out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"OUT {out!r} exists and is not an empty folder; give another name.")
    file = read_adapter(adapter, adapter)
    config = load_model_config(base, revision=revision)
    if config.quantization is not None:
        raise ModelError(
            f"model {config.source.name!r} is quantised (quantization_config in config.json), and "
            "merged weights would be rounded again; merge the adapter into the model that it was "
            "made from, then run `quire quantize`, or serve base and adapter without merging."
        )
    plan = _Plan(config, file, WRITTEN.get(dtype))
    plan.check_space(folder)
    files = other_files(config)
    folder.mkdir(parents=True, exist_ok=True)
    num_bytes = plan.write(folder, progress)
    for name, content in files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_text(content, encoding="utf-8")
    text = json.dumps(plan.config_json(), indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return Summary(len(file.modules), num_bytes, plan.is_untied)


@dataclass
class _Change:
    """What becomes of one tensor of the base."""

    own: str
    """The last part of its name: "weight", "bias"."""
    is_transposed: bool
    """Whether matrices are stored [inputs, outputs]."""
    by_part: dict[_Part, tuple[str, Kind]] = field(default_factory=dict)
    """Paths of the adapter's modules."""


_Part = tuple[int | None, int | None]
"""Of a tensor of all experts: (expert, half of a joined one); (None, None): all of a tensor."""
ALL: _Part = (None, None)


class _Plan:
    """What becomes of each tensor of a model."""

    def __init__(self, config: ModelConfig, file: AdapterFile, dtype: torch.dtype | None) -> None:
        self._config, self._file = config, file
        source = config.source
        if dtype is None and source.kind == "gguf":
            dtype = torch.float16 if config.dtype == "float16" else torch.bfloat16
        self._dtype = dtype
        self._weight_map: WeightMap = weight_map_of(config)
        self._alternates = config.experts is not None and config.experts.alternates
        self._weights = load_adapter(file, alternates=self._alternates)
        self._shapes = dict(self._names())
        modules = {name: name.removesuffix(".weight") for name in self._shapes}
        self._single = {
            canonical(module): name for name, module in modules.items() if module != name
        }
        """Tensors of one module each, by its path."""
        self._changes = self._find_changes()

    @property
    def is_untied(self) -> bool:
        weight_map = self._weight_map
        ends = {weight_map.embedding, weight_map.head}
        return self._config.tie_word_embeddings and bool(ends & self._changes.keys())

    def _names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the base's tensors, as the model has them. A tied head is one."""
        weight_map = self._weight_map
        for original, weight in iter_weights(self._config.source):
            yield weight_map.rename(original), tuple(weight.shape)
            if self._config.tie_word_embeddings and (
                weight_map.rename(original) == weight_map.embedding
            ):
                yield weight_map.head, tuple(weight.shape)

    def _find_changes(self) -> dict[str, _Change]:
        """By the names of the base's tensors; what does not fit them is an error."""
        changes: dict[str, _Change] = {}
        missing, misshapen = [], []
        for path, module in self._file.modules.items():
            weights = self._weights[path]
            own_path = self._weight_map.rename(f"{path}.weight").removesuffix(".weight")
            places = [] if weights.a is None else [self._place_of(own_path)]
            owns = {*weights.saved, *(["bias"] if weights.bias is not None else [])}
            places += [(f"{own_path}.{own}", ALL) for own in sorted(owns)]
            for name, part in places:
                shape = self._shapes.get(name)
                if shape is None:
                    missing.append(path)
                    continue
                is_transposed = name.endswith(self._weight_map.transposed or ("\0",))
                change = changes.setdefault(name, _Change(name.rpartition(".")[2], is_transposed))
                change.by_part[part] = path, module.kind
                if not self._fits(weights, module.kind, change, part, shape):
                    misshapen.append(f"{path} ({change.own} of the base: {list(shape)})")
        for problem, paths in (("the base lacks", missing), ("other sizes have", misshapen)):
            if paths:
                trained_on = f" ({self._file.base})" if self._file.base else ""
                raise AdapterError(
                    f"adapter {self._file.folder} does not fit model {self._config.source.name!r}: "
                    f"{problem} {listed(set(paths))}; give the base that it was trained on"
                    f"{trained_on}."
                )
        return changes

    def _fits(
        self,
        weights: LoraWeights,
        kind: Kind,
        change: _Change,
        part: _Part,
        shape: tuple[int, ...],
    ) -> bool:
        if change.own in weights.saved:
            return tuple(weights.saved[change.own].shape) == shape
        if change.own == "bias":
            return weights.bias is not None and tuple(weights.bias.shape) == shape
        assert weights.a is not None and weights.b is not None
        made = (len(weights.b), weights.a.shape[1])
        expert, half = part
        if (kind == "embedding") != change.is_transposed:
            made = (made[1], made[0])
        if expert is None:
            return made == shape
        count, *sizes = shape
        outputs = 1 if not change.is_transposed else 2
        if half is not None:
            sizes[outputs - 1] //= 2
        return expert < count and made == tuple(sizes)

    def _place_of(self, path: str) -> tuple[str, _Part]:
        """The tensor that holds a module's weight, and which part of it."""
        if path in self._single:
            return self._single[path], ALL
        parent, _, own = path.rpartition(".")
        root, _, index = parent.rpartition(".")
        if not (root.endswith(".experts") and index.isdigit()):
            return f"{path}.weight", ALL
        leaf = STACKED[0] if own in ("gate_proj", "up_proj") else own
        half = int(own == "up_proj") if leaf == STACKED[0] else None
        return f"{root}.{leaf}.weight", (int(index), half)

    def check_space(self, folder: Path) -> None:
        """Before anything is written."""
        needed = 0
        for original, weight in iter_weights(self._config.source):
            if self._is_written(original):
                stored = weight.dtype if isinstance(weight, Tensor) else torch.float32
                needed += prod(weight.shape) * (self._dtype or stored).itemsize
        existing = next(
            parent for parent in (folder, *folder.absolute().parents) if parent.exists()
        )
        free = shutil.disk_usage(existing).free
        if free < needed:
            raise OptionError(
                f"OUT {str(folder)!r} would take {needed:,} bytes, and {free:,} are free there; "
                "give a folder on another disk."
            )

    def write(self, folder: Path, progress: Progress) -> int:
        """One tensor after the other, none of which is kept; returns the bytes."""
        weight_map = self._weight_map
        writer = ShardWriter(folder, len(self._shapes) + 1)
        try:
            for number, (original, stored) in enumerate(iter_weights(self._config.source), 1):
                if not self._is_written(original):
                    continue
                name = weight_map.rename(original)
                progress(f"{number} of {len(self._shapes)}: {original}")
                weight = stored if isinstance(stored, Tensor) else stored[:, :]
                assert isinstance(weight, Tensor), "no blocks are kept"
                self._add(writer, original, weight, self._changes.get(name))
                if name == weight_map.embedding and self.is_untied:
                    head = weight_map.as_stored(weight_map.head)
                    self._add(writer, head, weight, self._changes.get(weight_map.head))
            writer.finish()
        except BaseException:
            writer.discard()
            raise
        return writer.num_bytes

    def _is_written(self, original: str) -> bool:
        """All but what no model reads, and the copy of a tied embedding."""
        name, weight_map = self._weight_map.rename(original), self._weight_map
        if name == weight_map.head and self._config.tie_word_embeddings:
            return False
        return not (name.endswith(weight_map.ignored) if weight_map.ignored else False)

    def _add(self, writer: ShardWriter, name: str, weight: Tensor, change: _Change | None) -> None:
        dtype = weight.dtype
        if self._dtype is not None and dtype.is_floating_point:
            dtype = self._dtype
        if dtype not in DTYPES:
            raise ModelError(
                f"{name} of {self._config.source.name} is of type {dtype}, which is not written; "
                "give --dtype."
            )
        writer.add(name, (weight if change is None else self._changed(weight, change)).to(dtype))

    def _changed(self, weight: Tensor, change: _Change) -> Tensor:
        """In float32, from a checkpoint's tensor and in its layout."""
        weight = weight.float()
        if change.is_transposed:
            weight = weight.mT
        if change.by_part.keys() == {ALL}:
            ((path, kind),) = change.by_part.values()
            weight = _merged(weight, self._weights[path], kind, change.own)
        else:
            weight = weight.clone()
            for part, (path, kind) in change.by_part.items():
                rows = self._rows(weight, part)
                rows.copy_(_merged(rows, self._weights[path], kind, change.own))
        return weight.mT if change.is_transposed else weight

    def _rows(self, stacked: Tensor, part: _Part) -> Tensor:
        """Those of one projection of one expert."""
        expert, half = part
        assert expert is not None
        matrix = stacked[expert]
        if half is None:
            return matrix
        return matrix[half::2] if self._alternates else matrix.chunk(2)[half]

    def config_json(self) -> dict[str, Any]:
        source = self._config.source
        if source.kind == "gguf":
            raw = translate_gguf(GGUFFile(source.path))
        else:
            raw = read_json_object(source.path / "config.json")
        if self._dtype is not None:
            raw.pop("torch_dtype", None)
            raw["dtype"] = str(self._dtype).removeprefix("torch.")
        if self.is_untied:
            raw["tie_word_embeddings"] = False
        return raw


def _merged(weight: Tensor, weights: LoraWeights, kind: Kind, own: str) -> Tensor:
    """The new weight [outputs, inputs] or bias of a module; of an embedding [inputs, outputs]."""
    if own in weights.saved:
        weight = weights.saved[own].float()
    if own == "bias":
        return weight if weights.bias is None else weight + weights.scaling * weights.bias.float()
    if weights.a is None or weights.b is None:
        return weight
    if kind == "embedding":
        weight = weight.mT
    weight = torch.addmm(weight, weights.b.float(), weights.a.float(), alpha=weights.scaling)
    if weights.magnitude is not None:
        norms = torch.linalg.vector_norm(weight, dim=1)
        weight *= (weights.magnitude.float() / norms)[:, None]
    return weight.mT if kind == "embedding" else weight
