"""Quantised checkpoints: the format of each matrix, by configuration and files. No torch."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quire.files.json_file import CheckedValues, read_json_object
from quire.files.safetensors import TensorInfo
from quire.protocol.errors import ModelError

SUPPORTED = "awq, gptq, fp8, compressed-tensors, mxfp4 and modelopt (FP8)"
REMEDY = (
    "use an unquantised version of the model, and `quire quantize` or quantization='fp8', 'int8' "
    "or 'int4' to make it small"
)
SAME_METHODS = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "compressed_tensors": "compressed-tensors",
    "modelopt_fp8": "modelopt",
}
"""Names that stand for one format with several kernels elsewhere."""
METHODS = ("awq", "gptq", "fp8", "compressed-tensors", "modelopt", "mxfp4")
EIGHT_BITS = {"F8_E4M3": "float8_e4m3fn", "I8": "int8"}
"""Types of tensors whose numbers are multiplied by scales, as safetensors and torch name them."""
MXFP4_GROUP = 32


@dataclass(frozen=True)
class GroupFormat:
    """Codes of a few bits, several in a word, with a scale for each group of inputs."""

    layout: str
    """Names of the tensors, and order of codes in them: awq, gptq, packed or mxfp4."""
    bits: int
    group_size: int | None
    """None: all inputs."""
    is_symmetric: bool
    has_order: bool = False
    """Whether a tensor says which group each input is in."""
    is_shuffled: bool = False
    """Whether the inputs of a group lie apart."""
    stores_zero_less_one: bool = False

    def __str__(self) -> str:
        group = "whole rows" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.layout}, {self.bits} bits in {group}"


@dataclass(frozen=True)
class ScaledFormat:
    """Numbers of 8 bits that are multiplied by scales."""

    dtype: str
    """float8_e4m3fn or int8."""
    strategy: str
    """What has one scale: tensor, channel, block or group."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block, or of a group."""
    scale_name: str = "weight_scale"
    inputs: str | None = None
    """How inputs are rounded: dynamic, static, or not at all."""
    has_zeros: bool = False
    has_input_zero: bool = False

    def __str__(self) -> str:
        inputs = "" if self.inputs is None else f", {self.inputs} inputs"
        return f"{self.dtype} by {self.strategy}{inputs}"


MatrixFormat = GroupFormat | ScaledFormat
Tensors = Mapping[str, TensorInfo]
"""Those of one module, by the last part of their names."""


class QuantizationConfig(ABC):
    """What a checkpoint says of its quantisation."""

    method: str
    """As users name it."""
    file: Path
    """Where it says so."""

    def format_of(self, module: str, tensors: Tensors | None) -> MatrixFormat | None:
        """How the matrix of a module is stored; None: as it is. The tensors that files have of it
        decide; without files, the configuration alone."""
        if not tensors:
            return self._listed(module)
        stored = tensors.get("weight")
        if stored is not None and stored.dtype not in EIGHT_BITS:
            return None
        return self._stored(module, tensors)

    @abstractmethod
    def _listed(self, module: str) -> MatrixFormat | None:
        """By the configuration."""

    @abstractmethod
    def _stored(self, module: str, tensors: Tensors) -> MatrixFormat | None:
        """Of a module whose weight is not there as floats."""

    @property
    @abstractmethod
    def block(self) -> int:
        """Inputs of the largest group or block: ranks do not cut them, if possible."""

    def unknown(self, module: str, tensors: Tensors) -> ModelError:
        found = ", ".join(f"{name} {info}" for name, info in sorted(tensors.items()))
        return ModelError(
            f"{self.file}: quant_method {self.method!r} does not explain the tensors of {module} "
            f"({found}); check that the file belongs to these weights."
        )


def read_quantization(values: CheckedValues, folder: Path | None) -> QuantizationConfig | None:
    """What config.json says of a model's quantisation, or a file beside it."""
    found = values.mapping("quantization_config") or values.mapping("compression_config")
    file = values.file
    names = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
    for name, method in zip(names, ("gptq", "awq", "modelopt"), strict=True):
        if found is None and folder is not None and (folder / name).is_file():
            file = folder / name
            found = {"quant_method": method, **read_json_object(file)}
    return None if found is None else parse_quantization(CheckedValues(file, found))


def parse_quantization(values: CheckedValues) -> QuantizationConfig:
    """Of the object in `quantization_config`."""
    method = values.text("quant_method", "").lower()
    if not method and "config_groups" in values.values:
        method = "compressed-tensors"
    if not method and {"producer", "quantization"} <= values.values.keys():
        method = "modelopt"  # as in its own file
    method = SAME_METHODS.get(method, method)
    if method not in _PARSERS:
        raise ModelError(
            f"{values.file}: the weights are quantised by quant_method={method!r}, which is not "
            f"supported; supported are {SUPPORTED}. To run the model, {REMEDY}."
        )
    return _PARSERS[method](values)


# --- AWQ, GPTQ ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AwqConfig(QuantizationConfig):
    file: Path
    group_size: int | None
    excluded: tuple[str, ...]
    """Parts of paths that are not quantised."""

    method = "awq"

    @staticmethod
    def parse(values: CheckedValues) -> AwqConfig:
        _one_of(values, "bits" if "bits" in values.values else "w_bit", (4,))
        version = values.text("version", "gemm").lower()
        if version != "gemm":
            values.fail("version", "gemm, the only layout of AWQ that is read", version)
        key = "group_size" if "group_size" in values.values else "q_group_size"
        return AwqConfig(
            values.file, _group_size(values, key), _names(values, "modules_to_not_convert")
        )

    @property
    def block(self) -> int:
        return self.group_size or 1

    def _listed(self, module: str) -> MatrixFormat | None:
        return None if any(part in module for part in self.excluded) else self._format

    def _stored(self, module: str, tensors: Tensors) -> MatrixFormat | None:
        if "qweight" not in tensors:
            raise self.unknown(module, tensors)
        return self._format

    @property
    def _format(self) -> GroupFormat:
        return GroupFormat("awq", 4, self.group_size, is_symmetric=False)


@dataclass(frozen=True)
class GptqConfig(QuantizationConfig):
    file: Path
    usual: GroupFormat
    changes: tuple[tuple[re.Pattern[str], GroupFormat | None], ...]
    """Formats of modules by the start of their paths; the first that matches. None: not
    quantised."""
    included: tuple[str, ...]
    """Parts of paths that are quantised; none: all."""

    method = "gptq"

    @staticmethod
    def parse(values: CheckedValues) -> GptqConfig:
        key = "checkpoint_format" if "checkpoint_format" in values.values else "format"
        layout = values.text(key, "gptq")
        if layout not in ("gptq", "gptq_v2"):
            values.fail(key, "gptq or gptq_v2", layout)
        if values.boolean("is_marlin_format", False):
            values.fail("is_marlin_format", "false", True)
        if values.text("pack_dtype", "int32") != "int32":
            values.fail("pack_dtype", "int32", values.values["pack_dtype"])
        is_old = layout == "gptq"
        usual = _gptq_format(values, is_old)
        changes: list[tuple[re.Pattern[str], GroupFormat | None]] = []
        for rule, changed in (values.mapping("dynamic") or {}).items():
            sign, pattern = (rule[:1], rule[2:]) if rule[:2] in ("+:", "-:") else ("+", rule)
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                values.fail(f"dynamic[{rule!r}]", f"a regular expression ({error})", pattern)
            if sign == "-":
                changes.append((compiled, None))
                continue
            if not isinstance(changed, dict):
                values.fail(f"dynamic[{rule!r}]", "an object", changed)
            changed_values = CheckedValues(values.file, {**values.values, **changed})
            changes.append((compiled, _gptq_format(changed_values, is_old)))
        lists = values.values.get("modules_in_block_to_quantize") or []
        if not isinstance(lists, list):
            values.fail("modules_in_block_to_quantize", "a list of lists", lists)
        included = [one for part in lists for one in (part if isinstance(part, list) else [part])]
        return GptqConfig(values.file, usual, tuple(changes), tuple(map(str, included)))

    @property
    def block(self) -> int:
        formats = [self.usual, *(one for _, one in self.changes if one is not None)]
        return max(one.group_size or 1 for one in formats)

    def _listed(self, module: str) -> MatrixFormat | None:
        if self.included and not any(part in module for part in self.included):
            return None
        return self._ruled(module)

    def _ruled(self, module: str) -> GroupFormat | None:
        for pattern, changed in self.changes:
            if pattern.match(module):
                return changed
        return self.usual

    def _stored(self, module: str, tensors: Tensors) -> MatrixFormat | None:
        found = self._ruled(module)
        if "qweight" not in tensors or found is None:
            raise self.unknown(module, tensors)
        has_order = "g_idx" in tensors
        _check_order(self, module, found, "g_idx", has_order)
        return replace(found, has_order=has_order)


def _gptq_format(values: CheckedValues, is_old: bool) -> GroupFormat:
    group_size = _group_size(values, "group_size")
    has_order = values.boolean("desc_act", False)
    return GroupFormat(
        "gptq",
        _one_of(values, "bits", (2, 3, 4, 8)),
        group_size,
        values.boolean("sym", True),
        has_order,
        is_shuffled=has_order and group_size is not None,
        stores_zero_less_one=is_old,
    )


def _check_order(
    config: QuantizationConfig, module: str, listed: GroupFormat, name: str, is_there: bool
) -> None:
    """Inputs whose groups are not in their order need to say which group they are in."""
    if listed.has_order and listed.group_size is not None and not is_there:
        raise ModelError(
            f"{config.file.parent}: tensor {module}.{name} is missing, but {config.file} says that "
            "inputs are in groups by their activations; download the model again."
        )


# --- FP8 ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8Config(QuantizationConfig):
    file: Path
    usual: ScaledFormat
    excluded: tuple[str, ...]
    """Paths that are not quantised."""
    method: str = "fp8"

    @staticmethod
    def parse(values: CheckedValues) -> Fp8Config:
        fmt = values.text("fmt", "e4m3")
        if fmt not in ("e4m3", "float8_e4m3fn"):
            values.fail("fmt", "e4m3", fmt)
        inputs = values.text("activation_scheme", "dynamic")
        if inputs not in ("dynamic", "static"):
            values.fail("activation_scheme", "dynamic or static", inputs)
        block = _block(values, "weight_block_size")
        excluded = _names(values, "ignored_layers") or _names(values, "modules_to_not_convert")
        if block is None:
            usual = ScaledFormat("float8_e4m3fn", "tensor", inputs=inputs)
        else:
            usual = ScaledFormat("float8_e4m3fn", "block", block, "weight_scale_inv", inputs)
        return Fp8Config(values.file, usual, excluded)

    @staticmethod
    def parse_modelopt(values: CheckedValues) -> Fp8Config:
        inner = values.mapping("quantization")
        if inner is not None:
            values = CheckedValues(values.file, inner)
        algorithm = values.text("quant_algo")
        if algorithm.upper() != "FP8":
            raise ModelError(
                f"{values.file}: quant_algo={algorithm!r} of modelopt is not supported; FP8 is. To "
                f"run the model, {REMEDY}."
            )
        key = "exclude_modules" if "exclude_modules" in values.values else "ignore"
        excluded = tuple(name.removesuffix("*") for name in _names(values, key))
        usual = ScaledFormat("float8_e4m3fn", "tensor", inputs="static")
        return Fp8Config(values.file, usual, excluded, "modelopt")

    @property
    def block(self) -> int:
        return self.usual.block[1] if self.usual.block else 1

    def _listed(self, module: str) -> MatrixFormat | None:
        is_excluded = any(module == name or module.startswith(f"{name}.") for name in self.excluded)
        return None if is_excluded else self.usual

    def _stored(self, module: str, tensors: Tensors) -> MatrixFormat | None:
        return _scaled(self, module, tensors, self.usual.block, self.usual.inputs)


def _scaled(
    config: QuantizationConfig,
    module: str,
    tensors: Tensors,
    block: tuple[int, int] | None,
    inputs: str | None,
) -> ScaledFormat:
    """The format of a weight of 8 bits, by the shape of its scales."""
    if "weight" not in tensors:
        raise config.unknown(module, tensors)
    weight = tensors["weight"]
    name = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
    scale = tensors.get(name)
    if scale is None or len(weight.shape) != 2:
        raise ModelError(
            f"{config.file.parent}: tensor {module}.{name} is missing, although the files have "
            f"{module}.weight as {weight}; download the model again."
        )
    num_outputs = weight.shape[0]
    found_block = None
    if scale.count == 1:
        strategy = "tensor"
    elif scale.shape in ((num_outputs,), (num_outputs, 1)):
        strategy = "channel"
    else:
        strategy, found_block = "block", block
        if block is None:
            raise ModelError(
                f"tensor {module}.{name} has shape {list(scale.shape)}, but {config.file} names no "
                f"blocks or groups for {module}.weight {list(weight.shape)}; repair the file."
            )
        if block[0] == 1:
            strategy = "group"
    if inputs == "static" and "input_scale" not in tensors:
        raise ModelError(
            f"tensor {module}.input_scale is missing, but {config.file} says that inputs have "
            "static scales; download the model again."
        )
    return ScaledFormat(
        EIGHT_BITS[weight.dtype],
        strategy,
        found_block,
        name,
        inputs,
        "weight_zero_point" in tensors,
        inputs == "static" and "input_zero_point" in tensors,
    )


# --- compressed-tensors ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scheme:
    """A group of `config_groups`."""

    targets: tuple[str, ...]
    format: MatrixFormat | None
    """None: weights are as they are, as where a group is about attention alone."""


@dataclass(frozen=True)
class CompressedTensorsConfig(QuantizationConfig):
    file: Path
    schemes: tuple[_Scheme, ...]
    ignored: tuple[str, ...]

    method = "compressed-tensors"

    @staticmethod
    def parse(values: CheckedValues) -> CompressedTensorsConfig:
        status = values.text("quantization_status", "compressed")
        if status not in ("compressed", "frozen"):
            values.fail("quantization_status", "compressed", status)
        sparsity = values.mapping("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            values.fail("sparsity_config", "of format dense, or absent", sparsity)
        if (values.mapping("transform_config") or {}).get("config_groups"):
            values.fail("transform_config", "empty, since no transforms are computed", "some")
        groups = values.mapping("config_groups") or {}
        if not groups and not values.mapping("kv_cache_scheme"):
            values.fail(
                "config_groups", "an object with at least one group, or kv_cache_scheme set", groups
            )
        usual = values.text("format", "")
        schemes = [
            _parse_group(values, f"config_groups[{name!r}]", group, usual)
            for name, group in groups.items()
        ]
        return CompressedTensorsConfig(values.file, tuple(schemes), _names(values, "ignore"))

    @property
    def block(self) -> int:
        return max((_inputs_of(scheme.format) for scheme in self.schemes), default=1)

    def _listed(self, module: str) -> MatrixFormat | None:
        if _closeness(self.ignored, module):
            return None
        return self._scheme(module)

    def _scheme(self, module: str) -> MatrixFormat | None:
        """That of the first group whose targets match the module most closely."""
        matching = [one for one in self.schemes if _closeness(one.targets, module)]
        best = max(matching, key=lambda one: _closeness(one.targets, module), default=None)
        return None if best is None else best.format

    def _stored(self, module: str, tensors: Tensors) -> MatrixFormat | None:
        found = self._scheme(module)
        if "weight_packed" in tensors and isinstance(found, GroupFormat):
            has_order = "weight_g_idx" in tensors
            _check_order(self, module, found, "weight_g_idx", has_order)
            symmetric = "weight_zero_point" not in tensors
            scale = tensors.get("weight_scale")
            has_groups = scale is None or scale.shape[-1:] != (1,)
            size = found.group_size if has_groups else None
            return replace(
                found,
                group_size=size,
                is_symmetric=symmetric,
                has_order=has_order,
                is_shuffled=has_order and size is not None,
            )
        if "weight" in tensors and isinstance(found, ScaledFormat):
            return _scaled(self, module, tensors, found.block, found.inputs)
        raise self.unknown(module, tensors)


def _inputs_of(found: MatrixFormat | None) -> int:
    if isinstance(found, GroupFormat):
        return found.group_size or 1
    return found.block[1] if found is not None and found.block else 1


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FP8 = {"num_bits": 8, "type": "float"}
_BY_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
_FP8_BY_TOKEN = {**_BY_TOKEN, "type": "float"}
PRESETS: dict[str, dict[str, Any]] = {
    "W4A16": {"weights": _INT4},
    "W4A16_ASYM": {"weights": {**_INT4, "symmetric": False}},
    "W8A16": {"weights": {**_INT4, "num_bits": 8}},
    "W8A8": {"weights": _INT8, "input_activations": _BY_TOKEN},
    "INT8": {"weights": _INT8, "input_activations": _BY_TOKEN},
    "FP8": {"weights": _FP8, "input_activations": {**_FP8, "dynamic": False}},
    "FP8_DYNAMIC": {
        "weights": {**_FP8, "strategy": "channel"},
        "input_activations": _FP8_BY_TOKEN,
    },
    "FP8_BLOCK": {
        "weights": {**_FP8, "strategy": "block", "block_structure": [128, 128]},
        "input_activations": _FP8_BY_TOKEN,
    },
}
"""Schemes that groups may name instead of writing them out."""
PACKED_FORMATS = ("pack-quantized", "mxfp4-pack-quantized")
PLAIN_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")


def _parse_group(values: CheckedValues, key: str, group: object, usual: str) -> _Scheme:
    if isinstance(group, list):  # under the name of a scheme that is known by it
        name = key.split("'")[1]
        if name not in PRESETS:
            values.fail(key, f"an object, or under the name of one of {', '.join(PRESETS)}", group)
        group = {"targets": group, **PRESETS[name]}
    if not isinstance(group, dict):
        values.fail(key, "an object", group)
    targets = _names(CheckedValues(values.file, group), "targets")
    weights = group.get("weights")
    if weights is None:
        return _Scheme(targets, None)
    if not isinstance(weights, dict):
        values.fail(f"{key}.weights", "an object or null", weights)
    checked = CheckedValues(values.file, weights)
    bits, kind = checked.values.get("num_bits"), checked.text("type", "int")
    # As compressed-tensors understands groups without a strategy.
    sizes = {None: "tensor", -1: "channel"}
    strategy = checked.text("strategy", sizes.get(weights.get("group_size"), "group"))
    name = group.get("format") or usual
    if name in ("mixed-precision", "", None):
        is_packed = bits == 4 or (kind == "int" and group.get("input_activations") is None)
        name = "pack-quantized" if is_packed else "naive-quantized"
    if name not in (*PACKED_FORMATS, *PLAIN_FORMATS):
        supported = ", ".join((*PACKED_FORMATS, *PLAIN_FORMATS))
        raise _unsupported(values, f"{key}.format", name, supported)
    group_size = _group_size(checked, "group_size") if strategy == "group" else None
    if kind == "float" and bits == 4:
        if name != "mxfp4-pack-quantized" or group_size != MXFP4_GROUP:
            supported = f"MXFP4 (groups of {MXFP4_GROUP})"
            raise _unsupported(values, f"{key}.weights", weights, supported)
        return _Scheme(targets, GroupFormat("mxfp4", 4, group_size, is_symmetric=True))
    if name == "pack-quantized":
        if kind != "int" or bits not in (2, 3, 4, 8):
            found = f"{kind} of {bits} bits"
            raise _unsupported(values, f"{key}.weights", found, "2, 3, 4 and 8 bits of type int")
        if weights.get("strategy") not in (None, "group", "channel"):
            key = f"{key}.weights.strategy"
            raise _unsupported(values, key, strategy, "group and channel where codes are packed")
        has_order = weights.get("actorder") in (True, "group", "dynamic")
        return _Scheme(
            targets,
            GroupFormat(
                "packed",
                bits,
                group_size,
                checked.boolean("symmetric", True),
                has_order,
                is_shuffled=has_order and group_size is not None,
            ),
        )
    # Integers of fewer bits lie in bytes of their own.
    if bits != 8 and (kind == "float" or bits not in range(2, 8)):
        found = f"{kind} of {bits} bits"
        raise _unsupported(values, f"{key}.weights", found, "float of 8 and int of 2 to 8 bits")
    block = _block(checked, "block_structure") if strategy == "block" else None
    if strategy == "group":
        block = (1, group_size or 1)
    inputs = group.get("input_activations")
    if inputs is not None and not isinstance(inputs, dict):
        values.fail(f"{key}.input_activations", "an object or null", inputs)
    rounding = None if inputs is None else ("dynamic" if inputs.get("dynamic") else "static")
    if inputs is not None and inputs.get("type", "int") != kind:
        # Inputs are rounded as weights are, or not at all.
        if rounding == "static":
            found = f"static scales of inputs of another type than {kind}"
            raise _unsupported(values, f"{key}.input_activations", found, "dynamic ones")
        rounding = None
    dtype = "float8_e4m3fn" if kind == "float" else "int8"
    return _Scheme(targets, ScaledFormat(dtype, strategy, block, inputs=rounding))


def _unsupported(values: CheckedValues, key: str, found: object, supported: str) -> ModelError:
    return ModelError(
        f"{values.file}: {key} is {found}, which is not supported; supported: {supported}. To run "
        f"the model, {REMEDY}."
    )


def _closeness(targets: Sequence[str], module: str) -> int:
    """How closely some target matches: 3 a path, 2 a regular expression after "re:", 1 a class, of
    which all matrices here have one, 0 none."""
    if module in targets:
        return 3
    if any(one.startswith("re:") and re.match(one[3:], module) for one in targets):
        return 2
    return int("Linear" in targets)


# --- MXFP4 ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mxfp4Config(QuantizationConfig):
    file: Path
    excluded: tuple[str, ...]
    """Parts of paths that are not quantised; "*" stands for any part of one."""

    method = "mxfp4"
    block = MXFP4_GROUP

    @staticmethod
    def parse(values: CheckedValues) -> Mxfp4Config:
        return Mxfp4Config(values.file, _names(values, "modules_to_not_convert"))

    def _listed(self, module: str) -> MatrixFormat | None:
        is_excluded = any(fnmatchcase(module, f"*{part}*") for part in self.excluded)
        return None if is_excluded else MXFP4

    def _stored(self, module: str, tensors: Tensors) -> MatrixFormat | None:
        if not {"weight_packed", "blocks"}.intersection(tensors):
            raise self.unknown(module, tensors)
        return MXFP4


MXFP4 = GroupFormat("mxfp4", 4, MXFP4_GROUP, is_symmetric=True)
_PARSERS = {
    "awq": AwqConfig.parse,
    "gptq": GptqConfig.parse,
    "fp8": Fp8Config.parse,
    "modelopt": Fp8Config.parse_modelopt,
    "compressed-tensors": CompressedTensorsConfig.parse,
    "mxfp4": Mxfp4Config.parse,
}


def _one_of(values: CheckedValues, key: str, allowed: tuple[int, ...]) -> int:
    found = values.count(key)
    if found not in allowed:
        values.fail(key, " or ".join(map(str, allowed)), found)
    return found


def _group_size(values: CheckedValues, key: str) -> int | None:
    """-1 stands for all inputs."""
    if values.values.get(key) == -1:
        return None
    size = values.integer(key, 128)
    assert size is not None
    if size % 8:
        values.fail(key, "a multiple of 8, or -1 for all inputs", size)
    return size


def _block(values: CheckedValues, key: str) -> tuple[int, int] | None:
    found: Any = values.values.get(key)
    if found is None:
        return None
    if isinstance(found, str) and re.fullmatch(r"\d+x\d+", found):
        found = [int(part) for part in found.split("x")]
    is_pair = isinstance(found, list) and len(found) == 2
    if not is_pair or not all(type(one) is int and one > 0 for one in found):
        values.fail(key, "two positive integers", found)
    return found[0], found[1]


def _names(values: CheckedValues, key: str) -> tuple[str, ...]:
    found = values.values.get(key)
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        values.fail(key, "a list of names", found)
    return tuple(found)
