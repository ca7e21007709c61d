"""Drafts in the row table, in the native library: against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import drafts as native
from quire.kernels.torch import rows as reference
from quire.kernels.torch.rows import DraftedRows

pytestmark = pytest.mark.usefixtures("native")
MAX_ROWS, LENGTH = 12, 20


def random_table(seed: int, most_known: int) -> tuple[torch.Generator, DraftedRows]:
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    known = ints(1, most_known + 1, MAX_ROWS)
    appends = (ints(0, 5, MAX_ROWS) > 0).int()
    tokens = ints(0, 2, MAX_ROWS, LENGTH)
    return generator, DraftedRows(tokens, known, known.clone(), ints(0, 5, MAX_ROWS), appends)


def copy_of(table: DraftedRows) -> DraftedRows:
    return DraftedRows(*(part.clone() for part in table))


def assert_equal(one: DraftedRows, other: DraftedRows) -> None:
    for name, mine, yours in zip(DraftedRows._fields, one, other, strict=True):
        assert torch.equal(mine, yours), name


@pytest.mark.parametrize("seed", range(8))
def test_drafts_are_written_as_far_as_there_is_room(seed: int) -> None:
    generator, table = random_table(seed, LENGTH)
    rows = torch.randperm(MAX_ROWS, generator=generator)[:9]
    drafts = torch.randint(-1, 6, (9, 5), generator=generator, dtype=torch.int32)
    expected = copy_of(table)
    counts = reference.write_drafts(rows, drafts, expected)
    assert torch.equal(native.write_drafts(rows.int(), drafts, table), counts)
    assert_equal(table, expected)
    assert 0 < int(counts.sum()) < 45


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_accepted_while_drafts_agree(seed: int) -> None:
    """Rows have more lines than drafts, fewer, and some keep nothing of what they sample."""
    generator, table = random_table(seed, LENGTH - 6)
    rows = torch.randperm(MAX_ROWS, generator=generator)[:9].int()
    num_lines = torch.randint(1, 6, (9,), generator=generator, dtype=torch.int32)
    first = (num_lines.cumsum(0) - num_lines).int()
    total = int(num_lines.sum())
    tokens = torch.randint(0, 2, (total,), generator=generator, dtype=torch.int32)
    expected = copy_of(table)
    counts = reference.accept_tokens(rows, first, num_lines, tokens, expected)
    assert torch.equal(native.accept_tokens(rows, first, num_lines, tokens, table), counts)
    assert_equal(table, expected)
    assert int(counts.max()) > 1 or seed != 0
