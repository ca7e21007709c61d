"""`Parallel`'s collectives between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from quire.layers.parallel import Parallel
from quire.worker.groups import TorchGroup


def rank_main(process: int, folder: str) -> None:
    """The last two of three processes are the ranks; the first is none of theirs."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=process, world_size=3)
    group = dist.new_group([1, 2])
    if process:
        rank = process - 1
        assert isinstance(group, dist.ProcessGroup)
        parallel = Parallel(rank, 2, TorchGroup(group))
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
        gathered = parallel.all_gather(x)
        torch.save((parallel.all_reduce(x), gathered), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_collectives_between_two_processes(tmp_path: Path) -> None:
    """Sums are equal on both ranks, gathered columns are in rank order, others are not asked."""
    mp.spawn(rank_main, (str(tmp_path),), nprocs=3)
    for rank in range(2):
        reduced, gathered = torch.load(tmp_path / f"{rank}.pt")
        assert reduced.tolist() == [[12.0, 14.0], [16.0, 18.0]]
        assert gathered.tolist() == [[1.0, 2.0, 11.0, 12.0], [3.0, 4.0, 13.0, 14.0]]


def test_one_rank_returns_its_own_tensor() -> None:
    """A single rank must not need a process group."""
    x = torch.randn(2, 3)
    assert Parallel().all_reduce(x) is x
    assert Parallel().all_gather(x) is x


@pytest.mark.parametrize(
    ("total", "size", "block", "share"),
    [
        (11008, 2, 1, 5504),
        (11008, 3, 1, 3670),
        (11008, 2, 256, 5632),  # 22 and 21 blocks
        (11008, 3, 256, 3840),
        (1536, 3, 256, 512),
        (1536, 4, 256, 384),  # whole blocks of 128: of 256, one rank would have none
        (96, 2, 256, 48),
        (100, 3, 32, 36),
        (101, 3, 32, 34),
    ],
)
def test_shares_cut_no_blocks_where_that_costs_little(
    total: int, size: int, block: int, share: int
) -> None:
    assert Parallel(0, size).share(total, block) == share


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "shares"),
    [
        # One KV head, or a latent: query heads are divided one by one.
        (16, 1, 3, [(0, 6, 0, 1), (6, 6, 0, 1), (12, 6, 0, 1)]),
        (4, 1, 3, [(0, 2, 0, 1), (2, 2, 0, 1), (4, 2, 0, 1)]),
        (8, 1, 2, [(0, 4, 0, 1), (4, 4, 0, 1)]),
        (8, 2, 4, [(0, 2, 0, 1), (2, 2, 0, 1), (4, 2, 1, 1), (6, 2, 1, 1)]),
        (9, 3, 2, [(0, 6, 0, 2), (6, 6, 2, 2)]),
    ],
)
def test_heads_of_ranks(
    heads: int, kv_heads: int, size: int, shares: list[tuple[int, int, int, int]]
) -> None:
    found = [Parallel(rank, size).heads(heads, kv_heads) for rank in range(size)]
    assert [(one.first, one.count, one.kv_first, one.kv_count) for one in found] == shares
    assert {one.copies for one in found} == {max(size // kv_heads, 1)}


@pytest.mark.parametrize(
    ("count", "size", "sizes"), [(8, 2, [4, 4]), (5, 4, [1, 1, 1, 2]), (3, 4, [0, 1, 1, 1])]
)
def test_whole_experts_of_ranks(count: int, size: int, sizes: list[int]) -> None:
    """Numbers of experts differ by one at most, so that as few ranks as possible have none."""
    ranks = [Parallel(rank, size, expert_parallel=True).experts(count) for rank in range(size)]
    assert [len(kept) for kept in ranks] == sizes
    assert [expert for kept in ranks for expert in kept] == list(range(count))
    assert Parallel(1, size).experts(count) == range(count)
