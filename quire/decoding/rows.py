"""What sampling features are built from: columns, slots and sets of rows, and the lines of a batch.

A *row* is a sequence's permanent place in the row table; a *line* is its place among the logits
of one step. A row whose drafts are verified has several lines, each with its own prefix: the known
tokens and the drafts before the line. Numbers are written on the host when a sequence comes or goes
and read on the device in every step, so a sequence that merely decodes costs the host nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_COLUMNS = 24


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` on the device, without waiting for it. The caller must not write to it again."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Column:
    """One number per row: write `host[row]`, then `RowColumns.touch(row)`; read `device`."""

    index: int
    host: NDArray[Any]
    device: Tensor

    def of(self, taken: Tensor) -> Tensor:
        """Its numbers among what `RowColumns.take` gave."""
        return taken[self.index].view(self.device.dtype)


class RowColumns:
    """All per-row numbers as one 32-bit block, so that any change is one small transfer."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.device = device
        self._host = np.zeros((MAX_COLUMNS, max_rows), np.int32)
        self._device = torch.zeros((MAX_COLUMNS, max_rows), dtype=torch.int32, device=device)
        self._num_columns = 0
        self._touched: set[int] = set()

    def integers(self) -> Column:
        index = self._num_columns
        assert index < MAX_COLUMNS, "raise MAX_COLUMNS"
        self._num_columns += 1
        return Column(index, self._host[index], self._device[index])

    def floats(self) -> Column:
        column = self.integers()
        host, device = column.host.view(np.float32), column.device.view(torch.float32)
        return Column(column.index, host, device)

    def take(self, rows: Tensor) -> Tensor:
        """The numbers of `rows` in all columns, for `Column.of`; one launch."""
        return self._device[: self._num_columns].index_select(1, rows)

    def touch(self, row: int) -> None:
        self._touched.add(row)

    def flush(self) -> None:
        """Bring the touched rows to the device."""
        if not self._touched:
            return
        rows = np.fromiter(self._touched, np.int32, len(self._touched))
        block = upload(np.vstack([rows, self._host[: self._num_columns, rows]]), self.device)
        self._device[: self._num_columns].index_copy_(1, block[0].long(), block[1:])
        self._touched.clear()


class Slots:
    """Numbers the few rows that keep wide state, so that it need not exist for all rows.

    Slot 0 belongs to no row: rows without a slot read and write there. The lowest free slot is
    taken first, and the owner makes room for it with `fit`: where that finds no memory, slots that
    others give back need none.
    """

    def __init__(self, columns: RowColumns) -> None:
        self.users = RowSet(columns.max_rows)
        self.column = columns.integers()
        self._released: list[int] = []
        self._next = 1

    def take(self, row: int) -> int:
        assert row not in self.users, f"row {row} already has a slot"
        self.users.add(row)
        if self._released:
            slot = heappop(self._released)
        else:
            slot, self._next = self._next, self._next + 1
        self.column.host[row] = slot
        return slot

    def release(self, row: int) -> None:
        """Harmless if the row has none."""
        if row not in self.users:
            return
        self.users.discard(row)
        heappush(self._released, int(self.column.host[row]))
        self.column.host[row] = 0

    def of(self, rows: Tensor) -> Tensor:
        """Slots of `rows`, for indexing the owner's tensors."""
        return self.column.device.index_select(0, rows).long()


def fit(tensor: Tensor, shape: tuple[int, ...], fill: float) -> Tensor:
    """`tensor`, or a copy grown to hold `shape`; each size grows to at least its double."""
    if all(have >= want for have, want in zip(tensor.shape, shape, strict=True)):
        return tensor
    sizes = [
        have if have >= want else max(want, 2 * have)
        for have, want in zip(tensor.shape, shape, strict=True)
    ]
    grown = tensor.new_full(sizes, fill)
    grown[tuple(slice(size) for size in tensor.shape)] = tensor
    return grown


class RowSet:
    """The rows that use one feature."""

    def __init__(self, max_rows: int) -> None:
        self.members = np.zeros(max_rows, np.bool_)
        self._count = 0

    def add(self, row: int) -> None:
        self._count += not self.members[row]
        self.members[row] = True

    def discard(self, row: int) -> None:
        if row in self:
            self._count -= 1
            self.members[row] = False

    def __contains__(self, row: int) -> bool:
        return self._count > 0 and bool(self.members[row])

    def __len__(self) -> int:
        return self._count


@dataclass(frozen=True, eq=False)
class Lines:
    """Some lines of a batch: their numbers and rows, on both sides."""

    host_numbers: NDArray[np.int64]
    host_rows: NDArray[np.int64]
    numbers: Tensor
    rows: Tensor
    offsets: Tensor | None
    """Drafts before each line; None where every row of the batch has one line."""

    def __len__(self) -> int:
        return len(self.host_numbers)

    def num_known(self, num_tokens: Tensor) -> Tensor:
        """Tokens before the one that each line samples; `num_tokens` are those of all rows."""
        known = num_tokens[self.rows]
        return known if self.offsets is None else known + self.offsets

    @property
    def is_range(self) -> bool:
        return int(self.host_numbers[-1] - self.host_numbers[0]) == len(self.host_numbers) - 1

    def take(self, logits: Tensor) -> Tensor:
        """These lines of `logits`: a view where they are adjacent, else a copy."""
        if self.is_range:
            return logits.narrow(0, int(self.host_numbers[0]), len(self))
        return logits.index_select(0, self.numbers)

    def put(self, logits: Tensor, part: Tensor) -> None:
        """Bring back what `take` gave and the caller edited in place."""
        if not self.is_range:
            logits.index_copy_(0, self.numbers, part)

    def add_at(self, logits: Tensor, token_ids: Tensor, amounts: Tensor) -> None:
        """logits[line, token_ids[line, j]] += amounts[line, j]."""
        flat = self.numbers[:, None] * logits.shape[1] + token_ids
        logits.view(-1).index_add_(0, flat.flatten(), amounts.flatten())

    def pieces(self, max_lines: int) -> list[Lines]:
        """These lines in order, at most `max_lines` at a time."""
        if len(self) <= max_lines:
            return [self]
        cuts = [slice(i, i + max_lines) for i in range(0, len(self), max_lines)]
        return [
            Lines(
                self.host_numbers[c],
                self.host_rows[c],
                self.numbers[c],
                self.rows[c],
                None if self.offsets is None else self.offsets[c],
            )
            for c in cuts
        ]


class Batch:
    """The rows sampled together, and which lines use which feature; kept while nothing changes."""

    def __init__(
        self, rows: Tensor, host_rows: NDArray[Any], offsets: Tensor | None = None
    ) -> None:
        """Of each line its row, on both sides, and the drafts before it; see `Lines.offsets`."""
        # The caller may reuse all buffers for its next step.
        self.rows = rows.long().clone()
        self.host_rows = host_rows.astype(np.int64)
        self.offsets = None if offsets is None else offsets.clone()
        self._lines: dict[RowSet, Lines | None] = {}
        self._has: dict[RowSet, bool] = {}

    def __len__(self) -> int:
        return len(self.host_rows)

    @cached_property
    def all_lines(self) -> Lines:
        numbers = torch.arange(len(self), device=self.rows.device)
        return Lines(np.arange(len(self)), self.host_rows, numbers, self.rows, self.offsets)

    @cached_property
    def max_drafts(self) -> int:
        """Drafts of the row with most of them."""
        return int(np.bincount(self.host_rows).max()) - 1 if len(self) else 0

    def has(self, users: RowSet) -> bool:
        """Whether any line's row is among `users`."""
        if not users:
            return False
        if users not in self._has:
            self._has[users] = bool(users.members[self.host_rows].any())
        return self._has[users]

    def lines(self, users: RowSet) -> Lines | None:
        """The lines whose rows are among `users`; None if there are none."""
        if not users:
            return None
        if users not in self._lines:
            self._lines[users] = self._find(users)
        return self._lines[users]

    def _find(self, users: RowSet) -> Lines | None:
        host_numbers = np.flatnonzero(users.members[self.host_rows])
        if not len(host_numbers):
            return None
        numbers = upload(host_numbers, self.rows.device)
        rows = self.rows.index_select(0, numbers)
        offsets = None if self.offsets is None else self.offsets.index_select(0, numbers)
        return Lines(host_numbers, self.host_rows[host_numbers], numbers, rows, offsets)
