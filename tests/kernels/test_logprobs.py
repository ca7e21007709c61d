"""What log-probabilities need of lines of logits: the native library against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.sampling import summarize
from quire.kernels.torch.logprobs import summarize as reference

pytestmark = pytest.mark.usefixtures("native")


def check(logits: Tensor, num_top: int) -> None:
    vocab = logits.shape[1]
    tokens = torch.arange(len(logits)) * 7 % vocab
    tokens[0] = int(logits[0].argmax())
    found, expected = summarize(logits, tokens, num_top), reference(logits, tokens, num_top)
    near = {"atol": 1e-6, "rtol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(found.best, expected.best, **{**near, "atol": 0, "rtol": 0})
    torch.testing.assert_close(found.log_total, expected.log_total, **near)
    assert torch.equal(found.ranks, expected.ranks)
    # The order of the reference's topk leaves open which of many equals it sees, so this is a sort.
    ordered = logits.sort(stable=True, dim=-1, descending=True).indices[:, :num_top]
    finite = expected.best[:, 0].isfinite()
    assert torch.equal(found.top_ids[finite], ordered[finite])
    assert torch.equal(found.top_ids[~finite], expected.top_ids[~finite])


@pytest.mark.parametrize("threads", range(1, 9))
def test_any_number_of_threads(threads: int, isa: str, num_threads: None) -> None:
    torch.set_num_threads(threads)
    check(torch.randn(60, 2503, generator=torch.Generator().manual_seed(threads)) * 3, 5)


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 15, 16, 17, 33, 100, 1025])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_odd_vocabularies(vocab: int, spread: float, isa: str, poisoned_memory: None) -> None:
    """Any number of the likeliest tokens up to all; with many equals, and forbidden tokens."""
    wide = torch.randn(9, vocab + 4, generator=torch.Generator().manual_seed(vocab)) * spread
    logits = wide[:, 3 : vocab + 3]
    logits[1:3] = (logits[1:3] / spread).round()
    logits[3:5, 1::3] = -torch.inf
    logits[5] = -torch.inf
    logits[5, 0] = 4.0
    logits[6] = 1.5
    for num_top in {0, 1, min(5, vocab), vocab // 2, vocab}:
        check(logits, num_top)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_lines_without_a_finite_best_logit(value: float, isa: str) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    logits[1] = value
    check(logits, 4)


def test_refuses_tokens_outside_the_vocabulary() -> None:
    for token in (-1, 9):
        with pytest.raises(ValueError, match="from 0 to 8"):
            summarize(torch.zeros(1, 9), torch.tensor([token]), 1)
    with pytest.raises(ValueError, match="num_top=10"):
        summarize(torch.zeros(1, 9), torch.tensor([0]), 10)
