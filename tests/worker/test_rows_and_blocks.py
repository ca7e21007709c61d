"""Rows of the request table and blocks of the cache on a device: where things are written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.protocol.plan import AddedRow, StepPlan
from quire.protocol.sampling import SamplingParams
from quire.worker import kv_tensors
from quire.worker.kv_tensors import KVSpec, KVTensors
from quire.worker.request_table import RequestTable

CPU = torch.device("cpu")


def added(row: int, tokens: list[int]) -> AddedRow:
    ids = np.array(tokens, np.int32)
    return AddedRow(row, ids, len(tokens), 0, SamplingParams(), seed=0)


def test_tokens_of_added_rows_go_to_their_places() -> None:
    table = RequestTable(4, 10, 3, 4, CPU)
    table.token_ids.fill_(-1)
    table.update(StepPlan(0, added_rows=[added(3, [7, 8, 9]), added(1, [5])]))
    assert table.token_ids[3].tolist() == [7, 8, 9] + [-1] * 7
    assert table.token_ids[1].tolist() == [5] + [-1] * 9
    assert (table.token_ids[[0, 2]] == -1).all()
    assert table.num_tokens.tolist() == [0, 1, 0, 3]


def test_places_beyond_32_bits() -> None:
    """1,024 rows of 4 million tokens, of which nothing is allocated."""
    length = 1 << 22
    table = RequestTable(1024, length, 8, 16, torch.device("meta"))
    _, places, _ = table._added([added(1023, [1, 2])])
    assert places.view(np.int64).tolist() == [1023 * length, 1023 * length + 1]


def test_blocks_are_copied_in_all_layers_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tensors, "MAX_COPIED_AT_ONCE", 2)
    kv = KVTensors(KVSpec(2, 1, 4, 4, torch.float32), 12, CPU)
    kv.data.copy_(torch.randn(kv.data.shape))
    expected = kv.data.clone()
    sources, targets = torch.tensor([0, 3, 0, 5, 7]), torch.tensor([11, 1, 2, 4, 6])
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        expected[:, :, target] = expected[:, :, source]
    kv.copy_blocks(sources.int(), targets.int())
    assert torch.equal(kv.data, expected)
