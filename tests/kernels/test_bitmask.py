"""The native kernel that applies masks of grammars against its reference."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.torch.bitmask import apply_bitmask as reference

pytestmark = pytest.mark.usefixtures("native")


@pytest.mark.parametrize(
    ("vocab_size", "num_words"), [(320, 10), (333, 11), (333, 9), (31, 1), (49152, 1536)]
)
@pytest.mark.parametrize("lines", [[0, 1, 2, 3], [3, 1], []])
def test_native_is_the_reference(vocab_size: int, num_words: int, lines: list[int]) -> None:
    from quire.kernels.cpu.sampling import apply_bitmask

    torch.manual_seed(vocab_size)
    bits = torch.randint(-(2**31), 2**31, (len(lines), num_words), dtype=torch.int32)
    bits[:, ::3], bits[:, 1::3] = -1, 0
    expected = torch.randn(4, vocab_size)
    found = expected.clone()
    where = torch.tensor(lines, dtype=torch.int32)
    reference(expected, where, bits)
    apply_bitmask(found, where, bits)
    assert torch.equal(found, expected)
    assert len(lines) < 4 or num_words == 1 or (found == -torch.inf).any()
