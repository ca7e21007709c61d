"""Masks of grammars on their way to the device."""

from __future__ import annotations

import numpy as np
import torch

from quire.decoding.masks import MaskTensors

CPU = torch.device("cpu")


def test_masks_are_applied_and_filled_in_again() -> None:
    lines = np.array([2, 0], np.int32)
    masks = MaskTensors(lines, 2, CPU)
    for allowed in (3, 40):
        masks.bits[:] = 0
        masks.bits[:, allowed // 32] = 1 << allowed % 32
        logits = torch.zeros(3, 50)
        masks.apply(logits)
        finite = logits.isfinite()
        assert finite.sum(dim=1).tolist() == [1, 50, 1]
        assert finite[[0, 2], allowed].all()
        assert masks.serve(lines.copy(), 2)


def test_other_lines_or_words_need_other_masks() -> None:
    masks = MaskTensors(np.array([2, 0], np.int32), 2, CPU)
    assert not masks.serve(np.array([0, 2], np.int32), 2)
    assert not masks.serve(np.array([2], np.int32), 2)
    assert not masks.serve(np.array([2, 0], np.int32), 3)
