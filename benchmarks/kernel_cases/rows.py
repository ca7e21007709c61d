"""Rows of a decode step: the batch from its rows, sampled tokens into them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernel_cases.case import BLOCK_SIZE, DEVICE, Case, Sides, copies_of
from quire.kernels.triton.rows import RowTensors, TokenTensors, append_tokens, gather_decode

MAX_LEN = 4096
"""Rows grow with each timed call, a few hundred times; they must not reach this."""
FIRST_LENGTHS = (500, 600)


class Table:
    """Rows of running requests, all of which decode."""

    def __init__(self, num_rows: int) -> None:
        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, dtype=torch.int32, device=DEVICE)

        self.rows = torch.randperm(num_rows, device=DEVICE).int()
        self.token_ids = integers(0, 100_000, num_rows, MAX_LEN)
        self.lengths = integers(*FIRST_LENGTHS, num_rows)
        self.block_tables = integers(0, 10_000, num_rows, MAX_LEN // BLOCK_SIZE)
        self.appends = torch.ones(num_rows, dtype=torch.bool, device=DEVICE)
        self.sampled = integers(0, 100_000, num_rows)
        self.gathered = TokenTensors.zeros(num_rows, DEVICE)
        self.context_lens = torch.empty(num_rows, dtype=torch.int32, device=DEVICE)

    def gather(self) -> None:
        table = RowTensors(self.token_ids, self.lengths, self.block_tables)
        gather_decode(self.rows, table, BLOCK_SIZE, self.gathered, self.context_lens)

    def gather_in_torch(self) -> list[Tensor]:
        positions = self.lengths[self.rows].long()
        blocks = self.block_tables[self.rows, positions // BLOCK_SIZE].long()
        tokens = self.token_ids[self.rows, positions].long()
        self.lengths[self.rows] = (positions + 1).int()
        return [tokens, positions, blocks * BLOCK_SIZE + positions % BLOCK_SIZE]

    def append(self) -> None:
        append_tokens(self.rows, self.sampled, self.token_ids, self.lengths, self.appends)

    def append_in_torch(self) -> None:
        at, chosen = self.lengths[self.rows], self.appends[self.rows]
        current = self.token_ids[self.rows, at]
        self.token_ids[self.rows, at] = torch.where(chosen, self.sampled, current)
        self.lengths[self.rows] = at + chosen.int()


def gathering(num_rows: int) -> Case:
    """Per row: four numbers read, five written."""

    def check(table: Table) -> None:
        before = table.lengths.clone()
        expected = table.gather_in_torch()
        after = table.lengths.clone()
        table.lengths.copy_(before)
        table.gather()
        assert all(map(torch.equal, table.gathered, expected)), "differs from the reference"
        assert torch.equal(table.lengths, after), "the lengths differ from the reference's"

    return _case(num_rows, 4 * 4 + 3 * 8 + 2 * 4, Table.gather, Table.gather_in_torch, check)


def appending(num_rows: int) -> Case:
    """Per row: four numbers read, two written."""

    def check(table: Table) -> None:
        tokens, lengths = table.token_ids.clone(), table.lengths.clone()
        table.append()
        found_tokens, found_lengths = table.token_ids.clone(), table.lengths.clone()
        table.token_ids.copy_(tokens)
        table.lengths.copy_(lengths)
        table.append_in_torch()
        assert torch.equal(found_tokens, table.token_ids), "the tokens differ from the reference's"
        assert torch.equal(found_lengths, table.lengths), "the lengths differ from the reference's"

    return _case(num_rows, 3 * 4 + 1 + 2 * 4, Table.append, Table.append_in_torch, check)


def _case(
    num_rows: int,
    row_bytes: int,
    ours: Callable[[Table], object],
    torchs: Callable[[Table], object],
    check: Callable[[Table], None],
) -> Case:
    num_bytes = num_rows * row_bytes

    def make() -> Sides:
        tables = [Table(num_rows) for _ in range(copies_of(num_bytes))]
        return Sides(
            [partial(ours, table) for table in tables],
            [partial(torchs, table) for table in tables],
            partial(check, tables[0]),
        )

    return Case(f"{num_rows:,} rows", num_bytes, 0, True, make)
