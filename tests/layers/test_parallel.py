"""`Parallel`'s collectives between real processes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from quire.layers.parallel import Parallel


def rank_main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    parallel = Parallel(rank, 2)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
    gathered = parallel.all_gather(x)
    torch.save((parallel.all_reduce(x), gathered), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_collectives_between_two_processes(tmp_path: Path) -> None:
    """Sums are equal on both ranks, and gathered columns are in rank order."""
    mp.spawn(rank_main, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        reduced, gathered = torch.load(tmp_path / f"{rank}.pt")
        assert reduced.tolist() == [[12.0, 14.0], [16.0, 18.0]]
        assert gathered.tolist() == [[1.0, 2.0, 11.0, 12.0], [3.0, 4.0, 13.0, 14.0]]


def test_one_rank_returns_its_own_tensor() -> None:
    """A single rank must not need a process group."""
    x = torch.randn(2, 3)
    assert Parallel().all_reduce(x) is x
    assert Parallel().all_gather(x) is x
