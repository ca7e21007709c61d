"""Drafts by n-grams: kernels against the reference, and the reference against examples."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.drafts import propose_ngrams as native
from quire.kernels.torch.ngrams import NgramSettings, propose_ngrams

NONE = [-1, -1, -1]


def drafts_of(
    text: list[int], least: int, most: int, num_drafts: int = 3, beyond: int = 9
) -> list[int]:
    tokens = torch.tensor([text], dtype=torch.int32)
    rows = torch.zeros(1, dtype=torch.int32)
    settings = NgramSettings(num_drafts, least, most, beyond)
    found: list[int] = propose_ngrams(tokens, torch.tensor([len(text)]).int(), rows, settings)[
        0
    ].tolist()
    return found


def test_what_followed_the_last_tokens_is_drafted() -> None:
    assert drafts_of([1, 2, 3, 4, 5, 6, 1, 2], 2, 2) == [3, 4, 5]


def test_more_common_tokens_win_over_a_later_place() -> None:
    assert drafts_of([9, 1, 2, 3, 7, 8, 1, 2, 4, 7, 9, 1, 2], 2, 3) == [3, 7, 8]
    assert drafts_of([9, 1, 2, 3, 7, 8, 1, 2, 4, 7, 9, 1, 2], 2, 2) == [4, 7, 9]


def test_fewer_common_tokens_than_the_least_are_not_enough() -> None:
    assert drafts_of([1, 2, 3, 4, 2], 2, 5) == NONE
    assert drafts_of([1, 2, 3, 4, 2], 1, 5) == [3, 4, 2]


def test_what_repeats_goes_on() -> None:
    assert drafts_of([5, 1, 2, 1, 2], 2, 4) == [1, 2, 1]
    assert drafts_of([7, 7, 7], 1, 4) == [7, 7, 7]


def test_a_short_agreement_has_few_drafts() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert drafts_of(text, 1, 12, 5, beyond=1) == [3, 4, 5, -1, -1]
    assert drafts_of([*text, 3], 1, 12, 5, beyond=1) == [4, 5, 6, 7, -1]
    assert drafts_of([*text, 3], 1, 12, 5, beyond=0) == [4, 5, 6, -1, -1]


def test_a_text_of_one_token_has_no_drafts() -> None:
    assert drafts_of([7], 1, 1) == NONE
    assert drafts_of([7], 3, 5) == NONE


def random_rows(num_rows: int, length: int, vocab: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (num_rows, length), generator=generator, dtype=torch.int32)
    known = torch.randint(1, length + 1, (num_rows,), generator=generator, dtype=torch.int32)
    rows = torch.randperm(num_rows, generator=generator)[: num_rows - 2].int()
    return tokens, known, rows


SETTINGS = [
    NgramSettings(1, 1, 1),
    NgramSettings(3, 2, 5),
    NgramSettings(8, 3, 12),
    NgramSettings(8, 2, 12, beyond=1),
]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("vocab", [2, 5, 300])
def test_the_native_kernel_drafts_as_the_reference(settings: NgramSettings, vocab: int) -> None:
    for seed in range(5):
        rows = random_rows(9, 60, vocab, seed)
        assert torch.equal(native(*rows, settings), propose_ngrams(*rows, settings))
