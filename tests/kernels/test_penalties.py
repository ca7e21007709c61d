"""The native kernel that applies penalties against its reference."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.sampling import penalize
from quire.kernels.torch import penalties as reference
from quire.kernels.torch.penalties import PenaltySettings

pytestmark = pytest.mark.usefixtures("native")
SETTINGS = PenaltySettings(
    torch.tensor([0, 2, 0, 1, 3], dtype=torch.int32),
    torch.tensor([9.0, 1.3, 9.0, 1.0, 0.7]),
    torch.tensor([9.0, 0.37, 9.0, -0.7, 0.0]),
    torch.tensor([9.0, 0.21, 9.0, 0.0, 1.1]),
)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000, 5003])
@pytest.mark.parametrize("rows", [[3, 0, 1, 4], [2], [1, 1], []])
def test_native_is_the_reference_bit_for_bit(vocab: int, rows: list[int]) -> None:
    """In the lines whose rows have a slot, and nowhere else; forbidden tokens stay forbidden."""
    generator = torch.Generator().manual_seed(vocab)
    wide = torch.randn(len(rows), vocab + 3, generator=generator) * 5
    wide[:, ::7] = -torch.inf
    uses = torch.randint(-6, 9, (4, vocab), generator=generator).clamp_min(0).int()
    uses[1, vocab // 2 :] = 0
    expected = wide.clone()
    reference.penalize(
        expected[:, 1 : vocab + 1], torch.tensor(rows, dtype=torch.int64), uses, SETTINGS
    )
    penalize(wide[:, 1 : vocab + 1], torch.tensor(rows, dtype=torch.int64), uses, SETTINGS)
    assert torch.equal(wide, expected)
