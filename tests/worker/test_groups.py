"""How ranks meet, and what passes between them: shared memory and gloo, in real processes.

Turns red if ranks of one stage reach those of another, if a stage receives out of order, or if
ranks that do not come, do not fit together or die are waited for without a name.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quire.config.device import cpu_device
from quire.config.options import ParallelOptions
from quire.layers.parallel import Parallel
from quire.protocol.errors import OptionError, RankMissing
from quire.protocol.ranks import Connected, Inherited, StartRank
from quire.worker.groups import join, new_store, shared_files
from tests.processes import Failed, Started, closed_port, free_port, given, results

LONG_S = 100.0
WORLDS = [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]


def options_for(tp: int, pp: int, timeout_s: float) -> ParallelOptions:
    return ParallelOptions(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        distributed_timeout_seconds=round(timeout_s),
        enable_expert_parallel=tp > 1,
    )


class Ranks:
    """Processes that `join` and then do some work."""

    def __init__(self, kind: str, tp: int, pp: int, work: Any, timeout_s: float = LONG_S) -> None:
        self._options = options_for(tp, pp, timeout_s)
        self._fds: tuple[list[int], list[list[int]]] = ([], [])
        self._address: tuple[str, int] | None = None
        if kind == "memory":
            self._fds = shared_files(tp, pp)
        else:
            self._store = new_store("127.0.0.1", timeout_s)
            self._address = "127.0.0.1", self._store.port
        self.started = [self._start(rank, work) for rank in range(tp * pp)]

    def _start(self, rank: int, work: Any) -> Started:
        group_fds, link_fds = self._fds
        groups = [given(fd) for fd in group_fds]
        links = [[given(fd) for fd in fds] for fds in link_fds]
        return Started(joined, rank, self._options, self._address, groups, links, work)

    def results(self) -> list[Any]:
        found = results(self.started)
        for fd in (*self._fds[0], *(fd for fds in self._fds[1] for fd in fds)):
            os.close(fd)
        return found


@dataclass(frozen=True)
class Place:
    rank: int
    tp: int
    pp: int


def joined(
    rank: int,
    options: ParallelOptions,
    address: tuple[str, int] | None,
    groups: list[DupFd],
    links: list[list[DupFd]],
    work: Any,
) -> Any:
    """In a process: numbers of files are this process's own."""
    group_fds = [file.detach() for file in groups]
    files = Inherited(-1, -1, group_fds, [[file.detach() for file in some] for some in links])
    start = StartRank(rank, {}, files, store=address)
    place = Place(rank, options.tensor_parallel_size, options.pipeline_parallel_size)
    return work(place, join(start, options, cpu_device()))


def numbers(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 7, generator=generator).to(dtype)


def meet(place: Place, parallel: Parallel) -> list[list[Any]]:
    """What passes between ranks in a few steps: in a stage, and on to the next."""
    stage = parallel.stage
    assert (stage.index, parallel.rank) == divmod(place.rank, place.tp)
    assert (stage.count, parallel.size) == (place.pp, place.tp)
    assert parallel.expert_parallel == (place.tp > 1)
    link = parallel.stage.link
    found = []
    for step in range(6):
        x = numbers(place.rank, step)
        if link is not None and not parallel.stage.is_first:
            x = x + link.receive(torch.empty(5, 7))
        gathered = parallel.all_gather(x)
        x = parallel.all_reduce(x.clone())
        ids = parallel.broadcast(torch.tensor([place.rank, step]))
        if link is not None and not parallel.stage.is_last:
            link.send(x)
        found.append([x.clone().tolist(), gathered.tolist(), ids.tolist()])
        x.zero_()
    stay()
    return found


def expected(tp: int, pp: int) -> list[list[list[Any]]]:
    """The same, in one process."""
    found: list[list[list[Any]]] = [[] for _ in range(tp * pp)]
    for step in range(6):
        before = [torch.zeros(5, 7)] * tp
        for stage in range(pp):
            first = stage * tp
            every = [numbers(first + i, step) + before[i] for i in range(tp)]
            total = every[0]
            for x in every[1:]:
                total = total + x
            before = [total] * tp
            for i in range(tp):
                gathered = torch.cat(every, -1)
                found[first + i].append([total.tolist(), gathered.tolist(), [first, step]])
    return found


def check_world(kind: str, tp: int, pp: int) -> None:
    found = Ranks(kind, tp, pp, meet).results()
    for rank, wanted in enumerate(expected(tp, pp)):
        torch.testing.assert_close(
            [torch.tensor(x) for step in found[rank] for x in step],
            [torch.tensor(x) for step in wanted for x in step],
            msg=lambda said, rank=rank: f"rank {rank}: {said}",
        )


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 2)])
def test_shared_memory(tp: int, pp: int, native: None) -> None:
    check_world("memory", tp, pp)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), WORLDS)
def test_gloo(tp: int, pp: int) -> None:
    check_world("gloo", tp, pp)


def test_one_rank() -> None:
    start = StartRank(0, {}, Connected("", 0, ""))
    assert join(start, options_for(1, 1, LONG_S), cpu_device()) == Parallel()


def halves(place: Place, parallel: Parallel) -> list[Any]:
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        for count in (0, 1, 100):
            x = numbers(place.rank, 0, dtype).flatten().repeat(3)[:count]
            assert parallel.group is not None
            found.append(parallel.group.all_reduce(x.clone()).tolist())
            found.append(parallel.group.all_gather(x).tolist())
            found.append(parallel.group.broadcast(x.clone(), 1).tolist())
    return found


@pytest.mark.parametrize(
    ("kind", "size"), [("memory", 4), pytest.param("gloo", 4, marks=pytest.mark.slow)]
)
def test_halves_are_rounded_once(kind: str, size: int) -> None:
    """Sums of four ranks in float32; 0 elements pass too."""
    wanted = []
    for dtype in (torch.bfloat16, torch.float16):
        for count in (0, 1, 100):
            every = torch.stack(
                [numbers(r, 0, dtype).flatten().repeat(3)[:count] for r in range(size)]
            )
            exact = every.double().sum(0)
            wanted += [exact.to(dtype), every, every[1]]
    for found in Ranks(kind, size, 1, halves).results():
        for index, (x, y) in enumerate(zip(found, wanted, strict=True)):
            ours = torch.tensor(x, dtype=y.dtype).reshape(y.shape)
            if index % 3:
                assert torch.equal(ours, y)
            else:  # a sum in float32 may be at a tie where the exact one is not
                assert (ours != y).sum() <= 1
                torch.testing.assert_close(ours, y)


# --- links under load ---------------------------------------------------------------------------

RUNS = 40


def run_ahead(place: Place, parallel: Parallel) -> list[float]:
    """The first stage has sent several steps before the next looks for the first; sizes differ."""
    link, found = parallel.stage.link, []
    assert link is not None
    for step in range(RUNS):
        shape = (1 + 300 * (step % 3), 64)
        if parallel.stage.is_first:
            x = torch.full(shape, float(step))
            link.send(x)
            x.fill_(-1)
        else:
            if step == 0:
                time.sleep(0.5)
            x = link.receive(torch.empty(shape))
            found.append(float(x.min()) if x.min() == x.max() else -1.0)
    stay()
    return found


def stay() -> None:
    """What torch sends is lost where the sender ends."""
    if dist.is_initialized():
        dist.barrier()


@pytest.mark.parametrize("kind", ["memory", pytest.param("gloo", marks=pytest.mark.slow)])
def test_order_where_a_stage_runs_ahead(kind: str) -> None:
    """What was sent arrives in order although the sender's tensors have changed."""
    assert Ranks(kind, 1, 2, run_ahead).results() == [[], [float(i) for i in range(RUNS)]]


# --- failures -----------------------------------------------------------------------------------


def lose_first(place: Place, parallel: Parallel) -> Any:
    if place.rank == 0:
        os._exit(1)
    if parallel.stage.link is not None:
        parallel.stage.link.receive(torch.empty(8))
    return parallel.all_reduce(torch.ones(8)).tolist()


def stall_first(place: Place, parallel: Parallel) -> Any:
    if place.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return lose_first(place, parallel)


KINDS = ["memory", pytest.param("gloo", marks=pytest.mark.slow)]


@pytest.mark.parametrize("work", [lose_first, stall_first])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_rank_that_is_gone(kind: str, tp: int, pp: int, work: Any) -> None:
    ranks = Ranks(kind, tp, pp, work, timeout_s=8.0 if kind == "gloo" else 2.0)
    failed = ranks.started[1].result()
    ranks.started[0].process.kill()
    assert isinstance(failed, Failed) and failed.kind == "RankMissing"
    assert ("stage 0" if pp == 2 else "rank 0") in failed.message
    assert "distributed_timeout_seconds" in failed.message


def connected(rank: int, size: int, address: tuple[str, int], timeout_s: float) -> Parallel:
    start = StartRank(rank, {}, Connected("", 0, ""), store=address)
    return join(start, options_for(size, 1, timeout_s), cpu_device())


@pytest.mark.slow
def test_ranks_that_never_come() -> None:
    """One that is there says who is missing, where, and what to look at."""
    store = new_store("127.0.0.1", 3.0)
    with pytest.raises(RankMissing) as caught:
        connected(1, 4, ("127.0.0.1", store.port), 3.0)
    message = str(caught.value)
    assert f"ranks 0, 2, 3 did not come to 127.0.0.1:{store.port} within 3 s" in message
    assert f"1 on {socket.gethostname()}" in message and "firewall" in message


@pytest.mark.slow
def test_store_that_is_not_there() -> None:
    with closed_port() as port:
        says = f"did not reach 127.0.0.1:{port} within 1 s"
        with pytest.raises(RankMissing, match=says):
            connected(1, 2, ("127.0.0.1", port), 1.0)


@pytest.mark.slow
def test_store_that_says_nothing() -> None:
    """Something listens there and never answers, as a host does that is cut off."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(RankMissing, match=r"rank 1 on .* within 2 s"),
    ):
        connected(1, 2, ("127.0.0.1", silent.getsockname()[1]), 2.0)


def in_environment(rank: int, port: int) -> list[float]:
    """As torchrun starts processes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    start = StartRank(rank, {}, Connected("", 0, ""))
    parallel = join(start, options_for(2, 1, LONG_S), cpu_device())
    again = join(start, options_for(2, 1, LONG_S), cpu_device())  # in the group that is there
    x = again.all_reduce(parallel.all_reduce(torch.ones(3) + rank))
    if rank == 0:
        with pytest.raises(OptionError, match=r"need 4 ranks.*initialised with 2"):
            join(start, options_for(4, 1, LONG_S), cpu_device())
    stay()
    return x.tolist()


@pytest.mark.slow
def test_processes_that_torchrun_started() -> None:
    port = free_port()
    ranks = [Started(in_environment, rank, port) for rank in range(2)]
    assert results(ranks) == [[6.0] * 3] * 2


def alone_in_environment(rank: int, port: int) -> Parallel:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return join(StartRank(rank, {}, Connected("", 0, "")), options_for(2, 1, 2.0), cpu_device())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_only_process_of_a_launcher(rank: int) -> None:
    """The first has the store where the other one does not come; the second finds no store."""
    port = free_port()
    failed = Started(alone_in_environment, rank, port).result()
    assert isinstance(failed, Failed) and failed.kind == "RankMissing"
    assert f"rank {rank} of 2 on {socket.gethostname()} did not meet" in failed.message
    assert f"(127.0.0.1:{port}) within 2 s" in failed.message and "launcher" in failed.message


def test_store_listens_at_its_address_only() -> None:
    """A store takes orders from all that reach it."""
    store = new_store("127.0.0.1", 5.0)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), 1.0)
    socket.create_connection(("127.0.0.1", store.port), 5.0).close()
