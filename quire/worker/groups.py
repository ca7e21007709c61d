"""How a rank meets the others of its model."""

from __future__ import annotations

import os

from quire.config.device import DeviceInfo
from quire.config.options import ParallelOptions
from quire.kernels.cpu.collectives import SharedMemoryGroup, region_bytes
from quire.layers.parallel import Parallel, Stage
from quire.protocol.ranks import Inherited, StartRank
from quire.protocol.ring import new_ring


def join(start: StartRank, options: ParallelOptions, device: DeviceInfo) -> Parallel:
    """The place of a rank, once all have come."""
    size = options.tensor_parallel_size
    index, rank = divmod(start.rank, size)
    assert isinstance(start.channel, Inherited) and device.type == "cpu"
    group = SharedMemoryGroup(start.channel.group_fds[index], rank, size, options.timeout_s)
    return Parallel(rank, size, group, Stage(index, options.pipeline_parallel_size))


def shared_files(size: int, num_stages: int) -> tuple[list[int], list[list[int]]]:
    """For ranks of one host that compute on its CPUs: memory for the collectives of each stage,
    and of each stage but the last, for what its ranks send to the next one."""
    group_fds = []
    for stage in range(num_stages):
        group_fds.append(os.memfd_create(f"quire-stage-{stage}"))
        os.ftruncate(group_fds[-1], region_bytes(size))
    return group_fds, [[new_ring() for _ in range(size)] for _ in range(num_stages - 1)]
