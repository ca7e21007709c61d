"""How each row chooses its token: temperature, seed, top_k, top_p and min_p."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.decoding.rows import Batch, RowColumns, RowSet
from quire.kernels import dispatch
from quire.kernels.torch.sampling import Kinds, RowSettings, merge_scratch
from quire.protocol.plan import AddedRow


class Choice:
    """Keeps the rows' settings and chooses by them."""

    def __init__(self, vocab_size: int, columns: RowColumns, num_tokens: Tensor) -> None:
        self._vocab_size = vocab_size
        self._columns = columns
        self._num_tokens = num_tokens
        self._drawing = RowSet(columns.max_rows)
        self._filtering = RowSet(columns.max_rows)
        self._searching = RowSet(columns.max_rows)
        self._temperature = columns.floats()
        self._seed_low = columns.integers()
        self._seed_high = columns.integers()
        self._top_k = columns.integers()
        self._top_p = columns.floats()
        self._log_min_p = columns.floats()
        self._settings = RowSettings(
            self._temperature.device,
            self._seed_low.device,
            self._seed_high.device,
            self._top_k.device,
            self._top_p.device,
            self._log_min_p.device,
            merge_scratch(columns.max_rows, columns.device),
        )
        self._line_scratch = self._settings.scratch

    def add(self, added: AddedRow) -> None:
        params, row = added.params, added.row
        # The highest score alone is kept by top_k=1: drawing could only choose among exact ties.
        if params.is_greedy or params.top_k == 1:
            self._temperature.host[row] = 0.0
            return
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        self._temperature.host[row] = params.temperature
        self._seed_low.host.view("uint32")[row] = added.seed & 0xFFFFFFFF
        self._seed_high.host.view("uint32")[row] = (added.seed >> 32) & 0xFFFFFFFF
        self._top_k.host[row] = top_k
        self._top_p.host[row] = params.top_p
        self._log_min_p.host[row] = math.log(params.min_p) if params.min_p else -math.inf
        self._drawing.add(row)
        if top_k or params.top_p < 1.0:
            self._searching.add(row)
        if top_k or params.top_p < 1.0 or params.min_p:
            self._filtering.add(row)

    def remove(self, row: int) -> None:
        for rows in (self._drawing, self._filtering, self._searching):
            rows.discard(row)

    def apply(self, scores: Tensor, batch: Batch) -> Tensor:
        """One token per line of `scores` [S, V], which are left as they are; int32 [S]."""
        kinds = Kinds(
            batch.has(self._drawing), batch.has(self._filtering), batch.has(self._searching)
        )
        if batch.offsets is not None:
            return self._choose_verifying(scores, batch, kinds)
        return dispatch.choose_tokens(scores, batch.rows, self._num_tokens, self._settings, kinds)

    def _choose_verifying(self, scores: Tensor, batch: Batch, kinds: Kinds) -> Tensor:
        """Where rows have several lines: each is chosen for as if it were a row of its own."""
        if len(batch) > self._line_scratch.shape[1]:
            self._line_scratch = merge_scratch(2 * len(batch), scores.device)
        taken, lines = self._columns.take(batch.rows), batch.all_lines
        settings = RowSettings(
            self._temperature.of(taken),
            self._seed_low.of(taken),
            self._seed_high.of(taken),
            self._top_k.of(taken),
            self._top_p.of(taken),
            self._log_min_p.of(taken),
            self._line_scratch,
        )
        positions = lines.num_known(self._num_tokens)
        return dispatch.choose_tokens(scores, lines.numbers, positions, settings, kinds)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Choose once in every way from scores as they come and as they are when edited."""
        rows = torch.zeros(1, dtype=torch.int64, device=self._num_tokens.device)
        for kind in {dtype, torch.float32}:
            scores = torch.zeros((1, self._vocab_size), dtype=kind, device=rows.device)
            for flags in ((False,) * 3, (True, False, False), (True, True, False), (True,) * 3):
                args = (scores, rows, self._num_tokens, self._settings, Kinds(*flags))
                dispatch.choose_tokens(*args)
