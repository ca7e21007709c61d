"""`join`: how a rank meets the others, and the groups and links that come of it.

CPUs of one host share memory; all else goes through torch.distributed: NCCL among GPUs, gloo among
CPUs of several hosts.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FunctionType
from typing import TypeVar

import torch
import torch.distributed as dist

from quire.config.device import (
    DeviceInfo,
    launched_as,
    launcher_address,
    prefer_interface,
    ranks_share_devices,
)
from quire.config.digests import different, model_digests
from quire.config.model import ModelConfig
from quire.config.options import HOST_OPTIONS, EngineOptions, ParallelOptions
from quire.kernels import cpu
from quire.kernels.cpu.collectives import (
    SharedMemoryGroup,
    SharedMemoryLink,
    region_bytes,
    ring_bytes,
)
from quire.layers.parallel import Parallel, ProcessGroup, Stage
from quire.protocol import __version__
from quire.protocol.errors import OptionError, RankMissing
from quire.protocol.ranks import Connected, Inherited, StartRank

logger = logging.getLogger(__name__)

POLL_S = 0.02
GRACE_S = 5.0
"""For torch's own timeouts to come first: they say more."""
MAX_SENDING = 8
"""Messages on their way to the next stage, before the oldest is waited for."""
REMEDIES = {
    "gloo": "Check that no firewall is between the hosts, and set GLOO_SOCKET_IFNAME to the "
    "network interface by which they reach each other.",
    "nccl": "NCCL_DEBUG=INFO shows what NCCL tries. Check that no firewall is between the hosts, "
    "set NCCL_SOCKET_IFNAME to the network interface by which they reach each other, and give "
    "containers a larger /dev/shm (--shm-size=8g).",
}

T = TypeVar("T")

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""By the name that torch 2.13 has for it, or by the one before."""


# --- what starts ranks ---------------------------------------------------------------------------


def share_memory(device: str) -> bool:
    """Whether ranks of one host that compute on such a device meet in `shared_files`."""
    return device == "cpu" and cpu.available()[0]


def shared_files(size: int, num_stages: int) -> tuple[list[int], list[list[int]]]:
    """For ranks of one host that compute on its CPUs: memory for the collectives of each stage,
    and of each stage but the last, for what its ranks send to the next one."""
    group_fds = stage_files(size, num_stages)
    link_fds = [[_new_file(ring_bytes()) for _ in range(size)] for _ in range(num_stages - 1)]
    return group_fds, link_fds


def stage_files(size: int, num_stages: int) -> list[int]:
    """The memory for collectives alone."""
    return [_new_file(region_bytes(size)) for _ in range(num_stages)]


def _new_file(num_bytes: int) -> int:
    """Without a name: processes inherit it."""
    fd = os.memfd_create("quire-ranks")
    os.ftruncate(fd, num_bytes)
    return fd


def new_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Where ranks that share no memory find each other, at a free port of this address alone."""
    with listen(host, 0) as listening:
        return dist.TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=os.dup(listening.fileno()),
        )


def listen(host: str, port: int) -> socket.socket:
    """At this address alone, of IPv4 or IPv6."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def shown_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- what a rank does ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a rank stands among all ranks of a model."""

    rank: int
    tp: int
    pp: int
    timeout_s: float

    @property
    def size(self) -> int:
        return self.tp * self.pp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp


def join(start: StartRank, options: ParallelOptions, device: DeviceInfo) -> Parallel:
    """The place of a rank, once it has met the others: in the memory that it shares with them, else
    at `start.store`, else as torchrun's environment says. Raises `RankMissing` if some do not come
    in time."""
    place = _Place(
        start.rank,
        options.tensor_parallel_size,
        options.pipeline_parallel_size,
        options.timeout_s,
    )
    if isinstance(start.channel, Inherited) and start.channel.group_fds:
        parallel = _share_memory(place, start.channel)
    elif place.size == 1 and start.store is None:
        return Parallel()
    else:
        parallel = _TorchRanks(place, start.store, device, start.group_fd).join_in_time()
    return replace(parallel, expert_parallel=options.enable_expert_parallel)


def own_place(options: EngineOptions, model: ModelConfig, device: DeviceInfo) -> Parallel:
    """The place of a process with an engine of its own: it is alone, unless torchrun or the like
    has started several."""
    if not options.parallel.is_launched_outside:
        return Parallel()
    parallel = _place_of_launcher(options.parallel, device)
    _check_alike(parallel, _terms(options, model), device)
    return parallel


def _place_of_launcher(options: ParallelOptions, device: DeviceInfo) -> Parallel:
    rank = dist.get_rank() if dist.is_initialized() else launched_as("RANK")
    if rank is None:
        raise OptionError(
            "distributed_executor_backend='external_launcher' needs the variables that torchrun "
            "sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), but there is no RANK. "
            "Start the script with torchrun, or leave distributed_executor_backend unset."
        )
    found = launched_as("WORLD_SIZE")
    if not dist.is_initialized() and found != options.num_ranks:
        raise OptionError(
            f"tensor_parallel_size={options.tensor_parallel_size} needs as many processes, but "
            f"WORLD_SIZE={found}; start {options.num_ranks} (torchrun --nproc-per-node)."
        )
    start = StartRank(rank, {}, Connected("", 0, ""))
    return replace(join(start, options, device), all_answer=True)


def _terms(options: EngineOptions, model: ModelConfig) -> dict[str, dict[str, str]]:
    """What engines that plan alike must have in common, by what it is called."""
    given = options.flat()
    return {
        "version": {"Quire": __version__},
        "options": {name: repr(given[name]) for name in given if name not in HOST_OPTIONS},
        "files": model_digests(model.raw, model.source.path, options.model.load_format),
        "host": {"": socket.gethostname()},
    }


def _check_alike(parallel: Parallel, own: dict[str, dict[str, str]], device: DeviceInfo) -> None:
    """Engines that differ would wait for each other in different collectives."""
    everyone = _gather_texts(parallel, json.dumps(own), device)
    first = json.loads(everyone[0])
    for rank, text in enumerate(everyone):
        other = json.loads(text)
        for what in ("version", "options", "files"):
            name = different(first[what], other[what])
            if name is None:
                continue
            theirs, ours = other[what].get(name), first[what].get(name)
            where, first_where = other["host"][""], first["host"][""]
            if what == "files":
                raise OptionError(
                    f"rank {rank} on {where} reads another model than rank 0 on {first_where}: "
                    f"{name} is not the same on both. Start all processes with the same files."
                )
            raise OptionError(
                f"rank {rank} on {where} was started with {name}={theirs}, rank 0 on "
                f"{first_where} with {name}={ours}; start all processes alike."
            )


def _gather_texts(parallel: Parallel, own: str, device: DeviceInfo) -> list[str]:
    """Of all ranks, in rank order."""
    data, place = own.encode(), torch.device(device.type, device.index or 0)
    sizes = parallel.all_gather(torch.tensor([len(data)], device=place)).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = parallel.all_gather(padded.to(place)).cpu().view(-1, max(sizes))
    return [bytes(one[:size].tolist()).decode() for one, size in zip(gathered, sizes, strict=True)]


def _share_memory(place: _Place, files: Inherited) -> Parallel:
    stage, tp_rank, timeout_s = place.stage, place.tp_rank, place.timeout_s
    group = SharedMemoryGroup(
        files.group_fds[stage], tp_rank, place.tp, timeout_s, first_rank=stage * place.tp
    )
    link: SharedMemoryLink | None = None
    if place.pp > 1:
        receive_fd = files.link_fds[stage - 1][tp_rank] if stage else None
        send_fd = files.link_fds[stage][tp_rank] if stage < place.pp - 1 else None
        link = SharedMemoryLink(receive_fd, send_fd, stage, timeout_s)
    return Parallel(tp_rank, place.tp, group, Stage(stage, place.pp, link))


class _TorchRanks:
    """One rank on its way to groups of torch.distributed."""

    def __init__(
        self,
        place: _Place,
        address: tuple[str, int] | None,
        device: DeviceInfo,
        group_fd: int | None = None,
    ) -> None:
        """`group_fd` is memory that the ranks of its stage share."""
        self._place, self._address, self._group_fd = place, address, group_fd
        self._device = torch.device("cpu")
        if device.type == "cuda":
            self._device = torch.device("cuda", device.index)
            torch.cuda.set_device(self._device)
        is_nccl = device.type == "cuda" and not ranks_share_devices()
        self._backend = "nccl" if is_nccl else "gloo"
        self._timeout = timedelta(seconds=place.timeout_s)
        self._deadline = time.monotonic() + place.timeout_s
        self._where = "the address in MASTER_ADDR"
        if address is not None:
            self._where = shown_address(*address)

    def join_in_time(self) -> Parallel:
        """Some calls of torch and NCCL wait without end for a host that is cut off."""
        outcome: Future[Parallel] = Future()
        thread = threading.Thread(target=self._join_for, args=(outcome,), daemon=True)
        thread.start()
        thread.join(self._place.timeout_s + GRACE_S)
        if not outcome.done():
            raise RankMissing(
                f"rank {self._place.rank} on {socket.gethostname()} did not connect by "
                f"{self._backend} with all others, which came to {self._where}, within "
                f"{self._place.timeout_s:g} s. {REMEDIES[self._backend]}"
            )
        return outcome.result()

    def _join_for(self, outcome: Future[Parallel]) -> None:
        try:
            outcome.set_result(self._join())
        except BaseException as error:
            outcome.set_exception(error)

    def _join(self) -> Parallel:
        place = self._place
        store: dist.Store | None = None
        names = [f"rank {rank}" for rank in range(place.size)]
        if dist.is_initialized():
            self._check_program()
            if self._backend == "gloo":
                _end_groups_in_time()
        else:
            store = self._store()
            hosts = self._roll_call(store)
            names = [f"{name} on {host}" for name, host in zip(names, hosts, strict=True)]
        with self._explaining(names):
            if store is not None:
                self._connect(store)
            group, link = self._group(names), self._link(names)
            if store is not None:
                self._leave(store)
        stage = Stage(place.stage, place.pp, link)
        logger.debug(
            "%s: %s, stage %d of %d", names[place.rank], self._backend, place.stage, place.pp
        )
        return Parallel(place.tp_rank, place.tp, group, stage)

    def _check_program(self) -> None:
        """The program has called `init_process_group`: its group is used."""
        place, found = self._place, (dist.get_rank(), dist.get_world_size())
        if found != (place.rank, place.size):
            raise OptionError(
                f"tensor_parallel_size={place.tp} and pipeline_parallel_size={place.pp} need "
                f"{place.size} ranks, this one being {place.rank}; torch.distributed was "
                f"initialised with {found[1]}, this one being {found[0]}."
            )
        self._backend = dist.get_backend()

    def _store(self) -> dist.Store:
        if self._address is None:
            return self._store_of_launcher()
        host, port = self._address
        prefer_interface(self._wait_for_listener(host, port))
        return dist.TCPStore(host, port, timeout=self._timeout, wait_for_workers=False)

    def _store_of_launcher(self) -> dist.Store:
        place = self._place
        try:
            found = dist.rendezvous("env://", place.rank, place.size, timeout=self._timeout)
            store: dist.Store = next(iter(found))[0]
        except dist.DistError as error:
            raise RankMissing(
                f"rank {place.rank} of {place.size} on {socket.gethostname()} did not meet the "
                f"others at MASTER_ADDR:MASTER_PORT ({launcher_address()}) within "
                f"{place.timeout_s:g} s "
                f"(distributed_timeout_seconds): {_first_line(error)} Check that the launcher has "
                "started them all, and that no firewall is between the hosts."
            ) from error
        return store

    def _wait_for_listener(self, host: str, port: int) -> str:
        """The address of this host by which it is reached. `TCPStore` would try for longer than it
        is told, and write about it."""
        while True:
            left = self._deadline - time.monotonic()
            try:
                with socket.create_connection((host, port), max(left, POLL_S)) as line:
                    address: str = line.getsockname()[0]
                    return address
            except OSError as error:
                if left <= POLL_S:
                    raise RankMissing(
                        f"rank {self._place.rank} on {socket.gethostname()} did not reach "
                        f"{self._where} within {self._place.timeout_s:g} s: {error}. Check "
                        "master_addr and that no firewall is between the hosts."
                    ) from error
                time.sleep(POLL_S)

    def _roll_call(self, store: dist.Store) -> list[str]:
        """The hosts of all ranks, once all are there and fit together."""
        place, host = self._place, socket.gethostname()
        own = {"host": host, "device": self._device_name()}
        try:
            said = self._exchange(store, json.dumps(own))
        except dist.DistError as error:
            raise RankMissing(
                f"rank {place.rank} on {host} lost its connection with {self._where}: "
                f"{_first_line(error)}."
            ) from error
        missing = [rank for rank in range(place.size) if rank not in said]
        if missing:
            came = ", ".join(f"{rank} on {one['host']}" for rank, one in said.items())
            raise RankMissing(
                f"{_ranks(missing)} did not come to {self._where} within {place.timeout_s:g} s; "
                f"those that came: {came}. Check that all were started with the same "
                "tensor_parallel_size and pipeline_parallel_size, and that no firewall is between "
                "the hosts."
            )
        if self._backend == "nccl":
            self._check_devices(said)
        return [said[rank]["host"] for rank in range(place.size)]

    def _exchange(self, store: dist.Store, own: str) -> dict[int, dict[str, str]]:
        """What each rank says of itself, as far as they come in time."""
        size = self._place.size
        store.set(_key(self._place.rank), own)
        missing = list(range(size))
        while missing := [rank for rank in missing if not store.check([_key(rank)])]:
            if not self._has_time():
                break
        there = [rank for rank in range(size) if rank not in missing]
        said = {rank: json.loads(store.get(_key(rank))) for rank in there}
        return said

    def _leave(self, store: dist.Store) -> None:
        """Where the first rank has the store, it must not end before all are done with it."""
        count = store.add("quire/joined", 1)
        while self._place.rank == 0 and count < self._place.size and self._has_time():
            count = store.add("quire/joined", 0)

    def _has_time(self) -> bool:
        """Waits a little, if so."""
        left = self._deadline - time.monotonic()
        time.sleep(max(0.0, min(left, POLL_S)))
        return left > 0

    def _check_devices(self, said: dict[int, dict[str, str]]) -> None:
        owners: dict[tuple[str, str], int] = {}
        for rank, one in said.items():
            first = owners.setdefault((one["host"], one["device"]), rank)
            if first != rank:
                raise OptionError(
                    f"ranks {first} and {rank} have the same GPU of {one['host']} "
                    f"({one['device']}); each rank needs its own. Lower tensor_parallel_size or "
                    "pipeline_parallel_size, or check CUDA_VISIBLE_DEVICES."
                )

    def _device_name(self) -> str:
        if self._device.type != "cuda":
            return self._device.type
        return f"GPU {self._device.index}, {torch.cuda.get_device_properties(self._device).uuid}"

    def _connect(self, store: dist.Store) -> None:
        if self._backend == "gloo":
            _end_groups_in_time()
        # NCCL's groups are left to the end of the process: to end them earlier would wait without
        # end for CUDA graphs that still have their collectives.
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore("quire", store),
            rank=self._place.rank,
            world_size=self._place.size,
            timeout=self._timeout,
            # Communicators are made now: none could be while a CUDA graph is captured.
            device_id=self._device if self._backend == "nccl" else None,
        )

    @contextmanager
    def _explaining(self, names: Sequence[str]) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise RankMissing(
                f"the ranks ({', '.join(names)}) cannot connect by {self._backend} within "
                f"{self._place.timeout_s:g} s: {_first_line(error)}. {REMEDIES[self._backend]}"
            ) from error

    def _group(self, names: Sequence[str]) -> ProcessGroup | None:
        """That of this rank's stage. All ranks make all groups, in one order."""
        place = self._place
        if place.pp == 1:
            return TorchGroup(None, names, place.timeout_s)
        if place.tp == 1:
            return None
        own: ProcessGroup | None = None
        if self._group_fd is not None:
            first_rank = place.stage * place.tp
            own = SharedMemoryGroup(
                self._group_fd, place.tp_rank, place.tp, place.timeout_s, first_rank=first_rank
            )
        for stage in range(place.pp):
            ranks = list(range(stage * place.tp, (stage + 1) * place.tp))
            group = dist.new_group(ranks, timeout=self._timeout)
            if stage == place.stage and own is None:
                assert isinstance(group, dist.ProcessGroup)
                own = TorchGroup(group, [names[rank] for rank in ranks], place.timeout_s)
        return own

    def _link(self, names: Sequence[str]) -> TorchLink | None:
        """Each has a group of its own, as what one group does is done in order."""
        place = self._place
        if place.pp == 1:
            return None
        before: dist.ProcessGroup | None = None
        after: dist.ProcessGroup | None = None
        for rank in range(place.size - place.tp):
            group = dist.new_group([rank, rank + place.tp], timeout=self._timeout)
            if place.rank not in (rank, rank + place.tp):
                continue
            assert isinstance(group, dist.ProcessGroup)
            if place.rank == rank:
                after = group
            else:
                before = group
        return TorchLink(before, after, place, names)


def _end_groups_in_time() -> None:
    """Threads of gloo drop tensors of finished collectives, for which they need Python: while the
    interpreter ends that would abort the process."""
    atexit.unregister(_end_groups)
    atexit.register(_end_groups)


def _end_groups() -> None:
    if not dist.is_initialized():
        return
    # Its default arguments keep the group that exists when it is imported, such as by torch's
    # compiler or by transformers.
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in [] if module is None else vars(module).values():
        if isinstance(function, FunctionType):
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value
                for value in function.__defaults__ or ()
            )
    dist.destroy_process_group()


def _key(rank: int) -> str:
    return f"quire/rank/{rank}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


# --- torch's groups -----------------------------------------------------------------------------


class TorchGroup:
    """A group of torch.distributed's."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        names: Sequence[str] = (),
        timeout_s: float = 0.0,
    ) -> None:
        """None stands for all processes; the others are for errors."""
        self._group, self._timeout_s = group, timeout_s
        self._size, own = dist.get_world_size(group), dist.get_rank(group)
        others = [name for rank, name in enumerate(names) if rank != own]
        self._others = f"{'one of ' * (len(others) > 1)}{', '.join(others)}"
        self._is_gloo = dist.get_backend(group) == "gloo"

    @property
    def is_capturable(self) -> bool:
        """Whether CUDA graphs may have its collectives in them."""
        return not self._is_gloo

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        host = x
        if self._is_gloo:
            # Two numbers are rounded once in any case.
            is_narrow = x.dtype in (torch.bfloat16, torch.float16) and self._size > 2
            host = x.to("cpu", torch.float32 if is_narrow else x.dtype)
        if x.numel():
            self._run("all_reduce", lambda: dist.all_reduce(host, group=self._group))
        return x if host is x else x.copy_(host)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        host = x.to("cpu") if self._is_gloo else x
        out = torch.empty((self._size, *x.shape), dtype=x.dtype, device=host.device)
        if x.numel():
            self._run(
                "all_gather",
                lambda: all_gather(out.view(-1), host.reshape(-1), group=self._group),
            )
        return out.to(x.device)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        host = x.to("cpu") if self._is_gloo else x
        if x.numel():
            self._run(
                "broadcast", lambda: dist.broadcast(host, group=self._group, group_src=source)
            )
        return x if host is x else x.copy_(host)

    def _run(self, what: str, collective: Callable[[], T]) -> T:
        try:
            return collective()
        except RuntimeError as error:
            raise RankMissing(
                f"{self._others} did not take part in {what} within {self._timeout_s:g} s "
                f"(distributed_timeout_seconds), or ended: {_first_line(error)}"
            ) from error


class TorchLink:
    """Between two stages, by torch.distributed's send and receive."""

    def __init__(
        self,
        before: dist.ProcessGroup | None,
        after: dist.ProcessGroup | None,
        place: _Place,
        names: Sequence[str],
    ) -> None:
        """A group of two for each neighbour that this stage has."""
        self._before, self._after, self._place, self._names = before, after, place, names
        self._is_gloo = dist.get_backend(before or after) == "gloo"
        self._sending: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def send(self, x: torch.Tensor) -> None:
        assert self._after is not None
        if not x.numel():
            return
        # A copy, since `x` may change before it has left; kept until then.
        copy = x.to("cpu", copy=True) if self._is_gloo else x.clone()
        copy = copy.contiguous()
        with self._naming(1, "take"):
            while len(self._sending) >= MAX_SENDING:
                work, _ = self._sending[0]
                if work is not None:
                    work.wait()
                self._sending.popleft()
            self._sending.append((dist.isend(copy, group=self._after, group_dst=1), copy))

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        assert self._before is not None
        if not out.numel():
            return out
        is_direct = out.device.type == "cpu" or not self._is_gloo
        into = out if is_direct else torch.empty_like(out, device="cpu")
        with self._naming(-1, "send"):
            dist.recv(into, group=self._before, group_src=0)
        return out if is_direct else out.copy_(into)

    @contextmanager
    def _naming(self, direction: int, verb: str) -> Iterator[None]:
        place = self._place
        try:
            yield
        except RuntimeError as error:
            name = self._names[place.rank + direction * place.tp]
            raise RankMissing(
                f"stage {place.stage + direction} ({name}) did not {verb} anything within "
                f"{place.timeout_s:g} s (distributed_timeout_seconds), or ended: "
                f"{_first_line(error)}"
            ) from error
