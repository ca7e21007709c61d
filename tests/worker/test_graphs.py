"""What a CUDA graph is told: padding, and nothing of an earlier step. How graphs compute is tested
in tests/kernels/gpu/test_graph_steps.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.layers.attention.shared_prefix import prefix_tiles
from quire.protocol.plan import StepPlan
from quire.worker.rows import RowTable

pytest.importorskip("triton", reason="triton is not installed")

from quire.worker.graphs import DecodeKey, MixedKey, StepGraphs


def graphs_for(max_rows: int, prefix_members: int = 8) -> StepGraphs:
    model: Any = SimpleNamespace(new_logits=lambda count: torch.empty(count, 3))
    attention: Any = SimpleNamespace(
        max_decode_queries=8, prefix_members=prefix_members, tile_queries=16
    )
    table = RowTable(max_rows, 64, 4, 16, torch.device("cpu"))
    return StepGraphs(model, attention, table, max_rows, 1024, shares_prefixes=True)


def plan_for(rows: np.ndarray, counts: list[int]) -> StepPlan:
    new = np.array(counts, np.int32)
    return StepPlan(0, rows=rows, num_new_tokens=new, num_samples=np.ones_like(new))


@pytest.mark.parametrize("width", [1, 4, 32])
@pytest.mark.parametrize(
    ("max_rows", "size"), [(1, 1), (4, 4), (5, 5), (30, 30), (64, 64), (64, 8)]
)
def test_a_graph_reads_what_was_sent_and_nothing_older(
    max_rows: int, size: int, width: int
) -> None:
    """Batches of all sizes one after the other; every part begins at a multiple of 16 bytes, for
    else a kernel would be compiled once more."""
    graphs = graphs_for(max_rows, width)
    key = DecodeKey(size, True)
    assert key in graphs.keys
    dice = np.random.default_rng(size)
    for used in (size, size // 2, size - 1, 0):
        rows = dice.permutation(max_rows)[:used].astype(np.int32)
        sent = prefix_tiles(
            dice.integers(-1, 3, used, np.int32), np.array([16, 32, 48], np.int32), width
        )
        graphs._pad(key, plan_for(rows, [1] * used), sent)
        found_rows, starts, lens, members = (graphs._inputs[part] for part in graphs._parts[key])
        assert found_rows.tolist() == [*rows.tolist(), *[-1] * (size - used)]
        assert starts.tolist() == [*sent.starts.tolist(), *[0] * (size - used)]
        count = len(sent.lens)
        assert lens[:count].tolist() == sent.lens.tolist()
        assert not lens[count:].any()
        assert members.view(len(lens), width)[:count].tolist() == sent.members.tolist()
        for part in (starts, lens, members):
            assert part.storage_offset() % 4 == 0


@pytest.mark.parametrize("counts", [[1, 40, 1, 17], [2], []])
def test_padding_of_a_step_with_prompts(counts: list[int]) -> None:
    """Unused requests have no tokens, unused lines name the last token and unused tiles the
    request behind all others, also after a larger step."""
    graphs = graphs_for(64)
    key = next(key for key in graphs.keys if isinstance(key, MixedKey) and key.num_tokens == 64)
    graphs._pad(key, plan_for(np.arange(20, dtype=np.int32), [3] * 20))
    rows = np.array([7, 2, 30, 11][: len(counts)], np.int32)
    graphs._pad(key, plan_for(rows, counts))
    parts = (graphs._inputs[part] for part in graphs._parts[key])
    found, starts, lines, requests, indices = (part.tolist() for part in parts)
    pads, total = key.num_rows - len(counts), sum(counts)
    assert found == [*rows.tolist(), *[-1] * (pads + 1)]
    ends = np.cumsum([0, *counts]).tolist()
    assert starts == [*ends, *[total] * (pads + 1)]
    assert lines == [*(end - 1 for end in ends[1:]), *[63] * (key.num_lines - len(counts))]
    tiles = [(i, tile) for i, n in enumerate(counts) if n > 1 for tile in range(-(-n // 16))]
    used = list(zip(requests, indices, strict=True))[: len(tiles)]
    assert sorted(used) == tiles
    assert set(requests[len(tiles) :]) == {key.num_rows} and not any(indices[len(tiles) :])


def test_which_graph_takes_single_tokens() -> None:
    """The smallest with room for all rows; one that reads a shared prefix once where there is one,
    and then no graph of another kind."""
    graphs = graphs_for(40)
    prefixes = prefix_tiles(np.zeros(9, np.int32), np.array([16], np.int32), 8)

    def find(num_rows: int, *tiles: Any) -> Any:
        return graphs.find(plan_for(np.arange(num_rows, dtype=np.int32), [1] * num_rows), *tiles)

    assert [find(n) for n in (1, 3, 9, 33, 40)] == [
        DecodeKey(size, False) for size in (1, 4, 16, 40, 40)
    ]
    assert [find(n, prefixes) for n in (9, 33)] == [DecodeKey(16, True), DecodeKey(40, True)]
    mixed = plan_for(np.arange(10, dtype=np.int32), [1] * 9 + [5])
    assert isinstance(graphs.find(mixed), MixedKey) and graphs.find(mixed, prefixes) is None
    sizes = [key.num_tokens for key in graphs.keys]
    assert sizes == sorted(sizes, reverse=True), "the largest is captured first"
