"""A matrix of `GroupedWeights` on a GPU, packed for the kernels of `grouped_product`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from quire.kernels import dispatch
from quire.kernels.hopper.overlap import launch_options
from quire.kernels.torch.quantized_weights import GroupedWeights
from quire.kernels.triton.grouped_product import _dequantize_kernel, _product_kernel

FIELDS = 8
RUNS = (64, 32, 16)
"""Adjacent inputs of a field, the quickest first; tensor cores take at least 16."""
MAX_PADDING = 1 / 16
"""Of the inputs, before a shorter run is taken."""
WORKSPACE_BYTES = 128 << 20
MAX_TILES = 1 << 16
"""Of a product whose inputs are split."""
LEAST_SHARED_BYTES = 64 << 10
"""Of GPUs that are known: Turing's, and AMD's."""
MAX_VECTORS = 8
MAX_TOKENS_IN_REGISTERS = 1024
"""Beyond, numbers that were written to memory once pay."""


@cache
def is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have."""
    if device.type != "cuda":
        return LEAST_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_BYTES)


@cache
def multiplies_ahead(device: torch.device) -> bool:
    """Whether a product goes on while the next one is prepared, so that it holds its inputs for
    longer: that of Hopper and of Blackwell's large GPUs."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class Workspace:
    """Memory that all matrices of a device use one after the other."""

    _by_device: ClassVar[WeakValueDictionary[torch.device, Workspace]] = WeakValueDictionary()

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.counts = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, device: torch.device) -> Workspace:
        found = cls._by_device.get(device)
        if found is None:
            found = cls._by_device[device] = cls(device)
        return found


class Tile(NamedTuple):
    """What a program of a product computes, and with how many warps."""

    outputs: int
    tokens: int
    num_warps: int
    num_stages: int


class VectorTile(NamedTuple):
    """What a program computes of a product with few tokens, and how many spans at a time."""

    outputs: int
    parts: int
    tokens: int
    num_warps: int
    width: int = 4


class StreamTile(NamedTuple):
    """How many spans at a time a program computes of 16 outputs with few tokens, each by a warp of
    its own; how many steps are read ahead, and how many programs of a multiprocessor go on from
    tile to tile."""

    parts: int
    stages: int
    programs: int
    registers: int | None = None
    """Of a thread; None: as the compiler likes."""

    outputs: ClassVar[int] = 16
    tokens: ClassVar[int] = 8


class HopperTile(NamedTuple):
    """64 or 128 outputs and some tokens."""

    groups: int
    tokens: int
    x_fields: int
    x_stages: int
    stages: int
    splits: int = 1

    @property
    def registers(self) -> int:
        """Of a thread when the kernel starts; two programs of 64 outputs share a multiprocessor."""
        return 168 if self.groups == 2 else 128

    def sum_bytes(self, num_tokens: int, num_outputs: int) -> int:
        """Of what the programs of a split find."""
        outputs = 64 * self.groups
        tiles = triton.cdiv(num_tokens, self.tokens) * triton.cdiv(num_outputs, outputs)
        return 4 * tiles * self.tokens * outputs


FEWEST_TOKENS: VectorTile | StreamTile = VectorTile(16, 4, 8, 4, 2)
"""Up to `MAX_VECTORS`. Streams read further ahead, but no GPU has run them yet."""
FEW_TOKENS = (HopperTile(1, 16, 8, 2, 4), HopperTile(1, 32, 4, 3, 3), HopperTile(1, 64, 4, 2, 2))
MANY_TOKENS = (
    # Programs at once, and microseconds of one with 4,096 inputs.
    (HopperTile(1, 64, 4, 2, 2), 264, 18),
    (HopperTile(2, 128, 2, 3, 2), 132, 27),
    (HopperTile(2, 256, 1, 4, 2), 132, 48),
)
"""As measured on an H200."""


@cache
def _hopper_tile(num_tokens: int, num_outputs: int, num_spans: int) -> HopperTile:
    for tile in FEW_TOKENS:
        if num_tokens <= tile.tokens:
            splits = min(264 // triton.cdiv(num_outputs, 64), num_spans // 4, 4)
            return tile._replace(splits=max(1, splits))

    def cost(choice: tuple[HopperTile, int, int], splits: int) -> float:
        tile, at_once, microseconds = choice
        if splits > 1 and splits * tile.sum_bytes(num_tokens, num_outputs) > WORKSPACE_BYTES:
            return float("inf")
        tiles = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_outputs, 64 * tile.groups)
        adding = 2 + splits * num_tokens * num_outputs * 8 / 2e6 if splits > 1 else 0
        waves: float = triton.cdiv(tiles * splits, at_once)
        if tile.groups == 1 and tiles * splits <= at_once // 2:
            waves = 2 / 3  # a program with a multiprocessor of its own
        return waves * microseconds * num_spans / 8 / splits + adding

    choices = [(choice, splits) for splits in (1, 2) for choice in MANY_TOKENS]
    (tile, *_), splits = min(choices, key=lambda one: cost(*one))
    return tile._replace(splits=min(splits, num_spans))


@dataclass(frozen=True)
class GroupedMatrix:
    """Weights [outputs, inputs] of a few bits."""

    num_outputs: int
    num_inputs: int
    run: int
    group_runs: int
    """Runs of a group, a divisor or multiple of 8."""
    low_bits: int
    high_bits: int
    low: Tensor
    """Integers [spans, outputs, run] of 8 * low_bits; field j of element r is input j * run + r of
    a span."""
    high: Tensor | None
    """The upper bits of codes, if they are not 1, 2 or 4."""
    scales: Tensor
    """[groups, outputs]."""
    zeros: Tensor | None
    minima: Tensor | None
    zero: int
    """Of all groups, without `zeros`."""
    order: Tensor | None
    is_e2m1: bool
    dtype: torch.dtype
    """Of `rows`."""
    workspace: Workspace

    handle = None

    @property
    def nbytes(self) -> int:
        tensors = (one for one in vars(self).values() if isinstance(one, Tensor))
        return sum(tensor.nbytes for tensor in tensors)

    def multiply(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if self.order is not None:
            x = x[:, self.order]
        if out is None:
            out = torch.empty((len(x), self.num_outputs), dtype=x.dtype, device=x.device)
        if len(x) > MAX_TOKENS_IN_REGISTERS:
            self.multiply_dequantized(x, bias, out)
        elif not self._runs_on_hopper(x, out):
            self.multiply_tiled(x, bias, out, self._tile(len(x)))
        elif len(x) <= MAX_VECTORS:
            self.multiply_few(x, bias, out, FEWEST_TOKENS)
        else:
            tile = _hopper_tile(len(x), self.num_outputs, len(self.low))
            self.multiply_on_hopper(x, bias, out, tile)
        return out

    def multiply_few(
        self,
        x: Tensor,
        bias: Tensor | None,
        out: Tensor,
        tile: VectorTile | StreamTile,
        gated: bool = False,
    ) -> None:
        """Of up to `MAX_VECTORS` tokens."""
        if isinstance(tile, StreamTile):
            self.multiply_streamed(x, bias, out, tile, gated)
        else:
            self.multiply_vectors(x, bias, out, tile, gated)

    def _runs_on_hopper(self, x: Tensor, out: Tensor) -> bool:
        return (
            self.unpacks_natively(x.dtype)
            and is_hopper(x.device)
            and self.run == 64
            and all(tensor.data_ptr() % 16 == 0 for tensor in (x, out))
            and x.stride(0) % 8 == 0
        )

    def multiply_normal(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        bias: Tensor | None = None,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        normal, total = dispatch.rms_norm(x, norm_weight, eps, residual)
        if gated and len(x) <= MAX_VECTORS and self._runs_on_hopper(normal, normal):
            if self.order is not None:
                normal = normal[:, self.order]
            shape = len(x), self.num_outputs // 2
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
            self.multiply_few(normal, bias, out, FEWEST_TOKENS, gated)
            return out, total
        out = self.multiply(normal, bias)
        return dispatch.silu_and_mul(out) if gated else out, total

    def rows(self, ids: Tensor) -> Tensor:
        shape = (len(ids), self.num_inputs)
        out = torch.empty(shape, dtype=self.dtype, device=ids.device)
        self._dequantize(out, ids)
        if self.order is None:
            return out
        return torch.empty_like(out).index_copy_(1, self.order.long(), out)

    def _tile(self, num_tokens: int) -> Tile:
        if num_tokens <= 8:
            return Tile(16, 8, 1, 3)
        if num_tokens <= 16:
            return Tile(16, 16, 1, 3)
        tiles = (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2))
        available = shared_bytes(self.low.device)
        return next((one for one in tiles if self.buffer_bytes(one) <= available), tiles[-1])

    def buffer_bytes(self, tile: Tile) -> int:
        """Of shared memory, for spans that are on their way and 16-bit inputs."""
        elements = self.low.element_size() + (0 if self.high is None else self.high.element_size())
        codes, inputs = tile.outputs * elements, FIELDS * tile.tokens * 2
        held = tile.num_stages if multiplies_ahead(self.low.device) else tile.num_stages - 1
        return self.run * ((tile.num_stages - 1) * codes + held * inputs)

    def options(self) -> dict[str, Any]:
        return {
            "LOW_BITS": self.low_bits,
            "HIGH_BITS": self.high_bits,
            "IS_E2M1": self.is_e2m1,
            "ZERO": self.zero,
            "RUN": self.run,
            "GROUP_RUNS": self.group_runs,
        }

    def multiply_tiled(self, x: Tensor, bias: Tensor | None, out: Tensor, tile: Tile) -> None:
        """By programs that turn codes into numbers in registers."""
        tiles = triton.cdiv(len(x), tile.tokens) * triton.cdiv(self.num_outputs, tile.outputs)
        _product_kernel[(tiles,)](
            x,
            self.low,
            self.high,
            self.scales,
            self.zeros,
            self.minima,
            bias,
            out,
            len(x),
            self.num_outputs,
            self.num_inputs,
            len(self.low),
            x.stride(0),
            out.stride(0),
            OUTPUTS=tile.outputs,
            TOKENS=tile.tokens,
            NATIVE=self.unpacks_natively(x.dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **self.options(),
            **launch_options(out),
        )

    def multiply_vectors(
        self,
        x: Tensor,
        bias: Tensor | None,
        out: Tensor,
        tile: VectorTile,
        gated: bool = False,
    ) -> None:
        """Of few tokens."""
        from quire.kernels.hopper.grouped_vectors import vectors_kernel

        vectors_kernel[(triton.cdiv(self.num_outputs, tile.outputs),)](
            x,
            self.low,
            self.scales,
            self.zeros,
            self.minima,
            bias,
            out,
            len(x),
            self.num_outputs,
            self.num_inputs,
            len(self.low),
            x.stride(0),
            out.stride(0),
            ZERO=self.zero,
            RUN=self.run,
            GROUP_RUNS=self.group_runs,
            PARTS=tile.parts,
            OUTPUTS=tile.outputs,
            TOKENS=tile.tokens,
            IS_GATED=gated,
            WIDTH=tile.width,
            IS_WHOLE=self.num_inputs % (FIELDS * self.run * tile.parts) == 0,
            num_warps=tile.num_warps,
            **launch_options(out),
        )

    def multiply_streamed(
        self, x: Tensor, bias: Tensor | None, out: Tensor, tile: StreamTile, gated: bool = False
    ) -> None:
        """Of few tokens, by programs that go on from tile to tile."""
        from quire.kernels.hopper import grouped_stream

        words_held, inputs_held = grouped_stream.held_by_threads(tile.parts, self.run)
        options = {} if tile.registers is None else {"maxnreg": tile.registers}
        at_once = tile.programs * multiprocessors(out.device)
        grouped_stream.stream_kernel[(min(triton.cdiv(self.num_outputs, tile.outputs), at_once),)](
            x,
            grouped_stream.words_descriptor(self.low, tile.parts, tile.outputs, gated),
            self.scales,
            self.zeros,
            self.minima,
            bias,
            out,
            len(x),
            self.num_outputs,
            self.num_inputs,
            len(self.low),
            x.stride(0),
            out.stride(0),
            ZERO=self.zero,
            GROUP_RUNS=self.group_runs,
            TOKENS=tile.tokens,
            STAGES=tile.stages,
            WORDS_HELD=words_held,
            INPUTS_HELD=inputs_held,
            IS_ONE=len(x) == 1,
            IS_WHOLE=self.num_inputs % (FIELDS * self.run * tile.parts) == 0,
            num_warps=tile.parts,
            **options,
            **launch_options(out),
        )

    def multiply_on_hopper(
        self, x: Tensor, bias: Tensor | None, out: Tensor, tile: HopperTile
    ) -> None:
        from quire.kernels.hopper.grouped_product import descriptors, product_kernel

        outputs = 64 * tile.groups
        tiles = triton.cdiv(len(x), tile.tokens) * triton.cdiv(self.num_outputs, outputs)
        product_kernel[(tiles, tile.splits)](
            *descriptors(x, self.low.view(-1, self.run), tile.tokens, outputs),
            self.scales,
            self.zeros,
            self.minima,
            bias,
            out,
            self.workspace.memory.view(torch.float32),
            self.workspace.counts,
            len(x),
            self.num_outputs,
            len(self.low),
            out.stride(0),
            tile.splits,
            ZERO=self.zero,
            GROUP_RUNS=self.group_runs,
            IS_SPLIT=tile.splits > 1,
            X_STAGES=tile.x_stages,
            X_FIELDS=tile.x_fields,
            STAGES=tile.stages,
            GROUPS=tile.groups,
            REGISTERS=240,
            LOAD_REGISTERS=24,
            num_warps=4,
            maxnreg=tile.registers,
            **launch_options(out),
        )

    def unpacks_natively(self, dtype: torch.dtype) -> bool:
        is_plain = self.low_bits == 4 and self.high is None and not self.is_e2m1
        if not is_plain or not self.low.is_cuda or torch.version.hip is not None:
            return False
        return dtype == torch.float16 or (dtype == torch.bfloat16 and is_hopper(self.low.device))

    def multiply_dequantized(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """By cuBLAS, of as many outputs at a time as the workspace holds."""
        memory = self.workspace.memory.view(x.dtype)
        step = min(self.num_outputs, len(memory) // self.num_inputs)
        step = triton.cdiv(self.num_outputs, triton.cdiv(self.num_outputs, step))
        for first in range(0, self.num_outputs, step):
            columns = slice(first, min(first + step, self.num_outputs))
            shape = columns.stop - first, self.num_inputs
            weight = memory[: shape[0] * shape[1]].view(shape)
            self._dequantize(weight, first_row=first)
            torch.mm(x, weight.t(), out=out[:, columns])
        if bias is not None:
            out += bias

    def _dequantize(self, out: Tensor, ids: Tensor | None = None, first_row: int = 0) -> None:
        outputs = 16
        _dequantize_kernel[(triton.cdiv(len(out), outputs), len(self.low))](
            ids,
            self.low,
            self.high,
            self.scales,
            self.zeros,
            self.minima,
            out,
            first_row,
            len(out),
            self.num_outputs,
            self.num_inputs,
            OUTPUTS=outputs,
            num_warps=4,
            **self.options(),
            **launch_options(out),
        )


def can_pack(weights: GroupedWeights) -> bool:
    """Whether groups consist of whole runs."""
    return _has_one_group(weights) or weights.group_size % RUNS[-1] == 0


def _has_one_group(weights: GroupedWeights) -> bool:
    return weights.group_size >= weights.shape[1]


def pack_grouped(weights: GroupedWeights, dtype: torch.dtype) -> GroupedMatrix:
    """The matrix of weights that `can_pack` accepts; its `rows` are of this dtype."""
    num_outputs, num_inputs = weights.shape
    one_group = _has_one_group(weights)
    group_size = weights.group_size
    chosen = _choose_run(num_inputs, None if one_group else group_size)
    num_spans = triton.cdiv(num_inputs, FIELDS * chosen)
    group_runs = FIELDS * num_spans if one_group else group_size // chosen
    low_bits, high_bits = PLANES[weights.bits]
    by_group = _by_group(group_runs, num_spans, one_group)
    return GroupedMatrix(
        num_outputs,
        num_inputs,
        chosen,
        by_group.runs,
        low_bits,
        high_bits,
        _plane(weights.codes, 0, low_bits, chosen),
        _plane(weights.codes, low_bits, high_bits, chosen) if high_bits else None,
        by_group.expand(_narrowed(weights.scales)),
        None if weights.zeros is None else by_group.expand(weights.zeros),
        None if weights.minima is None else by_group.expand(_narrowed(weights.minima)),
        0 if weights.is_e2m1 or weights.minima is not None else 1 << (weights.bits - 1),
        weights.order,
        weights.is_e2m1,
        dtype,
        Workspace.of(weights.codes.device),
    )


PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 6: (4, 2), 8: (4, 4)}
"""Bits of codes in each of their planes."""
ELEMENTS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _choose_run(num_inputs: int, group_size: int | None) -> int:
    fitting = [run for run in RUNS if group_size is None or group_size % run == 0]
    for run in fitting:
        if -num_inputs % (FIELDS * run) <= MAX_PADDING * num_inputs:
            return run
    return fitting[-1]


class _by_group(NamedTuple):
    """How scales of groups become scales of groups that divide a span or consist of spans."""

    group_runs: int
    num_spans: int
    one_group: bool

    @property
    def runs(self) -> int:
        if self.group_runs % FIELDS == 0:
            return self.group_runs
        return gcd(self.group_runs, FIELDS)

    def expand(self, by_group: Tensor) -> Tensor:
        """[outputs, groups] -> [groups, outputs], with one for each of `runs`."""
        repeated = by_group.t().repeat_interleave(self.group_runs // self.runs, 0)
        wanted = triton.cdiv(FIELDS * self.num_spans, self.runs)
        return F.pad(repeated[:wanted], (0, 0, 0, wanted - min(wanted, len(repeated)))).contiguous()


def _plane(codes: Tensor, first_bit: int, bits: int, run: int) -> Tensor:
    padded = F.pad(codes, (0, -codes.shape[1] % (FIELDS * run)))
    fields = padded.unflatten(1, (-1, FIELDS, run))
    words = torch.zeros_like(fields[:, :, 0], dtype=torch.int32)
    for field in range(FIELDS):
        part = (fields[:, :, field] >> first_bit) & ((1 << bits) - 1)
        words |= part.to(torch.int32) << (bits * field)
    return words.to(ELEMENTS[bits]).transpose(0, 1).contiguous()


def _narrowed(numbers: Tensor) -> Tensor:
    """In 16 bits where that keeps every number."""
    if numbers.dtype == torch.float32:
        for dtype in (torch.float16, torch.bfloat16):
            narrow = numbers.to(dtype)
            if torch.equal(narrow.float(), numbers):
                return narrow
    return numbers
