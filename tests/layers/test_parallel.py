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
