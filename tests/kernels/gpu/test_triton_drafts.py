"""Verification of drafts: the Triton kernel against its reference, that against a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.torch import ngrams as ngram_reference  # noqa: E402
from quire.kernels.torch.rows import DraftedRows  # noqa: E402
from quire.kernels.torch.rows import accept_tokens as reference  # noqa: E402
from quire.kernels.torch.rows import write_drafts as write_reference  # noqa: E402
from quire.kernels.triton.ngrams import propose_ngrams  # noqa: E402
from quire.kernels.triton.rows import accept_tokens, write_drafts  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)


def make_step(
    num_rows: int, max_drafts: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, DraftedRows]:
    """Rows with up to so many drafts, of which about half agree; some reach the table's end."""
    generator = torch.Generator().manual_seed(seed)

    def dice(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    max_rows, length = num_rows + 3, 24
    rows = torch.randperm(max_rows, generator=generator)[:num_rows].int()
    num_lines = 1 + dice(0, max_drafts + 1, num_rows)
    known = torch.minimum(dice(1, length, max_rows), torch.tensor(length))
    known[rows.long()] = torch.minimum(known[rows.long()], length - num_lines)
    appends = (dice(0, 5, max_rows) > 0).int()
    num_lines[appends[rows.long()] == 0] = 1
    first = (num_lines.cumsum(0) - num_lines).int()
    table = DraftedRows(
        dice(0, 2, max_rows, length),
        known,
        known.clone(),
        dice(0, max_drafts + 1, max_rows),
        appends,
    )
    return rows, first, num_lines, dice(0, 2, int(num_lines.sum())), table


def accept_plainly(
    rows: Tensor, first: Tensor, num_lines: Tensor, tokens: Tensor, table: DraftedRows
) -> list[int]:
    counts = []
    for row, start, count in zip(rows.tolist(), first.tolist(), num_lines.tolist(), strict=True):
        at, waiting = int(table.num_tokens[row]), int(table.num_drafts[row])
        drafts = table.token_ids[row, at : at + waiting].tolist()
        accepted: list[int] = []
        for i, token in enumerate(tokens[start : start + count].tolist()):
            accepted.append(token)
            if i >= len(drafts) or drafts[i] != token:
                break
        counts.append(len(accepted))
        table.num_drafts[row] = 0
        if table.appends[row]:
            table.token_ids[row, at : at + len(accepted)] = torch.tensor(accepted).int()
            table.num_tokens[row] = at + len(accepted)
            table.num_computed[row] = at + len(accepted) - 1
    return counts


@pytest.mark.parametrize(("num_rows", "max_drafts"), [(1, 1), (7, 3), (40, 8), (150, 2), (9, 0)])
def test_accepted_tokens(num_rows: int, max_drafts: int) -> None:
    """Counts, tokens and lengths; rows that sample nothing and tokens beyond stay as they are."""
    *step, table = make_step(num_rows, max_drafts, seed=num_rows)
    copies = [DraftedRows(*(part.clone() for part in table)) for _ in range(2)]
    expected = accept_plainly(*step, copies[0])
    assert max_drafts == 0 or (1 in expected and max(expected) > 1) or num_rows == 1
    assert reference(*step, copies[1]).tolist() == expected
    on_device = DraftedRows(*(part.to(DEVICE) for part in table))
    found = accept_tokens(*(part.to(DEVICE) for part in step), on_device)
    assert found.tolist() == expected
    for plain, by_reference, by_kernel in zip(*copies, on_device, strict=True):
        assert torch.equal(by_reference, plain) and torch.equal(by_kernel.cpu(), plain)


@pytest.mark.parametrize(("num_rows", "num_drafts"), [(1, 1), (3, 4), (40, 7)])
def test_drafts_are_written_as_the_reference_does(num_rows: int, num_drafts: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    rows, _, _, _, table = make_step(num_rows, 3, seed=num_rows)
    drafts = torch.randint(-1, 9, (num_rows, num_drafts), generator=generator, dtype=torch.int32)
    ours = DraftedRows(*(one.clone().to(DEVICE) for one in table))
    write_reference(rows, drafts, table)
    write_drafts(rows.to(DEVICE), drafts.to(DEVICE), ours)
    for one, other in zip(table, ours, strict=True):
        assert torch.equal(one, other.cpu())


@pytest.mark.parametrize("vocab", [2, 6])
@pytest.mark.parametrize(("length", "beyond"), [(40, 0), (1100, 1), (8300, 9)])
def test_ngrams_are_found_as_the_reference_does(length: int, beyond: int, vocab: int) -> None:
    """Across the tiles of the kernel, and where nothing agrees. In the longest text only the last
    tiles repeat."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(vocab, (4, length), generator=generator, dtype=torch.int32)
    if length > 8000:  # the reference is slow where many places agree
        tokens[:, :-300] = torch.arange(10, length - 290)
    known = torch.tensor([length, length - 11, 1, 5], dtype=torch.int32)
    rows = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    settings = ngram_reference.NgramSettings(3, 2, 5, beyond)
    expected = ngram_reference.propose_ngrams(tokens, known, rows, settings)
    found = propose_ngrams(tokens.to(DEVICE), known.to(DEVICE), rows.to(DEVICE), settings)
    assert torch.equal(found.cpu(), expected)
    assert (expected[0] == -1).all() and expected[1, 0] >= 0
