"""PTX computed by numpy: what a kernel compiled for an absent GPU would store.

The threads of a program go through its instructions side by side, so branches must be alike in all
of them, and barriers are always met. Copies by the tensor memory accelerator are done when they are
asked for; waiting for one that never was is an error. Enough instructions for kernels with products
of tensor cores that take registers (`mma.sync`), and no more.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

Words = NDArray[np.uint64]
"""A register of every thread."""
SHARED_BYTES = 232_448
DESCRIPTOR = 1 << 30
"""Addresses of tensor descriptors start here, far from memory."""
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


@dataclass(frozen=True)
class Descriptor:
    """A tensor [..., inner], and the box of it that a copy takes, in swizzled 128 bytes."""

    tensor: torch.Tensor
    box: tuple[int, ...]

    def __post_init__(self) -> None:
        lines = 128 // self.tensor.element_size()
        object.__setattr__(self, "box", (*self.box[:-1], min(self.box[-1], lines)))

    def bytes_at(self, places: Sequence[int]) -> NDArray[np.uint8]:
        """A box, with zeros where the tensor ends."""
        box = self.tensor.new_zeros(self.box)
        inside = [
            slice(max(place, 0), max(min(place + size, whole), 0))
            for place, size, whole in zip(places, self.box, self.tensor.shape, strict=True)
        ]
        part = self.tensor[tuple(inside)]
        if part.numel():
            box[tuple(slice(size) for size in part.shape)] = part
        return box.contiguous().view(-1).view(torch.uint8).numpy()


@dataclass
class _Barrier:
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


@dataclass(frozen=True)
class _Instruction:
    guard: str | None
    name: str
    operands: tuple[str, ...]


class Kernel:
    """A kernel in PTX, with as many threads as it asks for."""

    def __init__(self, text: str) -> None:
        found = re.search(r"\.reqntid\s+(\d+)", text)
        assert found
        self.num_threads = int(found[1])
        header = re.search(r"\.entry (\w+)\((.*?)\)\s", text, re.DOTALL)
        assert header
        self.name, self.num_parameters = header[1], header[2].count(".param")
        self._instructions: list[_Instruction] = []
        self._labels: dict[str, list[int]] = {}
        self._shared: dict[str, int] = {}
        body = text[text.index("{", header.end()) :]
        body = re.sub(r"//[^\n]*|\.loc[^\n]*", "", body)
        body = re.sub(r"\{([^{}]*?)\}", _joined_vector, body)
        for line in re.split(r"[;\n{}]", body):
            self._read(line.strip())

    def _read(self, line: str) -> None:
        while (label := re.match(r"([$\w]+):", line)) is not None:
            self._labels.setdefault(label[1], []).append(len(self._instructions))
            line = line[label.end() :].strip()
        if not line or line.startswith((".reg", ".section", ".pragma", ".file", ")")):
            return
        guard = None
        if line.startswith("@"):
            guard, line = line[1:].split(None, 1)
        name, _, rest = line.partition(" ")
        if not re.match(r"[a-z]", name):
            return
        operands = re.findall(r"\[[^\]]*\]|<[^>]*>|[^\s,|]+", rest)
        self._instructions.append(_Instruction(guard, name.strip(), tuple(operands)))

    def target(self, label: str, after: int) -> int:
        """Where a label is; of several, which assembly in a line may have, the last one before."""
        places = self._labels[label]
        return max((place for place in places if place <= after), default=places[0])

    def launch(self, grid: int, arguments: Sequence[Any]) -> None:
        """Arguments are tensors on the host, which are written to, descriptors and integers."""
        memory = _Memory()
        values: list[int] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                values.append(memory.add(argument))
            elif isinstance(argument, Descriptor):
                values.append(memory.describe(argument))
            elif isinstance(argument, float):
                values.append(struct.unpack("<I", struct.pack("<f", argument))[0])
            else:
                values.append(int(argument))
        values += [0] * (self.num_parameters - len(values))
        for program in range(grid):
            _Program(self, memory, values, program, grid).run(self._instructions)
        memory.write_back()


class _Hopper:
    """What Triton asks of a GPU before it compiles."""

    @staticmethod
    def get_current_target() -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    @staticmethod
    def get_current_device() -> int:
        return 0

    @staticmethod
    def get_current_stream(device: int) -> int:
        return 0


def pretend_hopper() -> None:
    """From now on kernels are compiled for Hopper and computed here, on tensors of the host."""

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            made = kernel.run(*arguments, grid=grid, warmup=True, **options)
            given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
            flat: list[Any] = []
            for name, kind in made.src.signature.items():
                if kind == "constexpr":
                    continue
                value = given[name]
                if hasattr(value, "block_shape"):
                    base = value.base
                    if base.dtype.itemsize == 1:  # not all is known of floats of 8 bits
                        base = base.view(torch.uint8)
                    flat += [Descriptor(base, tuple(value.block_shape)), *value.shape]
                    flat += value.strides
                else:
                    flat.append(value)
            Kernel(made.asm["ptx"]).launch(grid[0], flat)

        return launch

    driver.set_active(_Hopper())
    KernelInterface.__getitem__ = launcher


def _joined_vector(found: re.Match[str]) -> str:
    """Vectors of operands in pointed brackets, so that braces are of blocks alone."""
    inner = found[1]
    is_vector = ";" not in inner and "\n" not in inner
    return f"<{inner}>" if is_vector else f"\n{inner}\n"


@dataclass
class _Memory:
    """Global memory: one tensor after the other, with room between them."""

    bytes: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(4096, np.uint8))
    tensors: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    descriptors: list[Descriptor] = field(default_factory=list)

    def add(self, tensor: torch.Tensor) -> int:
        assert tensor.is_contiguous()
        start = -(-len(self.bytes) // 4096) * 4096
        raw = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
        room = np.full(start + len(raw) + 4096 - len(self.bytes), 0xFF, np.uint8)
        self.bytes = np.concatenate((self.bytes, room))
        self.bytes[start : start + len(raw)] = raw
        self.tensors.append((start, tensor))
        return start

    def describe(self, descriptor: Descriptor) -> int:
        self.descriptors.append(descriptor)
        return DESCRIPTOR + len(self.descriptors) - 1

    def write_back(self) -> None:
        for start, tensor in self.tensors:
            raw = tensor.view(-1).view(torch.uint8)
            raw.copy_(torch.from_numpy(self.bytes[start : start + raw.numel()]))


class _Program:
    """One program and its threads."""

    def __init__(
        self, kernel: Kernel, memory: _Memory, parameters: list[int], program: int, grid: int
    ) -> None:
        self.kernel, self.memory, self.threads = kernel, memory, kernel.num_threads
        self.shared = np.full(SHARED_BYTES, 0xFF, np.uint8)
        self.barriers: dict[int, _Barrier] = {}
        self.registers: dict[str, Any] = {}
        self.lanes = np.arange(self.threads) % 32
        self.special = {
            "%tid.x": np.arange(self.threads),
            "%ctaid.x": program,
            "%nctaid.x": grid,
            "%laneid": self.lanes,
            "%ctaid.y": 0,
            "%ctaid.z": 0,
            "%cluster_ctarank": 0,
            "global_smem": 0,
        }
        for index, value in enumerate(parameters):
            self.special[f"{kernel.name}_param_{index}"] = value

    def run(self, instructions: Sequence[_Instruction]) -> None:
        place, waited = 0, 0
        with np.errstate(all="ignore"):
            while place < len(instructions):
                one = instructions[place]
                active = self._guard(one.guard)
                head, *kinds = one.name.split(".")
                if head in ("ret", "exit"):
                    assert active.all() or not active.any(), "threads end one by one"
                    if active.all():
                        return
                elif head == "bra":
                    assert active.all() or not active.any(), "threads go different ways"
                    if active.all():
                        target = self.kernel.target(one.operands[0], place)
                        waited = waited + 1 if place - target < 3 and target <= place else 0
                        assert waited < 100, "waits for a copy that was never started"
                        place = target
                        continue
                elif active.any():
                    self._do(head, kinds, one.operands, active)
                place += 1

    def _guard(self, guard: str | None) -> NDArray[np.bool_]:
        if guard is None:
            return np.ones(self.threads, bool)
        values: NDArray[np.bool_] = self.registers[guard.lstrip("!")]
        return ~values if guard.startswith("!") else values

    # --- operands

    def words(self, operand: str) -> Words:
        if operand in self.registers:
            found: Words = self.registers[operand]
            return found
        if operand in self.special:
            return np.broadcast_to(np.asarray(self.special[operand], np.uint64), (self.threads,))
        if re.match(r"0[fFdD][0-9a-fA-F]+$", operand):
            return np.full(self.threads, int(operand[2:], 16), np.uint64)
        return np.full(self.threads, int(operand, 0) & (1 << 64) - 1, np.uint64)

    def typed(self, operand: str, kind: str) -> NDArray[Any]:
        words, bits = self.words(operand), int(kind[1:].removeprefix("f"))
        raw = words.astype(UNSIGNED[bits])
        if kind in FLOATS:
            return raw.view(FLOATS[kind])
        return raw.view(SIGNED[bits]) if kind[0] == "s" else raw

    def brain_floats(self, operand: str) -> NDArray[np.float32]:
        return (self.words(operand) << np.uint64(16)).astype(np.uint32).view(np.float32)

    def put(self, operand: str, values: NDArray[Any], active: NDArray[np.bool_]) -> None:
        if operand == "_":
            return
        bits = values.dtype.itemsize * 8
        raw = values if values.dtype == bool else values.view(UNSIGNED[bits]).astype(np.uint64)
        old = self.registers.get(operand)
        if old is not None and not active.all():
            raw = np.where(active, raw, old)
        self.registers[operand] = raw

    def address(self, operand: str) -> NDArray[np.int64]:
        base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
        return self.words(base).view(np.int64) + int(offset or 0)

    @staticmethod
    def vector(operand: str) -> list[str]:
        return [one.strip() for one in operand.strip("<>").split(",")]

    # --- instructions

    def _do(
        self, head: str, kinds: list[str], operands: tuple[str, ...], active: NDArray[np.bool_]
    ) -> None:
        known: Callable[..., None] | None = getattr(self, f"_{head}", None)
        if known is not None:
            known(kinds, operands, active)
            return
        out, *given = operands
        kind = kinds[-1]
        if kind == "pred":
            first, *rest = [self.registers[one] for one in given]
            by_name = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
            self.put(out, by_name[head](first, rest[0]) if rest else ~first, active)
            return
        if kind in ("f16x2", "bf16x2"):
            self.put(out, self._pairs(head, kind, given), active)
            return
        if kind == "bf16":
            found = self._compute(head, kinds, "f32", [self.brain_floats(one) for one in given], [])
            rounded = torch.from_numpy(found).bfloat16()
            self.put(out, rounded.view(torch.int16).numpy(), active)
            return
        values = [self.typed(one, kind) for one in given]
        self.put(out, self._compute(head, kinds, kind, values, given), active)

    def _compute(
        self,
        head: str,
        kinds: list[str],
        kind: str,
        values: list[NDArray[Any]],
        given: list[str],
    ) -> NDArray[Any]:
        first = values[0]
        bits = int(kind[1:])
        if head in ("add", "sub", "and", "or", "xor", "min", "max"):
            by_name: dict[str, Any] = {
                "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or,
                "xor": np.bitwise_xor, "min": np.minimum, "max": np.maximum,
            }  # fmt: skip
            return np.asarray(by_name[head](first, values[1]))
        if head in ("mul", "mad"):
            if "wide" in kinds:
                wide = (SIGNED if kind[0] == "s" else UNSIGNED)[2 * bits]
                product = first.astype(wide) * values[1].astype(wide)
                if head == "mad":
                    product = product + self.typed(given[2], f"{kind[0]}{2 * bits}")
                return product
            if "hi" in kinds:
                return ((first.astype(np.uint64) * values[1].astype(np.uint64)) >> 32).astype(
                    first.dtype
                )
            return first * values[1] if head == "mul" else first * values[1] + values[2]
        if head == "fma":
            wider = [one.astype(np.float64) for one in values]
            return (wider[0] * wider[1] + wider[2]).astype(first.dtype)
        if head in ("shl", "shr"):
            shift = np.minimum(self.typed(given[1], "u32"), bits - 1)
            moved = np.left_shift if head == "shl" else np.right_shift
            over = self.typed(given[1], "u32") >= bits
            result = moved(first, shift.astype(first.dtype))
            return result if kind[0] == "s" else np.where(over, first.dtype.type(0), result)
        if head == "div":
            if kind in FLOATS:
                return first / values[1]
            return (first / values[1].astype(np.float64)).astype(first.dtype)
        if head == "rem":
            return np.fmod(first, values[1])
        if head == "neg":
            return -first
        if head == "not":
            return ~first
        if head == "ex2":
            return np.exp2(first)
        if head == "bfe":  # of a signed one the highest bit is the sign
            one = first.dtype.type(1)
            part = (first >> values[1]) & ((one << values[2]) - one)
            return part - ((part >> (values[2] - one)) << values[2]) if kind[0] == "s" else part
        raise NotImplementedError(f"{head} {kinds}")

    def _pairs(self, head: str, kind: str, given: list[str]) -> NDArray[np.uint32]:
        first, second = (self.halves(one, kind) for one in given)
        result = {"sub": first - second, "add": first + second, "mul": first * second}[head]
        return _joined(result.to(first.dtype))

    def halves(self, operand: str, kind: str) -> torch.Tensor:
        """[threads, 2]."""
        raw = self.words(operand).astype(np.uint32).view(np.int16).reshape(-1, 2)
        return torch.from_numpy(raw.copy()).view(
            torch.float16 if kind.startswith("f16") else torch.bfloat16
        )

    def _mov(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        out, given = operands
        bits = int(kinds[-1][1:])
        if out.startswith("<"):
            parts = self.vector(out)
            size = bits // len(parts)
            for index, part in enumerate(parts):
                moved = self.words(given) >> np.uint64(index * size)
                self.put(part, moved.astype(UNSIGNED[size]), active)
        elif given.startswith("<"):
            parts = self.vector(given)
            size = bits // len(parts)
            total = np.zeros(self.threads, np.uint64)
            for index, part in enumerate(parts):
                whole = self.words(part).astype(UNSIGNED[size]).astype(np.uint64)
                total |= whole << np.uint64(index * size)
            self.put(out, total.astype(UNSIGNED[bits]), active)
        else:
            self.put(out, self.words(given).astype(UNSIGNED[bits]), active)

    def _cvta(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        self.put(operands[0], self.words(operands[1]).copy(), active)

    def _cvt(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        to, source = kinds[-2:]
        out, given = operands
        if source == "e4m3x2":
            raw = self.words(given).astype(np.uint16).view(np.uint8)
            codes = torch.from_numpy(raw.reshape(-1, 2).copy()).view(torch.float8_e4m3fn)
            self.put(out, _joined(codes.to(torch.float16)), active)
            return
        if source == "bf16":
            value: NDArray[Any] = self.brain_floats(given)
        else:
            value = self.typed(given, source)
        if to == "bf16":
            rounded = torch.from_numpy(value.astype(np.float32)).bfloat16()
            self.put(out, rounded.view(torch.int16).numpy(), active)
        elif to in FLOATS:
            self.put(out, value.astype(FLOATS[to]), active)
        else:
            bits = int(to[1:])
            self.put(out, value.astype((SIGNED if to[0] == "s" else UNSIGNED)[bits]), active)

    def _setp(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        first, second = (self.typed(one, kinds[-1]) for one in operands[1:3])
        by_name: dict[str, Any] = {
            "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
            "eq": np.equal, "ne": np.not_equal,
        }  # fmt: skip
        self.put(operands[0], by_name[kinds[0]](first, second), active)

    def _selp(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        out, first, second, choice = operands
        kind = kinds[-1]
        self.put(
            out,
            np.where(self.registers[choice], self.typed(first, kind), self.typed(second, kind)),
            active,
        )

    def _prmt(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        out, low, high, order = operands
        both = self.words(low) | self.words(high) << np.uint64(32)
        selector, total = self.words(order), np.zeros(self.threads, np.uint64)
        for byte in range(4):
            which = (selector >> np.uint64(4 * byte)) & np.uint64(7)
            one = (both >> (which * np.uint64(8))) & np.uint64(0xFF)
            total |= one << np.uint64(8 * byte)
        self.put(out, total.astype(np.uint32), active)

    def _lop3(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        out, *given, table = operands
        bits = [self.words(one) for one in given]
        total, number = np.zeros(self.threads, np.uint64), int(table, 0)
        for row in range(8):
            if number >> row & 1:
                a, b, c = (
                    one if row >> at & 1 else ~one for one, at in zip(bits, (2, 1, 0), strict=True)
                )
                total |= a & b & c
        self.put(out, total.astype(np.uint32), active)

    def _elect(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        self.put(operands[1], self.lanes == 0, active)

    def _shfl(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        out, given, place, *_ = operands
        values = self.words(given)
        by, threads = self.words(place).astype(np.int64), np.arange(self.threads)
        warps = threads - self.lanes
        source = warps + (self.lanes ^ by if "bfly" in kinds else by % 32)
        self.put(out, values[source].astype(np.uint32), active)

    def _bar(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        pass

    _griddepcontrol = _fence = _bar

    # --- memory

    def _ld(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        out, place = operands
        size = int(kinds[-1][1:]) // 8
        if "param" in kinds:
            self.put(out, self.words(place.strip("[] ")).astype(UNSIGNED[8 * size]), active)
            return
        memory = self.shared if "shared" in kinds else self.memory.bytes
        addresses = np.where(active, self.address(place), 0)
        for index, one in enumerate(self.vector(out)):
            where = addresses[:, None] + index * size + np.arange(size)
            assert where.min() >= 0 and where.max() < len(memory), f"reads beyond memory: {place}"
            self.put(one, memory[where].copy().view(UNSIGNED[8 * size])[:, 0], active)

    def _st(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        place, given = operands
        size = int(kinds[-1][1:]) // 8
        memory = self.shared if "shared" in kinds else self.memory.bytes
        addresses = self.address(place)
        for index, one in enumerate(self.vector(given)):
            raw = self.words(one).astype(UNSIGNED[8 * size])[:, None].view(np.uint8)
            where = addresses[:, None] + index * size + np.arange(size)
            memory[where[active]] = raw[active]

    def _mbarrier(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        threads = np.flatnonzero(active)
        if kinds[0] == "init":
            count = int(operands[1])
            for start in self.address(operands[0])[threads].tolist():
                self.barriers[start] = _Barrier(count, count)
        elif kinds[0] == "arrive":
            _, place, num_bytes = operands
            for thread in threads:
                one = self.barriers[int(self.address(place)[thread])]
                one.pending -= 1
                one.bytes += int(num_bytes)
                one.settle()
        else:
            out, place, parity = operands
            one = self.barriers[int(self.address(place)[0])]
            self.put(out, self.words(parity) != one.phase, active)

    def _cp(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        """Of a box, from a tensor to shared memory."""
        target, source, barrier = operands
        name, places = source.strip("[]").split(",", 1)
        names = self.vector(places.strip())
        for thread in np.flatnonzero(active).tolist():
            descriptor = self.memory.descriptors[int(self.words(name)[thread]) - DESCRIPTOR]
            at = [int(self.typed(place, "s32")[thread]) for place in reversed(names)]
            raw = descriptor.bytes_at(at)
            where = int(self.address(target)[thread]) + np.arange(len(raw))
            self.shared[where ^ (where >> 7 & 7) << 4] = raw
            full = self.barriers[int(self.address(barrier)[thread])]
            full.bytes -= len(raw)
            full.settle()

    def _mma(self, kinds: list[str], operands: tuple[str, ...], active: Any) -> None:
        out, a, b, c = (self.vector(one) for one in operands)
        kind = kinds[-2]
        warps = self.threads // 32

        def halves(names: list[str]) -> torch.Tensor:
            parts = [self.halves(one, kind).view(warps, 8, 4, 2) for one in names]
            return torch.stack(parts, 1).float()

        left, right = halves(a), halves(b)  # [warps, register, row or column, pair, 2]
        rows = left.view(warps, 2, 2, 8, 8).permute(0, 2, 3, 1, 4).reshape(warps, 16, 16)
        columns = right.view(warps, 2, 8, 8).permute(0, 2, 1, 3).reshape(warps, 8, 16)
        product = (rows @ columns.transpose(1, 2)).view(warps, 2, 8, 4, 2)
        for index, (name, before) in enumerate(zip(out, c, strict=True)):
            found = product[:, index // 2, :, :, index % 2].reshape(-1).numpy()
            self.put(name, (self.typed(before, "f32") + found).astype(np.float32), active)


def _joined(pairs: torch.Tensor) -> NDArray[np.uint32]:
    """[threads, 2] of 16 bits as words."""
    return pairs.contiguous().view(torch.int16).numpy().view(np.uint32).reshape(-1)
