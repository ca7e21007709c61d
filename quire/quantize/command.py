"""`quire quantize`: reads a model tensor by tensor and writes it quantised."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.config.gguf_model import translate_gguf
from quire.config.model import ModelConfig, load_model_config
from quire.files.gguf import GGUFFile
from quire.files.json_file import read_json_object
from quire.files.safetensors import TensorInfo
from quire.kernels.torch.quantize import ELEMENTS_AT_ONCE
from quire.kernels.torch.quantized_weights import GroupedWeights, QuantizedWeights
from quire.layers.experts import ExpertLinear
from quire.layers.linear import LatentLinear, Linear
from quire.layers.quantization.unquantized import Unquantized
from quire.layers.weights import Build
from quire.loading.weights import iter_weights, stored_tensors
from quire.models.loader import ONE_RANK, Target, weight_targets
from quire.models.registry import CausalLM, model_class
from quire.protocol.errors import ModelError, OptionError
from quire.quantize.calibrate import Adjustment, Adjustments, calibrate
from quire.quantize.methods import Method, make_method
from quire.quantize.shards import ITEM_BYTES, ShardWriter
from quire.text.prompts import read_windows
from quire.text.tokenizer import load_tokenizer
from quire.text.tokenizer_gguf import read_gguf
from quire.worker.device import detect_device

Progress = Callable[[str], None]

CALIBRATION_TOKENS, CALIBRATION_WINDOW = 16384, 512
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
"""Weights, in any format."""
DESCRIBES_WEIGHTS = ("config.json", "quantize_config.json", "quant_config.json")
TENSORS_OF_A_MATRIX = 3
NUM_WORST = 5


@dataclass(frozen=True)
class Summary:
    """What was written."""

    bytes_before: int
    bytes_after: int
    errors: dict[str, float]
    """Of each quantised matrix, the root of its mean squared error over that of its values; after
    calibration each input counts as much as its mean square."""

    def lines(self) -> list[str]:
        """For people."""
        worst = sorted(self.errors.items(), key=lambda item: -item[1])[:NUM_WORST]
        width = max(len(name) for name, _ in worst)
        mean = sum(self.errors.values()) / len(self.errors)
        return [
            f"{self.bytes_before / 1e6:,.0f} MB became {self.bytes_after / 1e6:,.0f} MB; "
            f"{len(self.errors)} matrices are quantised, with a relative error of {mean:.2%} on "
            "average. The largest:",
            *(f"  {name:{width}}  {error:.2%}" for name, error in worst),
        ]


def quantize(
    model: str | None,
    out: str,
    method: str,
    *,
    group_size: int | None = None,
    calibrate_file: str | None = None,
    revision: str | None = None,
    device: str = "auto",
    progress: Progress = lambda line: None,
) -> Summary:
    """Writes the folder `out`. All that can be refused is refused before it is made; config.json
    comes last, so that a folder that has one is whole."""
    chosen = make_method(method, group_size)
    folder = Path(out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"OUT {out!r} exists and is not an empty folder; give another name.")
    if calibrate_file is not None and not Path(calibrate_file).is_file():
        raise OptionError(f"--calibrate {calibrate_file!r} is not a file.")
    config = load_model_config(model, revision=revision)
    plan = _Plan(config, chosen)
    plan.check_space(folder)
    files = other_files(config)
    found = detect_device(device)
    if device not in ("auto", found.type):
        raise OptionError(f"--device {device!r} was not found; there is {found.type!r}.")
    place = torch.device(found.type)
    adjustments: Adjustments = {}
    if calibrate_file is not None:
        windows = read_windows(
            Path(calibrate_file),
            "--calibrate",
            load_tokenizer(config.source),
            min(CALIBRATION_WINDOW, config.max_position_tokens),
            CALIBRATION_TOKENS,
        )
        adjustments = calibrate(config, windows, chosen, plan.dtype, place, progress)
    folder.mkdir(parents=True, exist_ok=True)
    summary = plan.write(folder, adjustments, place, progress)
    for name, content in files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_text(content, encoding="utf-8")
    (folder / "config.json").write_text(_json(plan.config_json()), encoding="utf-8")
    return summary


class _Plan:
    """What becomes of each tensor of a model."""

    def __init__(self, config: ModelConfig, method: Method) -> None:
        self._config, self._method = config, method
        source = config.source
        if config.quantization is not None:
            raise ModelError(
                f"model {source.name!r} is quantised already (quantization_config in config.json); "
                "give the model that it was made from."
            )
        if config.model_type == "gpt2":
            raise ModelError(
                f"model {source.name!r} is a GPT2LMHeadModel, whose matrices are stored [inputs, "
                "outputs]; compressed-tensors has no name for such layers."
            )
        self.dtype = torch.float16 if config.dtype == "float16" else torch.bfloat16
        build = Build(self.dtype, torch.device("meta"), ONE_RANK, lambda path: Unquantized())
        self._model: CausalLM = model_class(config.architecture)(config, build)
        self._targets = weight_targets(self._model)
        as_stored = self._model.weight_map.as_stored
        for name, target in self._targets.items():
            if len(target.shape) == 3:
                raise ModelError(
                    f"model {source.name!r} has all experts in one tensor ({as_stored(name)}); "
                    "compressed-tensors has names for single matrices only."
                )
            if self._is_quantized(target):
                method.check_inputs(name, target.shape[1])
        self._exact: list[str] = []
        """Matrices of layers that are written as they are, by the names of their modules, or by
        patterns of these."""
        self._others: dict[str, TensorInfo] = {}
        """Tensors of other parts than the language model, which are copied."""
        if source.kind == "folder":
            self._others = {
                name: info
                for name, info in stored_tensors(source).items()
                if self._is_copied(self._model.weight_map.rename(name))
            }

    def _is_copied(self, name: str) -> bool:
        """Whether a tensor is of no use here, and still part of what is described: of vision, of
        layers that predict further tokens."""
        weight_map = self._model.weight_map
        is_repeated = name == weight_map.head or name.endswith(weight_map.ignored)
        return name not in self._targets and not is_repeated

    def check_space(self, folder: Path) -> None:
        needed = sum(map(self._num_bytes, self._targets.values()))
        needed += sum(ITEM_BYTES.get(one.dtype, 4) * one.count for one in self._others.values())
        existing = next(
            parent for parent in (folder, *folder.absolute().parents) if parent.exists()
        )
        free = shutil.disk_usage(existing).free
        if free < needed:
            raise OptionError(
                f"OUT {str(folder)!r} would take {needed:,} bytes, and {free:,} are free there; "
                "give a folder on another disk."
            )

    def _num_bytes(self, target: Target) -> int:
        if self._is_quantized(target):
            return self._method.num_bytes(*target.shape)
        return torch.empty(target.shape, device="meta").numel() * self.dtype.itemsize

    def write(
        self, folder: Path, adjustments: Adjustments, device: torch.device, progress: Progress
    ) -> Summary:
        missing, errors, num_before = dict(self._targets), dict[str, float](), 0
        num_tensors = TENSORS_OF_A_MATRIX * (len(missing) + 1) + len(self._others)
        writer = ShardWriter(folder, num_tensors)
        weight_map = self._model.weight_map
        try:
            for original, stored in iter_weights(self._config.source):
                name = weight_map.rename(original)
                target = missing.pop(name, None)
                if target is None:
                    if original in self._others:
                        assert isinstance(stored, Tensor), "folders have no blocks"
                        num_before += stored.nbytes
                        writer.add(original, stored)
                        self._ignore(original)
                    continue  # rotary frequencies, or a head that is tied
                progress(f"{len(self._targets) - len(missing)} of {len(self._targets)}: {name}")
                if not target.accepts_shape(tuple(stored.shape)):
                    raise ModelError(
                        f"{original} of {self._config.source.name} has the shape "
                        f"{list(stored.shape)}, expected {list(target.shape)}; check that "
                        "config.json belongs to these weights."
                    )
                weight = stored if isinstance(stored, Tensor) else stored[:, :]
                assert isinstance(weight, Tensor), "no blocks are kept"
                num_before += weight.nbytes
                adjustment = adjustments.get(name, Adjustment())
                if not self._is_quantized(target):
                    if isinstance(target.layer, (Linear, LatentLinear)) and weight.dim() == 2:
                        self._exact.append(original.removesuffix(".weight"))
                    adjusted = adjustment.apply(weight.to(device))
                    # What decides on experts is computed in float32, and stays as it is.
                    is_wide = target.parameter == "e_score_correction_bias"
                    writer.add(original, adjusted if is_wide else adjusted.to(self.dtype))
                    continue
                errors[name] = self._add(writer, original, weight.to(device), adjustment)
            if missing:
                raise ModelError(
                    f"the weights of {self._config.source.name} lack {len(missing)} tensors, among "
                    f"them {next(iter(missing))}; download the model again."
                )
            writer.finish()
        except BaseException:
            writer.discard()
            raise
        if self._config.source.kind == "gguf":
            num_before = self._config.source.path.stat().st_size
        return Summary(num_before, writer.num_bytes, errors)

    def _ignore(self, original: str) -> None:
        """Say that a tensor which was copied is not quantised; whole parts by a pattern, for their
        modules have other names in some versions of transformers."""
        weight_map = self._model.weight_map
        name = weight_map.rename(original)
        parts = (*weight_map.ignored_parts, *weight_map.draft_layers)
        part = next((one for one in parts if name.startswith((one, f"model.{one}"))), None)
        ignored = original.removesuffix(".weight")
        if part is not None:
            ignored = rf"re:(.*\.)?{re.escape(part)}"
        if ignored not in self._exact:
            self._exact.append(ignored)

    def _add(self, writer: ShardWriter, name: str, weight: Tensor, adjustment: Adjustment) -> float:
        weight = adjustment.apply(weight)
        importance = adjustment.importance
        try:
            made = self._method.round(weight, self.dtype, True, importance)
        except ModelError as error:
            raise ModelError(f"{name} of {self._config.source.name}: {error}") from None
        layer = name.removesuffix("weight")
        for parameter, tensor in self._method.tensors(made):
            writer.add(layer + parameter, tensor)
        return relative_error(weight, made, importance)

    def config_json(self) -> dict[str, Any]:
        source = self._config.source
        if source.kind == "gguf":
            raw = translate_gguf(GGUFFile(source.path))
        else:
            raw = read_json_object(source.path / "config.json")
        raw.pop("torch_dtype", None)
        raw["dtype"] = str(self.dtype).removeprefix("torch.")
        return {**raw, "quantization_config": self._method.config(self._exact)}

    def _is_quantized(self, target: Target) -> bool:
        """Routers are never rounded, nor what kernels take apart."""
        is_matrix = isinstance(target.layer, (Linear, ExpertLinear))
        is_router = target.layer.path.endswith(self._model.weight_map.routers)
        return is_matrix and not is_router and target.parameter == "weight"


def relative_error(weight: Tensor, made: QuantizedWeights, importance: Tensor | None) -> float:
    """See `Summary.errors`. In pieces, as dequantised weights take much memory."""
    counts = None if importance is None else importance.to(weight.device)
    num_rows = max(1, ELEMENTS_AT_ONCE // weight.shape[1])
    wrong = whole = 0.0
    for start in range(0, len(weight), num_rows):
        part = slice(start, start + num_rows)
        if isinstance(made, GroupedWeights):
            rows = replace(made, codes=made.codes[part], scales=made.scales[part]).dequantize()
        else:
            rows = replace(made, values=made.values[part], scales=made.scales[part]).dequantize()
        exact = weight[part].float()
        for_error, for_all = (rows - exact).square(), exact.square()
        wrong += float((for_error if counts is None else for_error * counts).sum())
        whole += float((for_all if counts is None else for_all * counts).sum())
    return (wrong / whole) ** 0.5 if whole else 0.0


def other_files(config: ModelConfig) -> dict[str, Path | str]:
    """All of a model but its weights: tokenizer, chat template, generation_config.json, licence;
    by name, where it lies or what is in it."""
    source = config.source
    if source.kind == "folder":
        return {
            file.name: file
            for file in sorted(source.path.iterdir())
            if file.is_file()
            and file.suffix not in NOT_COPIED
            and not file.name.endswith(".index.json")
            and file.name not in DESCRIBES_WEIGHTS
        }
    parts = read_gguf(GGUFFile(source.path).metadata, str(source.path))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= parts.special_tokens
    if parts.chat_template is not None:
        settings["chat_template"] = parts.chat_template
    settings["model_max_length"] = config.max_position_tokens
    files: dict[str, Path | str] = {
        "tokenizer.json": parts.backend.to_str(),
        "tokenizer_config.json": _json(settings),
    }
    if config.generation:
        files["generation_config.json"] = _json(config.generation)
    return files


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
