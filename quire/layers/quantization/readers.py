"""Matrices of quantised checkpoints, read from the tensors that stand for them.

Each format knows its tensors, which part of them a rank needs, and how codes lie in their words.
What is needed is brought to the device as it is stored, and unpacked there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from quire.config.quantization import REMEDY, GroupFormat, MatrixFormat, ScaledFormat
from quire.kernels.torch.quantized_weights import (
    GroupedWeights,
    InputRounding,
    QuantizedWeights,
    ScaledWeights,
)
from quire.layers.weights import Bring, Cut, Share, StoredTensor, TensorError, Weight
from quire.protocol.errors import ModelError

Tensors = Mapping[str, tuple[Weight, Bring]]
"""Those of one matrix, by the last parts of their names, with the way to the device."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WORDS = (torch.int32,)
SMALLEST_GROUP = 8
"""Where ranks cut groups into smaller ones, floats take no more memory."""
USUAL_WEIGHT = 0.02
"""Spread of random weights."""
SIZES_OF_OTHERS = "check that the sizes in config.json are those of these weights"
AWQ_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where the codes of eight outputs lie in a word."""


class Reader(Protocol):
    """One matrix [outputs, inputs] of a checkpoint in some format."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What stands for it."""
        ...

    def kept_format(self, cut: Cut) -> MatrixFormat | None:
        """That of a rank's part; None where it is kept as floats."""
        ...

    def nbytes(self, is_native: bool) -> int:
        """What it takes once it is packed, for a GPU or for the native library of a CPU."""
        ...

    def read(self, tensors: Tensors, cuts: Sequence[Cut]) -> list[Share | QuantizedWeights]:
        """The parts that a rank keeps."""
        ...


def make_reader(
    module: str, found: MatrixFormat, shape: tuple[int, int], in_stack: bool = False
) -> Reader:
    """Of a matrix with tensors of its own, or `in_stack` of one of those that share theirs."""
    if in_stack:
        if not isinstance(found, GroupFormat) or found.layout != "mxfp4":
            raise ModelError(
                f"{module}: matrices of several experts in one tensor are read from MXFP4, not "
                f"from {found}; {REMEDY}."
            )
        return BlocksReader(module, found, shape)
    if isinstance(found, ScaledFormat):
        return ScaledReader(module, found, shape)
    return _GROUP_READERS[found.layout](module, found, shape)


# --- groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupReader(ABC):
    """Codes of a few bits in groups of inputs."""

    module: str
    format: GroupFormat
    shape: tuple[int, int]

    scales_name: ClassVar[str] = "scales"
    order_name: ClassVar[str] = "g_idx"

    @property
    def group_size(self) -> int:
        return self.format.group_size or self.shape[1]

    @property
    def num_groups(self) -> int:
        return -(-self.shape[1] // self.group_size)

    def kept_format(self, cut: Cut) -> MatrixFormat | None:
        if len(range(self.shape[1])[cut.inputs]) == self.shape[1]:
            return self.format
        if self.format.is_shuffled:
            return None  # a rank has parts of most groups, which may have any size
        groups = torch.arange(self.shape[1]) // self.group_size
        size = common_size(groups[cut.inputs], self.group_size)
        if self._is_too_small(size):
            return None
        return replace(self.format, group_size=min(size, cut.shape[1]))

    def _is_too_small(self, size: int) -> bool:
        """Whether groups are kept as floats."""
        return size < min(SMALLEST_GROUP, self.group_size)

    def nbytes(self, is_native: bool) -> int:
        num_outputs, num_inputs = self.shape
        bits = self.format.bits
        by_group = (4 if is_native else 2) + (0 if self.format.is_symmetric else 1)
        if is_native:
            bits = 4 if bits <= 4 else 8
            # Groups are filled up to whole blocks.
            num_inputs += self.num_groups * (-min(self.group_size, num_inputs) % 32)
        order_bytes = 4 * num_inputs if self.format.is_shuffled else 0
        return num_outputs * (num_inputs * bits // 8 + self.num_groups * by_group) + order_bytes

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        stored = self._stored()
        if self.format.has_order:
            shape = (self.shape[1],)
            stored[self.order_name] = StoredTensor(shape, (torch.int32, torch.int64), self._number)
        return stored

    def _number(self, tensor: Tensor, generator: Generator) -> None:
        groups = torch.arange(len(tensor)) // self.group_size
        if self.format.is_shuffled:  # alike for all matrices with these inputs
            groups = groups[torch.randperm(len(groups), generator=Generator().manual_seed(0))]
        tensor.copy_(groups)

    @abstractmethod
    def _stored(self) -> dict[str, StoredTensor]:
        """All tensors but that of the order."""

    @abstractmethod
    def _codes(self, tensors: Tensors, outputs: slice, inputs: slice) -> Tensor:
        """uint8 [outputs, inputs]."""

    @abstractmethod
    def _scales(self, tensors: Tensors, outputs: slice) -> Tensor:
        """[outputs, groups]."""

    @abstractmethod
    def _zeros(self, tensors: Tensors, outputs: slice) -> Tensor | None:
        """uint8 [outputs, groups]."""

    def read(self, tensors: Tensors, cuts: Sequence[Cut]) -> list[Share | QuantizedWeights]:
        return [self._read(tensors, cut) for cut in cuts]

    def _read(self, tensors: Tensors, cut: Cut) -> Tensor | GroupedWeights:
        groups, order = self._groups(tensors)[cut.inputs], None
        if (groups.diff() < 0).any():
            order = groups.argsort(stable=True)
            groups = groups[order]
        size = common_size(groups, self.group_size)
        codes = self._codes(tensors, cut.outputs, cut.inputs)
        scales = self._scales(tensors, cut.outputs)
        self._check_finite(self.scales_name, scales)
        zeros = self._zeros(tensors, cut.outputs)
        if self.format.is_symmetric and zeros is not None:
            is_usual = bool((zeros == 1 << (self.format.bits - 1)).all())
            zeros = None if is_usual else zeros
        device = codes.device
        if order is not None:
            order = order.to(device)
            codes = codes[:, order]
        starts = groups[::size].to(device)
        weights = GroupedWeights(
            codes,
            self.format.bits,
            scales[:, starts],
            size,
            zeros=None if zeros is None else zeros[:, starts],
            order=None if order is None else order.int(),
            is_e2m1=self.format.layout == "mxfp4",
        )
        if self._is_too_small(size):
            return _padded(weights.dequantize(), cut.shape)
        return padded_groups(replace(weights, group_size=min(size, cut.shape[1])), cut.shape)

    def _groups(self, tensors: Tensors) -> Tensor:
        """That of each input, on the host."""
        if not self.format.has_order:
            return torch.arange(self.shape[1]) // self.group_size
        groups = _whole(tensors[self.order_name][0]).long().cpu()
        if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < self.num_groups:
            raise self._error(
                self.order_name,
                f"names groups from {int(groups.min())} to {int(groups.max())}, but there are "
                f"{self.num_groups} of {self.group_size} inputs each",
            )
        return groups

    def _check_finite(self, name: str, values: Tensor) -> None:
        _check_finite(f"{self.module}.{name}", values)

    def _error(self, name: str, problem: str, remedy: str | None = None) -> TensorError:
        return TensorError(f"{self.module}.{name}", problem, remedy)

    def _filled_scales(self, tensor: Tensor, generator: Generator) -> None:
        # Codes are equally likely.
        tensor.fill_(USUAL_WEIGHT * 12**0.5 / 2**self.format.bits)


@dataclass(frozen=True)
class AwqReader(GroupReader):
    """Eight outputs in a word, not in their order."""

    def _stored(self) -> dict[str, StoredTensor]:
        num_outputs, num_inputs = self.shape
        if num_outputs % 8:
            raise self._error(
                "qweight",
                f"would have {num_outputs} outputs, and AWQ packs a multiple of 8, such as "
                f"{num_outputs + -num_outputs % 8}",
                SIZES_OF_OTHERS,
            )
        return {
            "qweight": StoredTensor((num_inputs, num_outputs // 8), WORDS, random_bits),
            "qzeros": StoredTensor((self.num_groups, num_outputs // 8), WORDS, filled_codes(8, 4)),
            "scales": StoredTensor((self.num_groups, num_outputs), FLOATS, self._filled_scales),
        }

    def _codes(self, tensors: Tensors, outputs: slice, inputs: slice) -> Tensor:
        return self._nibbles(tensors["qweight"], inputs, outputs).t().contiguous()

    def _zeros(self, tensors: Tensors, outputs: slice) -> Tensor | None:
        return self._nibbles(tensors["qzeros"], slice(None), outputs).t().contiguous()

    def _scales(self, tensors: Tensors, outputs: slice) -> Tensor:
        stored, bring = tensors["scales"]
        return bring(_part(stored, slice(None), outputs)).t().contiguous()

    @staticmethod
    def _nibbles(stored: tuple[Weight, Bring], rows: slice, columns: slice) -> Tensor:
        words, bring = stored
        first, last = columns.start // 8, -(-columns.stop // 8)
        brought = bring(_part(words, rows, slice(first, last)))
        codes = unpack_bits(brought, 4).unflatten(1, (-1, 8))[..., AWQ_NIBBLES].flatten(1)
        return codes[:, columns.start - 8 * first : columns.stop - 8 * first]


@dataclass(frozen=True)
class GptqReader(GroupReader):
    """Inputs in words one after the other; zeros of outputs likewise."""

    def _stored(self) -> dict[str, StoredTensor]:
        num_outputs, num_inputs = self.shape
        bits = self.format.bits
        zeros = filled_codes((1 << (bits - 1)) - self.format.stores_zero_less_one, bits)
        return {
            "qweight": StoredTensor((num_words(num_inputs, bits), num_outputs), WORDS, random_bits),
            "qzeros": StoredTensor((self.num_groups, num_words(num_outputs, bits)), WORDS, zeros),
            "scales": StoredTensor((self.num_groups, num_outputs), FLOATS, self._filled_scales),
        }

    def _codes(self, tensors: Tensors, outputs: slice, inputs: slice) -> Tensor:
        return unpacked_down(tensors["qweight"], inputs, outputs, self.format.bits)

    def _zeros(self, tensors: Tensors, outputs: slice) -> Tensor | None:
        zeros = unpacked_along(tensors["qzeros"], slice(None), outputs, self.format.bits)
        if self.format.stores_zero_less_one:
            zeros = (zeros + 1) & (2**self.format.bits - 1)
        return zeros.t().contiguous()

    def _scales(self, tensors: Tensors, outputs: slice) -> Tensor:
        stored, bring = tensors["scales"]
        return bring(_part(stored, slice(None), outputs)).t().contiguous()


@dataclass(frozen=True)
class PackedReader(GroupReader):
    """Those of compressed-tensors: inputs in words one after the other, outputs first."""

    scales_name = "weight_scale"
    order_name = "weight_g_idx"

    def _stored(self) -> dict[str, StoredTensor]:
        num_outputs, num_inputs = self.shape
        bits, groups = self.format.bits, self.num_groups
        packed = (num_outputs, num_words(num_inputs, bits))
        stored = {
            "weight_packed": StoredTensor(packed, WORDS, random_bits),
            "weight_scale": StoredTensor((num_outputs, groups), FLOATS, self._filled_scales),
            "weight_shape": StoredTensor((2,), (torch.int64, torch.int32), self._filled_shape),
        }
        if not self.format.is_symmetric:
            shape = (num_words(num_outputs, bits), groups)
            zeros = filled_codes(1 << (bits - 1), bits, by_column=True)
            stored["weight_zero_point"] = StoredTensor(shape, WORDS, zeros)
        return stored

    def _filled_shape(self, tensor: Tensor, generator: Generator) -> None:
        tensor.copy_(torch.tensor(self.shape))

    def _read(self, tensors: Tensors, cut: Cut) -> Tensor | GroupedWeights:
        shape = _whole(tensors["weight_shape"][0]).tolist()
        if shape != list(self.shape):
            raise self._error("weight_shape", f"is {shape}, but the layer is {list(self.shape)}")
        return super()._read(tensors, cut)

    def _codes(self, tensors: Tensors, outputs: slice, inputs: slice) -> Tensor:
        return unpacked_along(tensors["weight_packed"], outputs, inputs, self.format.bits)

    def _zeros(self, tensors: Tensors, outputs: slice) -> Tensor | None:
        if self.format.is_symmetric:
            return None
        return (
            unpacked_down(tensors["weight_zero_point"], outputs, slice(None), self.format.bits)
            .t()
            .contiguous()
        )

    def _scales(self, tensors: Tensors, outputs: slice) -> Tensor:
        stored, bring = tensors["weight_scale"]
        return bring(_part(stored, outputs, slice(None)))


@dataclass(frozen=True)
class Mxfp4Reader(GroupReader):
    """Two floats of 4 bits in a byte, the lower half first; scales are exponents."""

    scales_name = "weight_scale"
    codes_name: ClassVar[str] = "weight_packed"

    def _stored(self) -> dict[str, StoredTensor]:
        num_outputs, num_inputs = self.shape
        exponents = StoredTensor((num_outputs, self.num_groups), (torch.uint8,), filled(127 - 7))
        packed = StoredTensor((num_outputs, num_inputs // 2), (torch.uint8,), random_bits)
        return {self.codes_name: packed, self.scales_name: exponents}

    def _codes(self, tensors: Tensors, outputs: slice, inputs: slice) -> Tensor:
        stored, bring = tensors[self.codes_name]
        first = inputs.start // 2
        rows = _whole(stored).flatten(1)
        brought = bring(rows[outputs, first : -(-inputs.stop // 2)])
        return unpack_bits(brought, 4)[:, inputs.start - 2 * first : inputs.stop - 2 * first]

    def _zeros(self, tensors: Tensors, outputs: slice) -> Tensor | None:
        return None

    def _scales(self, tensors: Tensors, outputs: slice) -> Tensor:
        stored, bring = tensors[self.scales_name]
        exponents = bring(_part(stored, outputs, slice(None)))
        scales = torch.exp2(exponents.float() - 127)
        return torch.where(exponents == 255, torch.nan, scales)


@dataclass(frozen=True)
class BlocksReader(Mxfp4Reader):
    """Those of gpt-oss, whose blocks of 32 inputs have a dimension of their own."""

    scales_name = "scales"
    codes_name = "blocks"

    def _stored(self) -> dict[str, StoredTensor]:
        if self.shape[1] % self.group_size:
            raise self._error(
                self.codes_name,
                f"would have {self.shape[1]} inputs, and MXFP4 packs a multiple of "
                f"{self.group_size}, such as {self.num_groups * self.group_size}",
                SIZES_OF_OTHERS,
            )
        stored = super()._stored()
        packed = stored[self.codes_name]
        by_block = (self.shape[0], self.num_groups, self.group_size // 2)
        return {**stored, self.codes_name: replace(packed, shape=by_block)}


_GROUP_READERS: dict[str, Callable[[str, GroupFormat, tuple[int, int]], GroupReader]] = {
    "awq": AwqReader,
    "gptq": GptqReader,
    "packed": PackedReader,
    "mxfp4": Mxfp4Reader,
}


def common_size(groups: Tensor, size: int) -> int:
    """The largest divisor of `size` such that as many neighbours, from the first on, are in one
    group each."""
    if not len(groups):
        return size
    for divisor in range(1, size + 1):
        candidate, rest = divmod(size, divisor)
        if rest:
            continue
        missing = -len(groups) % candidate
        chunks = torch.cat((groups, groups[-1:].expand(missing))).view(-1, candidate)
        if (chunks == chunks[:, :1]).all():
            return candidate
    raise AssertionError("groups of one are always equal")


def padded_groups(weights: GroupedWeights, shape: tuple[int, int]) -> GroupedWeights:
    """With weights of 0 up to `shape`."""
    if weights.shape == shape:
        return weights
    (num_outputs, num_inputs), size = weights.shape, weights.group_size
    num_groups = -(-shape[1] // size)
    codes = _padded(weights.codes, shape)
    filled_group = min(-(-num_inputs // size) * size, shape[1])
    if filled_group > num_inputs and not weights.is_e2m1:
        usual: Tensor | int = 1 << (weights.bits - 1)
        codes[:num_outputs, num_inputs:filled_group] = (
            usual if weights.zeros is None else weights.zeros[:, -1:]
        )
    order = weights.order
    if order is not None:
        order = torch.cat((order, torch.arange(num_inputs, shape[1]).to(order)))
    by_group = (shape[0], num_groups)
    return replace(
        weights,
        codes=codes,
        scales=_padded(weights.scales, by_group),
        zeros=None if weights.zeros is None else _padded(weights.zeros, by_group),
        order=order,
    )


def _padded(values: Tensor, shape: tuple[int, int]) -> Tensor:
    if tuple(values.shape) == shape:
        return values
    result = values.new_zeros(shape)
    result[: values.shape[0], : values.shape[1]] = values
    return result


# --- numbers of 8 bits ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledReader:
    """Numbers of 8 bits as they are, with scales."""

    module: str
    format: ScaledFormat
    shape: tuple[int, int]

    def nbytes(self, is_native: bool) -> int:
        if is_native and self._dtype == torch.float8_e4m3fn:
            numbers = self.shape[0] * self.shape[1]  # integers with scales of 2 bytes, or floats
            return 4 * numbers if self.format.inputs is None else numbers * 34 // 32
        height, width = self._grid
        has_rows = is_native or self._as_groups or self.format.strategy == "tensor"
        num_scales = (self.shape[0] if has_rows else height) * width
        num_bytes = 5 if self._as_groups and self.format.has_zeros else 4
        return self.shape[0] * self.shape[1] + num_bytes * num_scales

    @property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.format.dtype)
        return found

    @property
    def _grid(self) -> tuple[int, int]:
        """Rows and columns of scales."""
        if self.format.strategy == "tensor":
            return 1, 1
        if self.format.block is None:
            return self.shape[0], 1
        height, width = self.format.block
        return -(-self.shape[0] // height), -(-self.shape[1] // width)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        scalar = (1,)
        scale_dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)
        stored = {
            "weight": StoredTensor(self.shape, (self._dtype,), random_numbers),
            self.format.scale_name: StoredTensor(self._grid, scale_dtypes, self._filled_scales),
        }
        if self.format.has_zeros:
            # Some writers store zeros beside floats too.
            kinds = (torch.int8,) if self._dtype == torch.int8 else (torch.int8, self._dtype)
            stored["weight_zero_point"] = StoredTensor(self._grid, kinds, filled(0))
        if self.format.inputs == "static":
            stored["input_scale"] = StoredTensor(scalar, FLOATS, filled(0.05))
        if self.format.has_input_zero:
            stored["input_zero_point"] = StoredTensor(scalar, (torch.int8,), filled(0))
        return stored

    def _filled_scales(self, tensor: Tensor, generator: Generator) -> None:
        tensor.fill_(USUAL_WEIGHT / RANDOM_SPREAD)

    def kept_format(self, cut: Cut) -> MatrixFormat | None:
        return self.format

    def read(self, tensors: Tensors, cuts: Sequence[Cut]) -> list[Share | QuantizedWeights]:
        scales = self._floats(tensors, self.format.scale_name, self._grid)
        rounding = self._rounding(tensors)
        if self.format.has_zeros and self._dtype != torch.int8:
            self._check_no_zeros(tensors)
        return [self._read(tensors, cut, scales, rounding) for cut in cuts]

    def _check_no_zeros(self, tensors: Tensors) -> None:
        if _whole(tensors["weight_zero_point"][0]).float().any():
            raise TensorError(
                f"{self.module}.weight_zero_point", f"has values, but {self.format.dtype} has none"
            )

    def _floats(self, tensors: Tensors, name: str, shape: tuple[int, ...]) -> Tensor:
        stored, bring = tensors[name]
        values = bring(_whole(stored)).float().reshape(shape)
        _check_finite(f"{self.module}.{name}", values)
        return values

    def _rounding(self, tensors: Tensors) -> InputRounding | None:
        if self.format.inputs is None or self._as_groups:
            return None
        if self.format.inputs == "dynamic":
            block = self.format.block
            return InputRounding(self._dtype, group_size=None if block is None else block[1])
        scale = self._floats(tensors, "input_scale", ())
        if float(scale) <= 0:
            name = f"{self.module}.input_scale"
            raise TensorError(name, f"is {float(scale):g}, but inputs are divided by it")
        zero = None
        if self.format.has_input_zero:
            stored, bring = tensors["input_zero_point"]
            zero = bring(_whole(stored)).int().reshape(())
        return InputRounding(self._dtype, scale, zero)

    @property
    def _as_groups(self) -> bool:
        """Whether the weights are codes in groups of inputs, which may have zeros."""
        is_grouped = self.format.strategy == "group" or self.format.has_zeros
        return is_grouped and self._dtype == torch.int8

    def _by_output(self, outputs: slice) -> Tensor:
        """The row of `_grid` that each output has its scales in."""
        if self.format.strategy == "tensor":
            return torch.zeros(outputs.stop - outputs.start, dtype=torch.long)
        height = 1 if self.format.block is None else self.format.block[0]
        return torch.arange(outputs.start, outputs.stop) // height

    def _read(
        self, tensors: Tensors, cut: Cut, scales: Tensor, rounding: InputRounding | None
    ) -> QuantizedWeights:
        stored, bring = tensors["weight"]
        values = bring(_part(stored, cut.outputs, cut.inputs))
        if values.dtype == torch.float8_e4m3fn:
            _check_numbers(f"{self.module}.weight", values)
        if self._as_groups:
            return self._grouped(tensors, cut, values, scales)
        by_output = self._by_output(cut.outputs)
        values = _padded_bytes(values, cut.shape)
        block = self.format.block
        if block is None:
            scales = scales[by_output.to(scales.device), 0]
            return ScaledWeights(
                values, F.pad(scales, (0, cut.shape[0] - len(scales))), rounding=rounding
            )
        by_input = torch.arange(cut.inputs.start, cut.inputs.stop) // block[1]
        height, width = common_size(by_output, block[0]), common_size(by_input, block[1])
        rows, columns = by_output[::height].to(values.device), by_input[::width].to(values.device)
        grid = (-(-cut.shape[0] // height), -(-cut.shape[1] // width))
        if rounding is not None and rounding.scale is None:
            rounding = replace(rounding, group_size=width)
        return ScaledWeights(
            values, _padded(scales[rows][:, columns], grid), (height, width), rounding
        )

    def _grouped(
        self, tensors: Tensors, cut: Cut, values: Tensor, scales: Tensor
    ) -> GroupedWeights:
        size = self.shape[1] if self.format.block is None else self.format.block[1]
        groups = torch.arange(cut.inputs.start, cut.inputs.stop) // size
        common = common_size(groups, size)
        rows, starts = self._by_output(cut.outputs), groups[::common]
        places = rows.to(values.device)[:, None], starts.to(values.device)
        zeros = None
        if self.format.has_zeros:
            stored, bring = tensors["weight_zero_point"]
            zeros = _unsigned(bring(_whole(stored)).reshape(self._grid)[places])
        weights = GroupedWeights(
            _unsigned(values), 8, scales[places], min(common, cut.shape[1]), zeros
        )
        return padded_groups(weights, cut.shape)


RANDOM_SPREAD = 40.0
"""Of random numbers of 8 bits, well within what these can be."""


def _unsigned(values: Tensor) -> Tensor:
    """int8 with 128 added, as uint8."""
    return values.contiguous().view(torch.uint8) ^ 128


def _padded_bytes(values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Some operations do not exist for floats of 8 bits."""
    if tuple(values.shape) == shape:
        return values.contiguous()
    return _padded(values.contiguous().view(torch.uint8), shape).view(values.dtype)


# --- words ----------------------------------------------------------------------------------------


def num_words(count: int, bits: int) -> int:
    """Words of 32 bits for `count` codes."""
    return -(-count * bits // 32)


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Integers [..., n] -> their codes of `bits` bits, lowest first, uint8 [..., m]."""
    shape = (*words.shape[:-1], words.shape[-1] * words.element_size())
    stored = words.contiguous().view(-1).view(torch.uint8).view(shape)
    if bits == 8:
        return stored
    if bits == 3:  # three bytes have eight codes
        triples = stored.unflatten(-1, (-1, 3)).int()
        stored = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    count = 8 // bits if bits != 3 else 8
    shifts = torch.arange(count, device=words.device, dtype=stored.dtype) * bits
    codes = (stored.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)


def unpacked_along(stored: tuple[Weight, Bring], rows: slice, codes: slice, bits: int) -> Tensor:
    """Codes of words whose rows have them one after the other."""
    words, bring = stored
    wanted, inner = _covering(codes, bits)
    return unpack_bits(bring(_part(words, rows, wanted)), bits)[:, inner]


def unpacked_down(stored: tuple[Weight, Bring], codes: slice, columns: slice, bits: int) -> Tensor:
    """The same of columns; [columns, codes]."""
    words, bring = stored
    wanted, inner = _covering(codes, bits)
    return unpack_bits(bring(_part(words, wanted, columns)).t(), bits)[:, inner]


def _covering(codes: slice, bits: int) -> tuple[slice, slice]:
    """Words that have these codes, and where these are among theirs."""
    count, words = (32, 3) if bits == 3 else (32 // bits, 1)
    first, last = codes.start // count, -(-codes.stop // count)
    inner = slice(codes.start - first * count, codes.stop - first * count)
    return slice(first * words, last * words), inner


def _part(weight: Weight, rows: slice, columns: slice) -> Tensor:
    part = weight[rows, columns]
    assert isinstance(part, Tensor), "no format has blocks among its tensors"
    return part


def _whole(weight: Weight) -> Tensor:
    assert isinstance(weight, Tensor), "no format has blocks among its tensors"
    return weight


def _check_numbers(tensor: str, values: Tensor) -> None:
    """float8_e4m3fn has no infinities."""
    magnitudes = values.contiguous().view(torch.uint8) & 0x7F
    if magnitudes.numel() and int(magnitudes.max()) == 0x7F:
        raise TensorError(tensor, "has values that are no numbers")


def _check_finite(tensor: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise TensorError(tensor, "has values that are infinite or no numbers")


# --- random checkpoints ---------------------------------------------------------------------------


def filled(value: float) -> Callable[[Tensor, Generator], None]:
    """Writes one number."""

    def fill(tensor: Tensor, generator: Generator) -> None:
        tensor.fill_(value)

    return fill


def filled_codes(
    code: int, bits: int, by_column: bool = False
) -> Callable[[Tensor, Generator], None]:
    """Writes one code again and again into the words of each row, or column."""
    pattern = torch.tensor(list(sum(code << bits * i for i in range(8)).to_bytes(bits, "little")))

    def fill(tensor: Tensor, generator: Generator) -> None:
        target = tensor.t() if by_column else tensor
        count = target.shape[1] * target.element_size()
        row = pattern.repeat(-(-count // bits))[:count].to(torch.uint8).view(tensor.dtype)
        target.copy_(row.expand(target.shape))

    return fill


def random_bits(tensor: Tensor, generator: Generator) -> None:
    tensor.view(torch.uint8).random_(0, 256, generator=generator)


def random_numbers(tensor: Tensor, generator: Generator) -> None:
    if tensor.dtype == torch.int8:
        tensor.random_(-128, 128, generator=generator)
        return
    values = torch.empty(tensor.shape, dtype=torch.float16, device=tensor.device)
    tensor.copy_(values.normal_(0.0, RANDOM_SPREAD, generator=generator).clamp_(-448, 448))


# --- joining --------------------------------------------------------------------------------------


def join_alike(weights: Sequence[Share | QuantizedWeights]) -> list[Tensor | QuantizedWeights]:
    """Neighbours in one format become one matrix, each below the one before."""
    runs: list[list[Share | QuantizedWeights]] = []
    for one in weights:
        if runs and _are_alike(runs[-1][-1], one):
            runs[-1].append(one)
        else:
            runs.append([one])
    return [_joined(run) for run in runs]


def _are_alike(first: Share | QuantizedWeights, second: Share | QuantizedWeights) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return True
    if isinstance(first, GroupedWeights) and isinstance(second, GroupedWeights):
        return (
            first.bits == second.bits
            and first.group_size == second.group_size
            and first.is_e2m1 == second.is_e2m1
            and first.scales.dtype == second.scales.dtype
            and _equal(first.order, second.order)
        )
    if isinstance(first, ScaledWeights) and isinstance(second, ScaledWeights):
        fits = first.block is None or first.shape[0] % first.block[0] == 0
        return (
            fits
            and first.values.dtype == second.values.dtype
            and first.block == second.block
            and _round_alike(first.rounding, second.rounding)
        )
    return False


def _round_alike(first: InputRounding | None, second: InputRounding | None) -> bool:
    if first is None or second is None:
        return first is second
    return (
        first.dtype == second.dtype
        and first.group_size == second.group_size
        and _equal(first.scale, second.scale)
        and _equal(first.zero, second.zero)
    )


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _joined(run: list[Share | QuantizedWeights]) -> Tensor | QuantizedWeights:
    first = run[0]
    if isinstance(first, Tensor):
        return (
            first if len(run) == 1 else torch.cat([one for one in run if isinstance(one, Tensor)])
        )
    if isinstance(first, GroupedWeights):
        grouped = [one for one in run if isinstance(one, GroupedWeights)]
        zeros = None
        if any(one.zeros is not None for one in grouped):
            zeros = torch.cat([_explicit_zeros(one) for one in grouped])
        return replace(
            first,
            codes=_cat([one.codes for one in grouped]),
            scales=_cat([one.scales for one in grouped]),
            zeros=zeros,
        )
    assert isinstance(first, ScaledWeights)
    scaled = [one for one in run if isinstance(one, ScaledWeights)]
    values = _cat([one.values.view(torch.uint8) for one in scaled]).view(first.values.dtype)
    return replace(first, values=values, scales=_cat([one.scales for one in scaled]))


def _explicit_zeros(weights: GroupedWeights) -> Tensor:
    if weights.zeros is not None:
        return weights.zeros
    zeros = torch.full_like(weights.scales, 1 << (weights.bits - 1), dtype=torch.uint8)
    return zeros


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
