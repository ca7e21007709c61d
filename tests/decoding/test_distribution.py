"""What drafts leave of a distribution: all of it. Texts of three tokens from a chain whose
probabilities are known, many at a time, with drafters of all kinds; the bound is a 99.9 % quantile.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import dispatch
from quire.kernels.torch.rows import DraftedRows
from quire.protocol.sampling import SamplingParams
from tests.decoding.table import Sketch, Table, random_logits
from tests.decoding.test_random import chi_square, chi_square_bound

VOCAB = 6
NUM_ROWS = 20_000
NUM_TOKENS = 3
NUM_DRAFTS = 2
LOGITS = torch.from_numpy(random_logits(0, VOCAB, VOCAB, spread=1.0))
"""Of what follows each token."""

Propose = Callable[[Tensor, Tensor, Table], Tensor]


def bad(rows: Tensor, last: Tensor, table: Table) -> Tensor:
    """What is least likely."""
    drafts = [last]
    for _ in range(NUM_DRAFTS):
        drafts.append(LOGITS[drafts[-1]].argmin(1))
    return torch.stack(drafts[1:], 1)


def good(rows: Tensor, last: Tensor, table: Table) -> Tensor:
    """As likely as what is sampled, but with random numbers of its own."""
    generator = torch.Generator().manual_seed(int(table.num_tokens.sum()))
    drafts = [last]
    for _ in range(NUM_DRAFTS):
        chances = LOGITS[drafts[-1]].softmax(1)
        drafts.append(torch.multinomial(chances, 1, generator=generator)[:, 0])
    return torch.stack(drafts[1:], 1)


def perfect(rows: Tensor, last: Tensor, table: Table) -> Tensor:
    """The same model with the same random numbers."""
    drafts = [last]
    for i in range(NUM_DRAFTS):
        made = table.sampler.draft(LOGITS[drafts[-1]], rows, rows.numpy(), i)
        drafts.append(made.long())
    return torch.stack(drafts[1:], 1)


def texts(propose: Propose, keeps_drafts: float = 0.0) -> tuple[NDArray[np.int64], float]:
    """Each row's tokens after its prompt, and the share of drafts that were accepted. A sampler
    that is wrong keeps a share of the drafts although they do not agree."""
    table = Table(VOCAB, NUM_ROWS, 1 + NUM_TOKENS + NUM_DRAFTS + 1)
    params = SamplingParams(temperature=1.0)
    for row in range(NUM_ROWS):
        table.add(row, Sketch(params, [row % 2], seed=row))
    zeros = torch.zeros(NUM_ROWS, dtype=torch.int32)
    drafted = DraftedRows(
        table.token_ids, table.num_tokens, zeros, zeros.clone(), torch.ones_like(zeros)
    )
    dice = torch.Generator().manual_seed(1)
    num_drafts = num_accepted = 0
    rows = torch.arange(NUM_ROWS)
    while len(rows):
        last = table.token_ids[rows, table.num_tokens[rows].long() - 1].long()
        drafts = propose(rows, last, table)
        dispatch.write_drafts(rows.int(), drafts.int(), drafted)
        lines = torch.cat([last[:, None], drafts], 1)
        counts = torch.full((len(rows),), 1 + NUM_DRAFTS, dtype=torch.int32)
        offsets = torch.arange(1 + NUM_DRAFTS).repeat(len(rows))
        line_rows = rows.repeat_interleave(1 + NUM_DRAFTS)
        sampled = table.sample(LOGITS[lines.flatten()], line_rows.tolist(), offsets.tolist()).tokens
        forced = torch.rand(drafts.shape, generator=dice) < keeps_drafts
        sampled.view(len(rows), -1)[:, :-1][forced] = drafts[forced].int()
        first = (counts.cumsum(0) - counts).int()
        accepted = dispatch.accept_tokens(rows.int(), first, counts, sampled, drafted)
        num_drafts += drafts.numel()
        num_accepted += int((accepted - 1).sum())
        rows = rows[table.num_tokens[rows] < 1 + NUM_TOKENS]
    return table.token_ids[:, 1 : 1 + NUM_TOKENS].long().numpy(), num_accepted / num_drafts


def surprise(made: NDArray[np.int64]) -> float:
    """Chi-square of all texts against what the chain says, over its bound."""
    chances = LOGITS.double().softmax(1).numpy()
    start = 0.5 * (chances[0] + chances[1])
    expected = NUM_ROWS * np.einsum("a,ab,bc->abc", start, chances, chances).ravel()
    counts = np.bincount(made @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3)
    assert expected.min() > 1.0
    return chi_square(counts, expected) / chi_square_bound(VOCAB**3 - 1)


@pytest.mark.parametrize(
    ("propose", "least", "most"), [(bad, 0.0, 0.1), (good, 0.1, 0.6), (perfect, 1.0, 1.0)]
)
def test_drafts_leave_the_distribution_as_it_is(
    kernels: str, propose: Propose, least: float, most: float
) -> None:
    made, share = texts(propose)
    assert least <= share <= most
    assert surprise(made) < 1.0


def test_all_drafters_leave_the_same_texts() -> None:
    made = [texts(propose)[0] for propose in (bad, good, perfect)]
    assert (made[0] == made[1]).all() and (made[0] == made[2]).all()


@pytest.mark.parametrize("propose", [bad, good])
def test_a_sampler_that_favours_drafts_is_found_out(propose: Propose) -> None:
    """The statistic sees one draft in ten that is kept without being sampled, if it is unlikely;
    drafts that follow the distribution may be kept as they are."""
    assert (surprise(texts(propose, keeps_drafts=0.1)[0]) > 1.0) == (propose is bad)
