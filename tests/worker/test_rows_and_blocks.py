"""Rows of the row table and blocks of the cache on a device: where things are written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.protocol.kv_spec import KVLayout, KVSpec
from quire.protocol.plan import AddedRow, StepPlan
from quire.protocol.sampling import SamplingParams
from quire.worker import kv_tensors
from quire.worker.kv_tensors import KVTensors
from quire.worker.rows import RowTable

CPU = torch.device("cpu")


def added(row: int, tokens: list[int]) -> AddedRow:
    ids = np.array(tokens, np.int32)
    return AddedRow(row, ids, len(tokens), 0, SamplingParams(), seed=0)


def test_tokens_of_added_rows_go_to_their_places() -> None:
    table = RowTable(4, 10, 3, 4, CPU)
    table.token_ids.fill_(-1)
    table.update(StepPlan(0, added_rows=[added(3, [7, 8, 9]), added(1, [5])]))
    assert table.token_ids[3].tolist() == [7, 8, 9] + [-1] * 7
    assert table.token_ids[1].tolist() == [5] + [-1] * 9
    assert (table.token_ids[[0, 2]] == -1).all()
    assert table.num_tokens.tolist() == [0, 1, 0, 3]


def test_places_beyond_32_bits() -> None:
    """1,024 rows of 4 million tokens, of which nothing is allocated."""
    length = 1 << 22
    table = RowTable(1024, length, 8, 16, torch.device("meta"))
    _, places, _ = table._added([added(1023, [1, 2])])
    assert places.view(np.int64).tolist() == [1023 * length, 1023 * length + 1]


def test_drafts_wait_behind_known_tokens_as_far_as_there_is_room() -> None:
    table = RowTable(4, 6, 3, 4, CPU)
    table.update(StepPlan(0, added_rows=[added(3, [7, 8]), added(1, [5] * 5), added(2, [4] * 6)]))
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [9, -1, 3]], dtype=torch.int32)
    table.write_drafts(torch.tensor([3, 1, 2]), drafts[:3])
    assert table.token_ids[3].tolist() == [7, 8, 1, 2, 3, 0]
    assert table.token_ids[1].tolist() == [5] * 5 + [1]
    assert table.token_ids[2].tolist() == [4] * 6
    assert table.num_drafts.tolist() == [0, 1, 0, 3]
    table.write_drafts(torch.tensor([3]), drafts[3:])
    assert table.token_ids[3].tolist() == [7, 8, 9, 2, 3, 0]
    assert table.num_drafts.tolist() == [0, 1, 0, 1]
    assert table.num_tokens.tolist() == [0, 5, 6, 2]


def test_no_draft_waits_after_a_row_is_added_cut_or_appended_to() -> None:
    table = RowTable(4, 10, 3, 4, CPU)
    rows = torch.tensor([1, 2, 3])
    table.update(StepPlan(0, added_rows=[added(row, [5, 6, 7]) for row in (1, 2, 3)]))
    table.num_computed[rows] = torch.tensor([3, 3, 1], dtype=torch.int32)
    table.write_drafts(rows, torch.full((3, 2), 8, dtype=torch.int32))
    assert table.num_drafts.tolist() == [0, 2, 2, 2]
    ints = np.array([1], np.int32)
    table.update(StepPlan(1, append_rows=ints, append_tokens=ints * 9))
    assert table.num_drafts.tolist() == [0, 0, 2, 2]
    assert table.token_ids[1, :4].tolist() == [5, 6, 7, 9]
    cut = np.array([2, 3], np.int32)
    table.update(StepPlan(2, cut_rows=cut, cut_lengths=cut))
    assert table.num_drafts.tolist() == [0, 0, 0, 0]
    assert table.num_tokens.tolist() == [0, 4, 2, 3]
    assert table.num_computed.tolist() == [0, 3, 1, 1], "the last token is computed again"
    table.write_drafts(rows, torch.full((3, 2), 8, dtype=torch.int32))
    table.update(StepPlan(3, added_rows=[added(2, [1])]))
    assert table.num_drafts.tolist() == [0, 2, 0, 2]


def test_bounds_of_computed_tokens() -> None:
    """As if all drafts were accepted, up to the length of a row."""
    table = RowTable(4, 10, 3, 4, CPU)
    rows, three = np.array([1, 2], np.int32), np.array([3, 3], np.int32)
    first = [added(1, [5, 6, 7]), replace(added(2, [5] * 6), num_computed_tokens=3)]
    table.update(StepPlan(0, added_rows=first, rows=rows, num_new_tokens=three))
    assert table.max_computed.tolist() == [0, 3, 6, 0]
    table.update(StepPlan(1, rows=rows, num_new_tokens=three))
    assert table.max_computed.tolist() == [0, 6, 9, 0]
    cut = StepPlan(2, rows=rows, num_new_tokens=three)
    cut.cut_rows, cut.cut_lengths = rows[:1], three[:1]
    table.update(cut)
    assert table.max_computed.tolist() == [0, 5, 10, 0]
    table.update(StepPlan(3, added_rows=[added(2, [5])]))
    assert table.max_computed.tolist() == [0, 5, 0, 0]


def test_a_row_that_is_cut_and_appended_to_in_one_plan() -> None:
    table = RowTable(2, 10, 3, 4, CPU)
    table.update(StepPlan(0, added_rows=[added(1, [5, 6, 7])]))
    one = np.array([1, 1], np.int32)
    plan = StepPlan(1, append_rows=one, append_tokens=np.array([8, 9], np.int32))
    plan.cut_rows, plan.cut_lengths = one[:1], one[:1] * 2
    table.update(plan)
    assert table.token_ids[1, :4].tolist() == [5, 6, 8, 9]
    assert table.num_tokens.tolist() == [0, 4]


def test_lines_of_a_plan_are_the_last_tokens_of_its_rows() -> None:
    plan = StepPlan(
        0,
        rows=np.array([4, 2, 7, 1], np.int32),
        num_new_tokens=np.array([3, 5, 1, 4], np.int32),
        num_samples=np.array([3, 0, 1, 2], np.int32),
    )
    assert plan.first_lines.tolist() == [0, 3, 4]
    assert plan.line_offsets.tolist() == [0, 1, 2, 0, 0, 1]
    assert plan.line_tokens.tolist() == [0, 1, 2, 8, 11, 12]
    plan.num_samples = np.minimum(plan.num_samples, 1)
    assert plan.line_tokens.tolist() == [2, 8, 12]


@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3"])
def test_blocks_are_copied_in_all_layers_in_pieces(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their scales, which are part of what a block takes."""
    monkeypatch.setattr(kv_tensors, "MAX_COPIED_AT_ONCE", 2)
    layout = KVLayout.of([KVSpec(3, 4, dtype)] * 2, 4)
    kv = KVTensors(layout, 12, CPU)
    parts = [kv.data.movedim(2, 0)]
    parts += [kv.scales.movedim(1, 0)] if kv.scales is not None else []
    assert sum(part[0].nbytes for part in parts) == layout.bytes_per_block
    expected = []
    sources, targets = torch.tensor([0, 3, 0, 5, 7]), torch.tensor([11, 1, 2, 4, 6])
    for part in parts:
        part.copy_(torch.randn(part.shape))
        expected.append(part.float())
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            expected[-1][target] = expected[-1][source]
    kv.copy_blocks(sources.int(), targets.int())
    for part, copied in zip(parts, expected, strict=True):
        assert torch.equal(part.float(), copied)
