"""One token for each line of logits: the highest, or drawn, or drawn from what filters keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernel_cases.case import DEVICE, SHAPE, Case, Sides, copies_of, random
from quire.kernels import dispatch
from quire.kernels.torch.sampling import Kinds, RowSettings, merge_scratch
from quire.kernels.torch.sampling import sample_tokens as sample_tokens_reference

MAX_CHECKED = 64
"""Lines of a batch that are compared with the reference."""
MIN_EQUAL = 0.95
"""Kernel and reference may round the last place of a random number differently."""


@dataclass(frozen=True)
class Way:
    """How all lines choose."""

    name: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0

    def settings(self, count: int) -> RowSettings:
        def each(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=DEVICE)

        seeds = torch.arange(count, dtype=torch.int32, device=DEVICE)
        return RowSettings(
            temperature=each(self.temperature),
            seed_low=seeds,
            seed_high=seeds + 7,
            top_k=each(self.top_k, torch.int32),
            top_p=each(self.top_p),
            log_min_p=each(float("-inf")),
            scratch=merge_scratch(count, DEVICE),
        )

    def in_torch(self, logits: Tensor) -> Tensor:
        """The usual way: a sort, and a draw by exponentially distributed numbers."""
        if self.temperature == 0:
            return logits.argmax(-1)
        tempered, order = logits.float() / self.temperature, None
        if self.is_filtered:
            tempered, order = tempered.sort(-1, descending=True)
            chances = tempered.softmax(-1)
            dropped = chances.cumsum(-1) - chances >= self.top_p
            if self.top_k:
                dropped[:, self.top_k :] = True
            tempered = tempered.masked_fill(dropped, float("-inf"))
        chances = tempered.softmax(-1)
        drawn = (chances / torch.empty_like(chances).exponential_()).argmax(-1, keepdim=True)
        return drawn if order is None else order.gather(-1, drawn)


GREEDY = Way("greedy", 0.0)
DRAWN = Way("temperature 1", 1.0)
FILTERED = Way("top_k 50, top_p 0.9", 1.0, top_k=50, top_p=0.9)


def sampling(way: Way, lines: int, vocab: int = SHAPE.vocab) -> Case:
    num_bytes = 2 * lines * vocab

    def make() -> Sides:
        copies = copies_of(num_bytes)
        logits = 3 * random(copies, lines, vocab)
        rows = torch.randperm(lines, device=DEVICE)
        positions = torch.full((lines,), 500, dtype=torch.int32, device=DEVICE)
        settings = way.settings(lines)
        kinds = Kinds(way.temperature > 0, way.is_filtered, way.is_filtered)

        def ours(copy: int) -> Tensor:
            return dispatch.sample_tokens(logits[copy], rows, positions, settings, kinds)

        def check() -> None:
            count = min(lines, MAX_CHECKED)
            checked = logits[0, :count]
            expected = sample_tokens_reference(checked, rows[:count], positions, settings)
            pair = torch.stack([ours(0)[:count], expected], 1).long()
            found_logit, expected_logit = checked.gather(1, pair).unbind(1)  # ties may differ
            equal = (found_logit == expected_logit).float().mean()
            assert equal >= MIN_EQUAL, f"{equal:.0%} of the lines sample as the reference does"

        return Sides(
            [partial(ours, i) for i in range(copies)],
            [partial(way.in_torch, logits[i]) for i in range(copies)],
            check,
        )

    return Case(f"{way.name}: {lines:,} lines of {vocab:,}", num_bytes, 0, False, make)
