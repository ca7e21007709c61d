"""Verification of drafts: which of the tokens sampled in a row's lines become its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DraftedRows(NamedTuple):
    """The rows of a row table, int32 each; drafts lie behind the known tokens."""

    token_ids: Tensor
    """[rows, tokens]."""
    num_tokens: Tensor
    num_computed: Tensor
    num_drafts: Tensor
    appends: Tensor
    """0 for rows that keep none of what is sampled for them."""


def write_drafts(rows: Tensor, drafts: Tensor, table: DraftedRows) -> Tensor:
    """Puts `drafts` (int32 [R, k], the used ones first, then negative ones) behind the known tokens
    of `rows`, as many as fit, and says how many wait in each; int32 [R]."""
    room = table.token_ids.shape[1] - table.num_tokens[rows]
    counts = torch.minimum((drafts >= 0).cumprod(1).sum(1).int(), room)
    column = torch.arange(drafts.shape[1], device=drafts.device)
    of, at = (column < counts[:, None]).nonzero(as_tuple=True)
    table.token_ids[rows[of], table.num_tokens[rows[of]] + at.int()] = drafts[of, at]
    table.num_drafts[rows] = counts
    return counts


def accept_tokens(
    rows: Tensor, first_lines: Tensor, num_lines: Tensor, tokens: Tensor, table: DraftedRows
) -> Tensor:
    """Appends to each of `rows` what it accepts of `tokens` [L], and says how many; int32 [R].

    Row i has the lines `first_lines[i]` and following, `num_lines[i]` in all. The token of line j
    was sampled as if the j drafts before it were known. The first is always accepted, a later one
    if those before it are and the draft at the place of the last of these is that token. Then all
    tokens but the last count as computed, and no draft waits.
    """
    column = torch.arange(int(num_lines.max()), device=tokens.device)
    sampled = tokens[(first_lines[:, None] + column).clamp_max(len(tokens) - 1)]
    places = table.num_tokens[rows][:, None] + column
    drafts = table.token_ids[rows[:, None], places.clamp_max(table.token_ids.shape[1] - 1)]
    num_verified = torch.minimum(num_lines - 1, table.num_drafts[rows])
    agrees = (column < num_verified[:, None]) & (drafts == sampled)
    counts = 1 + agrees.int().cumprod(1).sum(1).int()
    appends = table.appends[rows].bool()
    of, at = (appends[:, None] & (column < counts[:, None])).nonzero(as_tuple=True)
    table.token_ids[rows[of], places[of, at]] = sampled[of, at]
    known = table.num_tokens[rows] + counts
    table.num_tokens[rows] = torch.where(appends, known, table.num_tokens[rows])
    table.num_computed[rows] = torch.where(appends, known - 1, table.num_computed[rows])
    table.num_drafts[rows] = 0
    return counts
