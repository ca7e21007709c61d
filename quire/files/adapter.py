"""What an adapter's folder says, as peft writes it: which modules it changes, how, and by which
tensors of its file. No torch.

Everything that the tensors or the configuration have is understood or refused by name: an adapter
of which a part is left out computes something else than it was trained for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal, NoReturn, cast

from quire.files.json_file import ADAPTER, CheckedValues, read_json_object
from quire.files.patterns import match_patterns
from quire.files.tensor_places import (
    TensorPlace,
    opened,
    read_exactly,
    safetensors_places,
    shown,
)
from quire.files.torch_zip import torch_zip_places
from quire.protocol.errors import AdapterError

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
READERS = {
    "adapter_model.safetensors": safetensors_places,
    "adapter_model.bin": torch_zip_places,
}
Kind = Literal["linear", "embedding", "expert", "saved"]
Part = Literal["a", "b", "bias", "magnitude", "saved_weight", "saved_bias"]

MAX_RANK = 8192
MAX_WIDTH = 1 << 24
MAX_EXPERTS = 4096
MAX_PATH = 512
STACKED = ("gate_up_proj", "down_proj")
"""Parameters of all experts at once, in the order in which modules define them."""
MAX_NAMED = 8
"""In an error."""
FLOATS = ("F32", "F16", "BF16")
READ_BYTES = 1 << 20

REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "megatron_config",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
"""Keys that, unless empty, stand for other arithmetic than W x + s B A x."""
WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "velora_config",
)
"""They were for training, or say what the tensors' names and shapes say."""
IN_USE = (
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "lora_bias",
    "peft_type",
    "r",
    "rank_pattern",
    "target_parameters",
    "use_dora",
    "use_rslora",
)
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which training began from changed weights of the base."""

_NAMES = (
    (r"(.+)\.lora_A(?:\.default)?\.weight", "a", "linear"),
    (r"(.+)\.lora_B(?:\.default)?\.weight", "b", "linear"),
    (r"(.+)\.lora_B(?:\.default)?\.bias", "bias", "linear"),
    (r"(.+)\.lora_embedding_A(?:\.default)?", "a", "embedding"),
    (r"(.+)\.lora_embedding_B(?:\.default)?", "b", "embedding"),
    (r"(.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?", "magnitude", None),
    (r"(.+)\.base_layer\.weight", "base", None),
    (r"(.+)\.base_layer\.bias", "saved_bias", None),
    (r"(.+?)(?:\.modules_to_save(?:\.default)?)?\.weight", "saved_weight", None),
    (r"(.+?)(?:\.modules_to_save(?:\.default)?)?\.bias", "saved_bias", None),
)
_PATTERNS = tuple((re.compile(pattern), part, kind) for pattern, part, kind in _NAMES)
_PATH = re.compile(r"[\w\-]+(?:\.[\w\-]+)*", re.ASCII)
_OWN_WORDS = re.compile(r"(^|\.)(lora_\w+|token_adapter|trainable_tokens\w*|modules_to_save)(\.|$)")
"""Parts of names that peft gives, and that no module of a model has."""
_OTHER_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)")


@dataclass(frozen=True)
class ExpertPart:
    """What one expert's projection has of tensors that are those of all experts of a layer."""

    index: int
    count: int
    half: int | None = None
    """Of a joined gate_up_proj: 0 for the gate, 1 for the up; None: the tensor is not joined."""
    is_swapped: bool = False
    """Whether A is on the side of the outputs, and B on that of the inputs (early versions)."""


@dataclass(frozen=True)
class AdapterModule:
    """One module of the base and what the adapter does to it."""

    path: str
    """As checkpoints name it: "model.layers.3.self_attn.q_proj", "lm_head". Those of experts are
    always "model.layers.3.mlp.experts.7.gate_proj", with up_proj and down_proj."""
    kind: Kind
    """linear: y = W x + s (B A x + bias). embedding: the same with column x of A. expert: linear.
    saved: no A and B; weight or bias are replaced."""
    rank: int
    """0 where there is no A and B."""
    scaling: float
    """alpha / r or alpha / sqrt(r)."""
    has_bias: bool
    """Of B, so to be scaled as well."""
    has_magnitude: bool
    """DoRA: y = m / |W + s B A| (W + s B A) x, with the norm of each output's weights."""
    tensors: Mapping[Part, str] = field(default_factory=dict)
    """Their names in the file."""
    expert: ExpertPart | None = None


@dataclass(frozen=True)
class AdapterFile:
    """An adapter that was read as far as its headers go, and hashed."""

    name: str
    folder: str
    file: str
    """With the tensors."""
    modules: dict[str, AdapterModule]
    """By path."""
    places: dict[str, TensorPlace]
    """Of the tensors that modules name."""
    rank: int
    """The largest."""
    digest: str
    """Of the content: what is done to which modules, by which numbers. Neither the adapter's name
    and folder nor the names of tensors count."""
    nbytes: int
    """Of the tensors in use."""
    saved_nbytes: int
    """Of those that take the place of whole weights."""
    base: str | None
    """`base_model_name_or_path`, of which nothing else is known."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Of the bytes of each tensor."""


class _Settings(CheckedValues):
    """adapter_config.json."""

    def fail(self, key: str, rule: str, value: object) -> NoReturn:
        raise AdapterError(
            f"{self.file}: {key} must be {rule}, got {shown(value)}; repair the file or save the "
            "adapter again."
        )

    def fail_missing(self, key: str) -> NoReturn:
        raise AdapterError(f"{self.file}: {key} is missing; save the adapter again with peft.")

    def finite(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(key, "a number", value)
        if not -1e9 < value < 1e9:  # true of no NaN
            self.fail(key, "a number between -1e9 and 1e9", value)
        return float(value)


def adapter_folder(path: str | Path) -> Path:
    """Where a name lies that may begin with ~ or ~user. `Path.expanduser` raises if there is no
    such user, and here it is a folder that does not exist."""
    return Path(os.path.expanduser(path))


def read_adapter(folder: str | Path, name: str) -> AdapterFile:
    """Checks a folder by its configuration and its file's header, then hashes the tensors."""
    place = adapter_folder(folder)
    if not place.is_dir():
        raise AdapterError(
            f"adapter {shown(name)}: {shown(str(place))} is not a folder; give one that has "
            f"{CONFIG_FILE} and adapter_model.safetensors, as peft's save_pretrained writes it."
        )
    config = place / CONFIG_FILE
    if not config.is_file():
        raise AdapterError(
            f"{config} is missing; an adapter's folder has it beside adapter_model.safetensors, as "
            "peft's save_pretrained writes it."
        )
    settings = _Settings(config, read_json_object(config, ADAPTER))
    _check_settings(settings)
    file, places = _tensors(place)
    modules = _Modules(settings, file, places).read()
    used = {tensor for module in modules.values() for tensor in module.tensors.values()}
    places = {name: places[name] for name in sorted(used)}
    hashes = _hash_tensors(file, places)
    return AdapterFile(
        name=name,
        folder=str(place),
        file=str(file),
        modules=modules,
        places=places,
        rank=max(module.rank for module in modules.values()),
        digest=_content_digest(modules, places, hashes),
        nbytes=sum(place.nbytes for place in places.values()),
        saved_nbytes=sum(
            places[name].nbytes
            for module in modules.values()
            for part, name in module.tensors.items()
            if part == "saved_weight"
        ),
        base=settings.values.get("base_model_name_or_path") or None,
        hashes=hashes,
    )


def _content_digest(
    modules: Mapping[str, AdapterModule],
    places: Mapping[str, TensorPlace],
    hashes: Mapping[str, str],
) -> str:
    """Of what modules compute with. Line by line: other threads wait while one piece of JSON is
    written."""
    hasher = hashlib.sha256()
    known: dict[int, list[tuple[object, ...]]] = {}
    """Of tensors that many experts share."""
    for path in sorted(modules):
        module = modules[path]
        expert = module.expert
        parts = known.get(id(module.tensors))
        if parts is None:
            parts = known[id(module.tensors)] = [
                (part, places[tensor].dtype, places[tensor].shape, hashes[tensor])
                for part, tensor in sorted(module.tensors.items())
            ]
        part_of = expert and (expert.index, expert.count, expert.half, expert.is_swapped)
        line = path, module.kind, module.scaling, parts, part_of
        hasher.update(json.dumps(line).encode() + b"\n")
    return hasher.hexdigest()


def _hash_tensors(file: Path, places: Mapping[str, TensorPlace]) -> dict[str, str]:
    hashes = {}
    room = memoryview(bytearray(READ_BYTES))
    with opened(file) as stream:
        for name, place in places.items():
            hasher = hashlib.sha256()
            for start in range(0, place.nbytes, READ_BYTES):
                part = room[: min(READ_BYTES, place.nbytes - start)]
                read_exactly(stream, file, place.start + start, part)
                hasher.update(part)
            hashes[name] = hasher.hexdigest()
    return hashes


def _tensors(folder: Path) -> tuple[Path, dict[str, TensorPlace]]:
    for name, read_places in READERS.items():
        file = folder / name
        if file.exists():
            return file, read_places(file)
    raise AdapterError(
        f"{folder} has neither {' nor '.join(READERS)}; copy or download the adapter again."
    )


def _check_settings(settings: _Settings) -> None:
    values, file = settings.values, settings.file
    kind = settings.text("peft_type")
    if kind != "LORA":
        settings.fail("peft_type", '"LORA", the only kind of adapter that is supported', kind)
    for key in REFUSED:
        if values.get(key):
            raise AdapterError(
                f"{file}: {key} is {shown(values[key])}, and such adapters are not supported; "
                "merge the adapter with peft's merge_and_unload and serve the merged model."
            )
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise AdapterError(
            f"{file}: init_lora_weights is {shown(start)}, which changed the base's weights before "
            "training; save the adapter with save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...), which makes it one for the base."
        )
    for key in values.keys() - {*REFUSED, *WITHOUT_EFFECT, *IN_USE}:
        if values[key]:
            logger.warning(
                "%s: %s is %s, which Quire does not know and has no use for",
                file,
                shown(key),
                shown(values[key]),
            )


@dataclass(frozen=True)
class _Stack:
    """Sizes of A and B of all experts of a layer."""

    rank: int
    """Of each."""
    count: int
    width: int
    outputs: int


class _Modules:
    """The modules of an adapter, put together of its tensors."""

    def __init__(self, settings: _Settings, file: Path, places: Mapping[str, TensorPlace]) -> None:
        self.settings, self.file, self.places = settings, file, places
        self.rank = settings.count("r", 8, MAX_RANK)
        self.alpha = settings.finite("lora_alpha", settings.values.get("lora_alpha", 8))
        self.is_root = settings.boolean("use_rslora", False)
        self.is_dora = settings.boolean("use_dora", False)
        self.ranks: dict[str, float] = {}
        self.alphas: dict[str, float] = {}
        self.parameters = self._target_parameters()
        self.kinds: dict[str, str] = {}
        self.parts: dict[str, dict[str, str]] = {}

    def read(self) -> dict[str, AdapterModule]:
        self._sort_tensors()
        keys = {path: self._key_of(path) for path in self.parts}
        stacked = self._take_stacked()
        stacked_keys = [f"{root}.{leaf}" for root, leaves in stacked.items() for leaf in leaves]
        self.alphas = self._match("alpha_pattern", [*keys.values(), *stacked_keys])
        self.ranks = self._match("rank_pattern", stacked_keys)
        modules: dict[str, AdapterModule] = {}
        made = [self._made(path, keys[path], parts) for path, parts in self.parts.items()]
        made += [self._experts(root, leaves) for root, leaves in stacked.items()]
        for module in chain.from_iterable(made):
            if module.path in modules:
                raise AdapterError(
                    f"{self.file} has tensors of {shown(module.path)} in two layouts; save the "
                    "adapter again."
                )
            modules[module.path] = module
        if not modules:
            raise AdapterError(f"{self.file} changes no module; save the adapter again.")
        return modules

    def _match(self, key: str, paths: list[str]) -> dict[str, float]:
        """The values of a table of patterns, by module."""
        found = self.settings.mapping(key) or {}
        patterns = {
            name: self.settings.finite(f"{key}[{shown(name)}]", found[name]) for name in found
        }
        try:
            return match_patterns(patterns, paths)
        except AdapterError as error:
            raise AdapterError(f"{self.settings.file}: {key}: {error}.") from error

    def _is_target(self, parameter: str) -> bool:
        return any(parameter == name or parameter.endswith(f".{name}") for name in self.parameters)

    def _key_of(self, path: str) -> str:
        """What peft matches patterns with: the module, or the parameter that is a target."""
        return f"{path}.weight" if self._is_target(f"{path}.weight") else path

    def _take_stacked(self) -> dict[str, dict[str, dict[str, str]]]:
        """Takes out the tensors that are those of all experts of a layer: by the module of the
        experts and by the parameter. peft wraps a module once for each parameter, so that names
        tell how deep a parameter is wrapped."""
        levels: dict[str, dict[int, dict[str, str]]] = {}
        for path in list(self.parts):
            root, depth = path, 0
            while root.endswith(".base_layer"):
                root, depth = root.removesuffix(".base_layer"), depth + 1
            if depth or root.endswith(".experts"):
                levels.setdefault(root, {})[depth] = self.parts.pop(path)
        stacked: dict[str, dict[str, dict[str, str]]] = {}
        for root, by_depth in levels.items():
            leaves = [leaf for leaf in STACKED if self._is_target(f"{root}.{leaf}")]
            if not self.parameters and len(by_depth) == len(STACKED):
                leaves = list(STACKED)
            if sorted(by_depth) != list(range(len(leaves))):
                first = next(iter(by_depth[min(by_depth)].values()))
                self._refuse(
                    first,
                    f"target_parameters in {CONFIG_FILE} names {len(leaves)} of "
                    f"{' and '.join(f'{root}.{leaf}' for leaf in STACKED)}, and the file has "
                    f"{len(by_depth)}",
                )
            stacked[root] = {leaf: by_depth[len(leaves) - 1 - i] for i, leaf in enumerate(leaves)}
        return stacked

    def _experts(self, root: str, leaves: dict[str, dict[str, str]]) -> Iterable[AdapterModule]:
        """Modules of single experts, which share tensors."""
        shapes = {leaf: self._stack(f"{root}.{leaf}", parts) for leaf, parts in leaves.items()}
        counts = {leaf: stack.count for leaf, stack in shapes.items()}
        if len(set(counts.values())) > 1:
            raise AdapterError(
                f"{self.file}: {shown(root)} has {counts} experts by r and rank_pattern of "
                f"{CONFIG_FILE}; they must agree."
            )
        is_swapped = False
        if len(shapes) == 2:
            gate_up, down = (shapes[leaf] for leaf in STACKED)
            fits = gate_up.width == down.outputs and gate_up.outputs == 2 * down.width
            is_swapped = gate_up.outputs == down.width and gate_up.width == 2 * down.outputs
            if not fits and not is_swapped:
                self._refuse(
                    leaves["gate_up_proj"]["b"],
                    "its sizes are not those of a gate_up_proj beside the down_proj of one expert",
                )
            is_swapped = is_swapped and not fits
        own_root = canonical(f"{root}.0.down_proj").removesuffix(".0.down_proj")
        for leaf, parts in leaves.items():
            stack, tensors = shapes[leaf], _named(parts)
            names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
            joined = stack.width if is_swapped else stack.outputs
            if joined % len(names):
                self._refuse(parts["b"], f"a {leaf} must have as many gates as ups")
            scaling = self._scaling(self.alphas.get(f"{root}.{leaf}", self.alpha), stack.rank)
            for index in range(stack.count):
                for half, name in enumerate(names):
                    expert = ExpertPart(
                        index, stack.count, half if len(names) > 1 else None, is_swapped
                    )
                    path = f"{own_root}.{index}.{name}"
                    yield AdapterModule(
                        path, "expert", stack.rank, scaling, False, False, tensors, expert
                    )

    def _stack(self, key: str, parts: dict[str, str]) -> _Stack:
        self._check_pair(parts)
        for part in parts.keys() - {"a", "b"}:
            self._refuse(parts[part], "experts that share tensors have A and B alone")
        for part in ("a", "b"):
            self._check_type(part, parts[part])
        rows, width, outputs = self._sizes(parts, MAX_RANK * MAX_EXPERTS)
        rank = self.ranks.get(key, self.rank)
        if rank < 1 or rank != int(rank) or rows % int(rank):
            self._refuse(
                parts["a"],
                f"its rows are those of all experts, and the rank of {key} is {rank:g} by r and "
                f"rank_pattern of {CONFIG_FILE}",
            )
        rank = int(rank)
        if rank > MAX_RANK:
            self._refuse(parts["a"], f"the rank must be at most {MAX_RANK}")
        if rows // rank > MAX_EXPERTS:
            self._refuse(
                parts["a"],
                f"with rank {rank} it is of {rows // rank} experts, and at most "
                f"{MAX_EXPERTS} are supported",
            )
        return _Stack(rank, rows // rank, width, outputs)

    def _target_parameters(self) -> list[str]:
        found = self.settings.values.get("target_parameters") or []
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            self.settings.fail("target_parameters", "a list of names", found)
        return found

    def _sort_tensors(self) -> None:
        """Each tensor to its module, by its name."""
        unknown = []
        for name in self.places:
            short = name.removeprefix("base_model.model.")
            matches = ((p.fullmatch(short), part, kind) for p, part, kind in _PATTERNS)
            found = (
                next((match for match in matches if match[0]), None)
                if len(short) <= MAX_PATH
                else None
            )
            if found is None:
                unknown.append(name)
                continue
            match, part, kind = found
            assert match is not None
            path = match[1]
            if not _PATH.fullmatch(path) or _OWN_WORDS.search(path):
                unknown.append(name)
                continue
            parts = self.parts.setdefault(path, {})
            if part in parts or (kind and self.kinds.setdefault(path, kind) != kind):
                raise AdapterError(
                    f"{self.file}: tensors {shown(parts.get(part, path))} and {shown(name)} are "
                    "for the same part of one module; save the adapter again."
                )
            parts[part] = name
        if unknown:
            raise AdapterError(
                f"{self.file}: {listed(unknown)} {'is' if len(unknown) == 1 else 'are'} not "
                "understood: neither A nor B of a module, nor a weight or bias in the place of the "
                "base's. Merge the adapter with peft's merge_and_unload and serve the merged model."
            )

    def _made(self, path: str, key: str, parts: dict[str, str]) -> Iterable[AdapterModule]:
        has_pair = "a" in parts or "b" in parts
        if "base" in parts:
            if not has_pair:
                self._refuse(parts["base"], "there is no A and B beside it")
            del parts["base"]  # peft repeats the weights of embeddings and heads that it adapts
        if not parts:
            return
        for part, name in parts.items():
            self._check_type(part, name)
        if not has_pair:
            if "bias" in parts or "magnitude" in parts:
                self._refuse(next(iter(parts.values())), "there is no A and B beside it")
            yield AdapterModule(path, "saved", 0, 1.0, False, False, _named(parts))
            return
        yield self._pair(path, key, parts)

    def _check_pair(self, parts: dict[str, str]) -> None:
        for own in ("a", "b"):
            if own not in parts:
                other = next(iter(parts.values()))
                self._refuse(other, f"there is no {own.upper()} beside it")

    def _pair(self, path: str, key: str, parts: dict[str, str]) -> AdapterModule:
        self._check_pair(parts)
        rank, _, outputs = self._sizes(parts)
        has_magnitude = "magnitude" in parts
        if has_magnitude != self.is_dora:
            self._refuse(
                parts["a"],
                f"use_dora is {str(self.is_dora).lower()} in {CONFIG_FILE}, and the module has "
                f"{'a' if has_magnitude else 'no'} lora_magnitude_vector",
            )
        kind: Kind = "embedding" if self.kinds[path] == "embedding" else "linear"
        for part in ("bias", "magnitude", "saved_bias"):
            if part in parts:
                self._check_shape(parts[part], (outputs,), "B")
        if "saved_weight" in parts:
            self._refuse(parts["saved_weight"], "the module has A and B as well")
        alpha = self.alphas.get(key, self.alpha)
        own_path = canonical(path)
        is_expert = own_path is not path or _EXPERT.fullmatch(path) is not None
        if is_expert:
            kind = "expert"
        return AdapterModule(
            own_path,
            kind,
            rank,
            self._scaling(alpha, rank),
            "bias" in parts,
            has_magnitude,
            _named(parts),
        )

    def _scaling(self, alpha: float, rank: int) -> float:
        return alpha / math.sqrt(rank) if self.is_root else alpha / rank

    def _sizes(self, parts: dict[str, str], max_rank: int = MAX_RANK) -> tuple[int, int, int]:
        """(rank, inputs, outputs) of A and B, as their shapes say."""
        for part in ("a", "b"):
            if len(self.places[parts[part]].shape) != 2:
                self._refuse(parts[part], "it must have two dimensions")
        (rank, width), (outputs, other) = (self.places[parts[part]].shape for part in ("a", "b"))
        if rank != other:
            self._refuse(
                parts["b"],
                f"A is {self.places[parts['a']]}, so that B must have {rank} columns",
            )
        if not 0 < rank <= max_rank:
            self._refuse(parts["a"], f"the rank must be between 1 and {max_rank}")
        if not (0 < width <= MAX_WIDTH and 0 < outputs <= MAX_WIDTH):
            self._refuse(parts["a"], f"dimensions must be between 1 and {MAX_WIDTH}")
        return rank, width, outputs

    def _check_type(self, part: str, name: str) -> None:
        place = self.places[name]
        if place.dtype not in FLOATS:
            self._refuse(name, "tensors of an adapter must be F32, F16 or BF16")
        if part == "saved_weight":
            if len(place.shape) not in (1, 2) or not place.nbytes:
                self._refuse(name, "a weight must have one or two dimensions")
        elif part not in ("a", "b") and (len(place.shape) != 1 or not place.nbytes):
            self._refuse(name, "it must have one dimension")

    def _check_shape(self, name: str, shape: tuple[int, ...], beside: str) -> None:
        if self.places[name].shape != shape:
            self._refuse(name, f"{beside} beside it asks for the shape {list(shape)}")

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise AdapterError(
            f"{self.file}: tensor {shown(name)} ({self.places[name]}) does not fit: {reason}; save "
            "the adapter again."
        )


def _named(parts: dict[str, str]) -> dict[Part, str]:
    return cast(dict[Part, str], parts)


def canonical(path: str) -> str:
    """The same for all names that models give to the projections of experts."""
    match = _EXPERT.fullmatch(path)
    if match is None:
        return path
    parent, index, own = match.groups()
    parent = parent.replace(".block_sparse_moe", ".mlp")
    return f"{parent}.experts.{int(index)}.{_OTHER_NAMES.get(own, own)}"


def listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - MAX_NAMED} more" if len(every) > MAX_NAMED else ""
    return ", ".join(shown(name) for name in every[:MAX_NAMED]) + more
