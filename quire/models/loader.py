"""Builds a model and streams its weights into place, or says exactly which tensors do not fit."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from zlib import crc32

import torch

from quire.config.model import ModelConfig
from quire.config.quantization import MatrixFormat
from quire.files.gguf import GGUFTensor
from quire.files.safetensors import TensorInfo
from quire.files.shards import DOWNLOAD_AGAIN
from quire.layers.attention.kv_scales import load_kv_scale
from quire.layers.parallel import Parallel
from quire.layers.quantization.choose import FormatsFor, choose_methods, largest_block
from quire.layers.weights import (
    Bring,
    Build,
    MatrixLayer,
    MethodFor,
    ShardError,
    ShardKey,
    StoredTensor,
    TensorError,
    Weight,
    WeightedLayer,
)
from quire.loading.gguf import stored_blocks
from quire.loading.upload import Upload, stays_here
from quire.loading.weights import file_of, iter_weights, stored_tensors
from quire.models.fusion import fuse
from quire.models.registry import CausalLM, model_class, weight_map_of
from quire.protocol.errors import ModelError

logger = logging.getLogger(__name__)

MAX_NAMED_TENSORS = 10
OF_QUANTIZED = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight")
"""What names of tensors end with where weights are quantised."""
ONE_RANK = Parallel(0, 1)


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes."""

    layer: WeightedLayer
    parameter: str
    shard_key: ShardKey
    transposed: bool
    stored: StoredTensor | None = None
    """Where it is one of several that stand for a matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        if self.stored is not None:
            shape = self.stored.shape
        else:
            shape = self.layer.checkpoint_shape(self.parameter, self.shard_key)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the parameter; None where the weight is not kept as one."""
        if self.stored is not None:
            return self.stored.dtypes[0]
        return self.layer.weight_dtype(self.parameter)

    @property
    def reads_blocks(self) -> bool:
        return isinstance(self.layer, MatrixLayer) and (
            self.layer.method.reads_blocks and self.parameter in self.layer.loaders
        )

    def accepts_shape(self, shape: tuple[int, ...]) -> bool:
        """Scales are stored with and without a dimension of their own."""
        if shape == self.shape or prod(shape) == 1 == prod(self.shape):
            return True
        return self.stored is not None and shape == tuple(n for n in self.shape if n != 1)

    def accepts_dtype(self, weight: Weight) -> bool:
        """Numbers are cast as they are loaded, but for those that would lose their fractions."""
        if self.stored is not None:
            return isinstance(weight, torch.Tensor) and weight.dtype in self.stored.dtypes
        is_whole = self.dtype is not None and not self.dtype.is_floating_point
        return not (is_whole and isinstance(weight, torch.Tensor) and weight.is_floating_point())

    def extra_bytes(self, stored: str | None) -> int:
        """Memory of the tensor beside the layer's parameters."""
        layer, key = self.layer, self.shard_key
        if not isinstance(layer, MatrixLayer) or self.parameter not in layer.loaders:
            return 0
        if self.stored is not None and self.parameter != next(iter(layer.stored[key])):
            return 0  # counted with the first tensor of the matrix
        return layer.method.extra_bytes(layer, key, stored)

    def fill_dummy(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if self.stored is not None:
            self.stored.fill(tensor, generator)
        else:
            self.layer.fill_dummy(self.parameter, tensor, generator)

    def load(self, weight: Weight, bring: Bring = stays_here) -> None:
        if self.transposed:
            assert isinstance(weight, torch.Tensor), "blocks cannot be transposed"
            weight, bring_stored = weight.mT, bring

            def bring(part: torch.Tensor) -> torch.Tensor:
                return bring_stored(part.mT).mT  # in the order of the file, which is quickest

        self.layer.load(self.parameter, self.shard_key, weight, bring)


def load_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str = "auto",
    parallel: Parallel = ONE_RANK,
    seed: int = 0,
    quantization: str | None = None,
    method_for: MethodFor | None = None,
    fused: bool = True,
    max_model_len: int | None = None,
) -> CausalLM:
    """The model of `config` with its weights, or this rank's share of them, on `device`.

    `load_format="dummy"` makes random weights instead: equal for equal seeds on one type of device.
    `method_for` takes the place of what follows from `quantization`. Layers that are not `fused`
    compute as their model's file says, step by step. Some rope scalings depend on `max_model_len`.
    """
    if method_for is None:
        method_for = _methods(config, quantization, dtype, device, load_format)
    block = largest_block(quantization, config.quantization)
    build = Build(dtype, torch.device(device), parallel, method_for, block, max_model_len)
    model = _make(config, build)
    others = _of_others(config, build)
    model.elsewhere = frozenset(name.rpartition(".")[0] for name in others)
    if load_format == "dummy":
        load_dummy_weights(model, build, seed)
    else:
        targets = weight_targets(model)

        def keeps_blocks(name: str) -> bool:
            target = targets.get(model.weight_map.rename(name))
            return target is not None and target.reads_blocks

        def skips(name: str) -> bool:
            name = model.weight_map.rename(name)
            return name in others or model.weight_map.is_elsewhere(name)

        weights = iter_weights(config.source, load_format, keeps_blocks, skips)
        bring = Upload(build.device) if build.device.type == "cuda" else stays_here
        load_weights(model, config, weights, bring)
    for layer in model.modules():
        if isinstance(layer, WeightedLayer):
            layer.finish_loading()
    _log_slower(model)
    if fused:
        fuse(model)
    return model.eval()


def _make(config: ModelConfig, build: Build) -> CausalLM:
    """The model without its weights."""
    try:
        return model_class(config.architecture)(config, build)
    except TensorError as error:
        file = config.source.path if config.quantization is None else config.quantization.file
        raise _in_file(error, config, file) from error


def _in_file(error: TensorError, config: ModelConfig, file: Path) -> ModelError:
    """The error with all that its reader needs."""
    named = weight_map_of(config).as_stored(error.tensor)
    return ModelError(f"{file}: tensor {named} {error.problem}; {error.remedy or DOWNLOAD_AGAIN}.")


def _log_slower(model: CausalLM) -> None:
    """Layers that do not compute as fast as others, those with one name together."""
    counts: Counter[tuple[str, str]] = Counter()
    for layer in model.modules():
        if isinstance(layer, MatrixLayer):
            name = re.sub(r"\.\d+\.", ".*.", layer.path)
            counts.update((name, reason) for reason in set(layer.why_slower))
    for (name, reason), count in counts.items():
        layers = "1 layer" if count == 1 else f"{count} layers"
        logger.info("slower: %s (%s): %s", name, layers, reason)


def _methods(
    config: ModelConfig,
    quantization: str | None,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str,
) -> MethodFor:
    formats_for = _formats_for(config, load_format)
    weights = weight_map_of(config)
    return choose_methods(
        quantization, dtype, device, formats_for, _ends(config), weights.routers, weights.dense
    )


def _ends(config: ModelConfig) -> list[str]:
    """Paths of the embedding and the head."""
    weight_map = weight_map_of(config)
    return [name.removesuffix(".weight") for name in (weight_map.embedding, weight_map.head)]


def _formats_for(config: ModelConfig, load_format: str) -> FormatsFor | None:
    """The formats of a quantised checkpoint's matrices: what its files have, or, without files,
    what its configuration says of all but embeddings and head."""
    quantized = config.quantization
    if quantized is None:
        return None
    weight_map = weight_map_of(config)
    ends = _ends(config)
    by_module: dict[str, dict[str, TensorInfo]] = {}
    if load_format != "dummy":
        by_module = {name: {} for name in ends}
        for name, info in stored_tensors(config.source, load_format).items():
            module, _, own_name = weight_map.rename(name).rpartition(".")
            by_module.setdefault(module, {})[own_name] = info

    def formats_for(path: str) -> dict[ShardKey, tuple[str, MatrixFormat | None]]:
        formats: dict[ShardKey, tuple[str, MatrixFormat | None]] = {}
        for key, module in weight_map.modules(path).items():
            tensors = by_module.get(module)
            is_plain = module in ends and not tensors
            stored = weight_map.as_stored(module)
            formats[key] = module, None if is_plain else quantized.format_of(stored, tensors)
        return formats

    return formats_for


def _of_others(config: ModelConfig, build: Build) -> set[str]:
    """Names of the tensors that only other stages have, or ranks with other experts."""
    if build.stage.count == 1 and not build.parallel.expert_parallel:
        return set()
    everywhere = replace(build, device=torch.device("meta"), parallel=ONE_RANK)
    here = replace(build, device=torch.device("meta"))
    whole, own = (_make(config, build) for build in (everywhere, here))
    targets = weight_targets(whole)
    names = targets.keys() - weight_targets(own).keys()
    # Biases of zeros beside quantised matrices are for the ranks that have these.
    names |= {_bias_of(name) for name in names if targets[name].stored is not None}
    weight_map = whole.weight_map
    if config.tie_word_embeddings and weight_map.embedding in names:
        names.add(weight_map.head)  # a copy that a checkpoint may have, to be compared elsewhere
    return names


def count_weight_bytes(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str = "auto",
    parallel: Parallel = ONE_RANK,
    quantization: str | None = None,
    method_for: MethodFor | None = None,
) -> int:
    """What the weights will take as `load_model` keeps them, from the configuration and, of a GGUF
    file, the kinds of its tensors."""
    if method_for is None:
        method_for = _methods(config, quantization, dtype, device, load_format)
    block = largest_block(quantization, config.quantization)
    build = Build(dtype, torch.device("meta"), parallel, method_for, block)
    model = _make(config, build)
    blocks: dict[str, GGUFTensor] = {}
    if config.source.kind == "gguf" and load_format != "dummy":
        rename = model.weight_map.rename
        found_blocks = stored_blocks(config.source.path)
        blocks = {rename(name): tensor for name, tensor in found_blocks.items()}
    count = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for name, target in weight_targets(model).items():
        found = blocks.get(name) if target.reads_blocks else None
        if found is not None and found.shape != target.shape:
            found = None  # to be told by name when it is loaded
        count += target.extra_bytes(None if found is None else found.type)
    return count


def held_weight_bytes(model: CausalLM) -> int:
    """What the weights of a loaded model take, in whatever format they are kept."""
    tensors = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    layers = [layer for layer in model.modules() if isinstance(layer, MatrixLayer)]
    # A tied head has the very matrices of the embedding.
    matrices = {id(matrix): matrix for layer in layers for matrix in layer.matrices}
    stacked = sum(layer.stacked.nbytes for layer in layers if layer.stacked is not None)
    return tensors + stacked + sum(matrix.nbytes for matrix in matrices.values())


def weight_targets(model: CausalLM) -> dict[str, Target]:
    """Every tensor that a checkpoint of `model` must hold, by its name there."""
    weight_map = model.weight_map
    targets: dict[str, Target] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, WeightedLayer):
            continue
        assert layer.path == path, f"the layer at {path} was built as {layer.path!r}"
        for parameter in layer.axes:
            for shard_key, module in weight_map.modules(path).items():
                if not layer.keeps(parameter, shard_key):
                    continue
                for tensor, stored in layer.stored_tensors(parameter, shard_key).items():
                    name = f"{module}.{tensor}"
                    transposed = name.endswith(weight_map.transposed)
                    targets[name] = Target(layer, tensor, shard_key, transposed, stored)
    return targets


def load_weights(
    model: CausalLM,
    config: ModelConfig,
    weights: Iterable[tuple[str, Weight]],
    bring: Bring = stays_here,
) -> None:
    """Streams (checkpoint name, tensor) pairs into `model`, holding on to none of the tensors.

    `bring` carries what this rank keeps of a tensor to the model's device; there it is cast and
    put into place.
    """
    weight_map = model.weight_map
    missing = weight_targets(model)
    quantized = {name.rpartition(".")[0] for name, one in missing.items() if one.stored is not None}
    extra: list[str] = []
    misshapen: list[str] = []
    mistyped: list[str] = []
    tied = (weight_map.embedding, weight_map.head) if config.tie_word_embeddings else ()
    tied_rows: dict[str, torch.Tensor] = {}
    for original_name, tensor in weights:
        name = weight_map.rename(original_name)
        target = missing.pop(name, None)
        if name in tied:
            tied_rows[name] = _some_rows(tensor)
        try:
            if target is None:
                is_known = name in tied_rows or weight_map.ignores(name)
                is_known = is_known or _is_no_bias(name, tensor, quantized)
                if not is_known and not _is_kv_scale(model, config, name, tensor):
                    extra.append(original_name)
            elif not target.accepts_dtype(tensor):
                expected = f"expected {target.dtype}, found {_dtype(tensor)}"
                mistyped.append(f"{original_name} ({expected})")
            elif not target.accepts_shape(tuple(tensor.shape)):
                found = list(tensor.shape)
                misshapen.append(f"{original_name} (expected {list(target.shape)}, found {found})")
            else:
                target.load(tensor, bring)
        except TensorError as error:
            file = file_of(config.source, error.tensor, weight_map.rename)
            raise _in_file(error, config, file) from error
        except ShardError as error:
            assert target is not None
            modules = weight_map.modules(target.layer.path)
            found_name = f"{modules.get(error.shard_key) or modules[()]}.weight"
            file = file_of(config.source, found_name, weight_map.rename)
            raise _in_file(TensorError(found_name, error.problem), config, file) from error
    problems = [
        _listed("missing", [weight_map.as_stored(name) for name in missing]),
        _listed("not part of the model", extra),
        _listed("of the wrong shape", misshapen),
        _listed("of the wrong type", mistyped),
    ]
    if config.quantization is None and any(name.endswith(OF_QUANTIZED) for name in extra):
        problems.append(
            "the weights are quantised, but config.json has no quantization_config "
            "that explains them"
        )
    if len(tied_rows) == 2 and not torch.equal(*tied_rows.values()):
        problems.append(
            f"{weight_map.head} differs from {weight_map.embedding} although tie_word_embeddings "
            f"is true (if the weights are right, set it to false by hf_overrides)"
        )
    _refuse(config, problems)


def check_tensors(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str = "auto",
    quantization: str | None = None,
) -> None:
    """Refuses files that lack a tensor of the model, or have one of another shape, by their
    headers."""
    method_for = _methods(config, quantization, dtype, device, load_format)
    build = Build(dtype, torch.device("meta"), ONE_RANK, method_for)
    model = _make(config, build)
    weight_map, missing, misshapen = model.weight_map, weight_targets(model), []
    for stored_name, info in stored_tensors(config.source, load_format).items():
        target = missing.pop(weight_map.rename(stored_name), None)
        if target is not None and not target.accepts_shape(info.shape):
            shapes = f"expected {list(target.shape)}, found {list(info.shape)}"
            misshapen.append(f"{stored_name} ({shapes})")
    absent = _listed("missing", [weight_map.as_stored(name) for name in missing])
    _refuse(config, [absent, _listed("of the wrong shape", misshapen)])


def _refuse(config: ModelConfig, problems: list[str]) -> None:
    """Says what does not fit, if anything."""
    if any(problems):
        raise ModelError(
            f"The weights of {config.source.name} do not fit {config.architecture}: "
            f"{'; '.join(filter(None, problems))}. Check that config.json belongs to these weights "
            f"and that the download is complete."
        )


def _bias_of(name: str) -> str:
    """The bias beside a tensor of a module."""
    return f"{name.rpartition('.')[0]}.bias"


def _is_no_bias(name: str, tensor: Weight, quantized: set[str]) -> bool:
    """Some packers write a bias of zeros for each matrix."""
    module, _, own_name = name.rpartition(".")
    is_bias = own_name == "bias" and module in quantized
    return is_bias and isinstance(tensor, torch.Tensor) and not tensor.any()


def _dtype(weight: Weight) -> str:
    return str(weight.dtype) if isinstance(weight, torch.Tensor) else "blocks"


def _is_kv_scale(model: CausalLM, config: ModelConfig, name: str, tensor: Weight) -> bool:
    return isinstance(tensor, torch.Tensor) and load_kv_scale(
        model, name, tensor, config.num_kv_heads
    )


def _some_rows(weight: Weight) -> torch.Tensor:
    """Enough of a matrix to tell it from another one, in memory of its own."""
    some = weight[:: max(1, weight.shape[0] // 64), :]
    return (some if isinstance(some, torch.Tensor) else some.rows).clone()


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    named = ", ".join(names[:MAX_NAMED_TENSORS])
    more = len(names) - MAX_NAMED_TENSORS
    rest = f", and {more} more" if more > 0 else ""
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {what}: {named}{rest}"


def load_dummy_weights(model: CausalLM, build: Build, seed: int) -> None:
    """Random weights, made on the device one whole tensor at a time. They follow from the seed and
    the tensor's name, so that all ranks agree."""
    generator = torch.Generator(build.device)
    for name, target in weight_targets(model).items():
        generator.manual_seed(crc32(f"{seed} {name}".encode()))
        tensor = torch.empty(target.shape, dtype=target.dtype or build.dtype, device=build.device)
        target.fill_dummy(tensor, generator)
        target.load(tensor)
