"""What the machine offers: memory and cores of this process, control groups respected. No torch."""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import platform
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SIOCGIFADDR = 0x8915
"""Asks Linux for the address of an interface."""
ROOT = Path("/")
"""Where /proc and /sys are."""


@dataclass(frozen=True)
class DeviceInfo:
    """The device an engine will run on, as far as options depend on it."""

    type: str
    """cpu or cuda."""
    name: str
    total_memory_bytes: int
    num_threads: int
    """CPU threads this process should keep busy."""
    why_num_threads: str = ""
    """Where that number comes from."""
    supports_bfloat16: bool = True
    has_native_kernels: bool = False
    """Whether a CPU has the C++ library, without which packed weights are slow."""
    index: int = 0
    """Which of the GPUs."""
    count: int = 1
    """How many there are of its type."""
    num_sharing: int = 1
    """Ranks of this engine that share its memory."""
    is_num_threads_wanted: bool = False
    """Whether a user asked for that number of threads."""
    num_processors: int = 1
    """Those that this process may run on."""


def cpu_device(root: Path = ROOT) -> DeviceInfo:
    """The CPU. `root` is where /proc and /sys are looked for."""
    threads = choose_num_threads(root)
    return DeviceInfo(
        "cpu",
        _cpu_name(root),
        cpu_memory(root)[0],
        threads.count,
        threads.reason,
        is_num_threads_wanted=threads.is_wanted,
        num_processors=len(list(_affinity())),
    )


def cpu_memory(root: Path = ROOT) -> tuple[int, int]:
    """Bytes of memory this process may use in all, and how many of them are free now."""
    machine, available = _machine_memory(root)
    total = machine
    for folder, unified in _control_groups(root, "memory"):
        limit = _read_number(folder / ("memory.max" if unified else "memory.limit_in_bytes"))
        usage = _read_number(folder / ("memory.current" if unified else "memory.usage_in_bytes"))
        if limit is None or limit >= machine:
            continue
        # Cached file pages count as used, yet the kernel gives them up before anything else.
        cached = _read_stat(
            folder / "memory.stat", "inactive_file" if unified else "total_inactive_file"
        )
        total = min(total, limit)
        available = min(available, max(0, limit - max(0, (usage or 0) - cached)))
    return total, min(available, total)


def resident_bytes(root: Path = ROOT) -> int:
    """Memory that this process occupies now; 0 where the system does not tell."""
    try:
        return int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def trim_heap() -> None:
    """Hand freed memory back to the system, of which the C library keeps most for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _machine_memory(root: Path) -> tuple[int, int]:
    total = _read_stat(root / "proc/meminfo", "MemTotal:") * 1024
    available = _read_stat(root / "proc/meminfo", "MemAvailable:") * 1024
    if not total:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        available = total
    return total, available or total


def _cpu_name(root: Path) -> str:
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class ThreadChoice:
    """A number of threads, and why it is that number."""

    count: int
    reason: str
    is_wanted: bool = False
    """Whether a user asked for it."""


def choose_num_threads(
    root: Path = ROOT, allowed: Iterable[int] | None = None, wanted: str | None = None
) -> ThreadChoice:
    """One thread per physical core of the processors `allowed`, within the control groups' quota.

    Two threads on the two halves of a core take turns at its arithmetic units; one leaves the other
    half to the rest of the process. `allowed` is by default the affinity mask, which also is what
    control groups leave of it. `wanted`, by default OMP_NUM_THREADS, overrides all of it.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "") if wanted is None else wanted
    first = wanted.split(",")[0].strip()  # the others are for nested regions
    if first.isdecimal() and int(first) > 0:
        return ThreadChoice(int(first), f"OMP_NUM_THREADS={wanted}", is_wanted=True)
    processors = sorted(_affinity() if allowed is None else allowed)
    cores = len({_core(root, processor) for processor in processors})
    quota = _cpu_quota(root)
    if quota < cores:
        count = max(1, math.ceil(quota))
        return ThreadChoice(count, f"a quota of {quota:g} CPUs on {_count(cores, 'core')}")
    reason = _count(cores, "physical core")
    if cores < len(processors):
        reason += f" of {_count(len(processors), 'logical processor')}"
    return ThreadChoice(max(1, cores), reason)


def _affinity() -> Iterable[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # macOS has none
        return range(os.cpu_count() or 1)


def _core(root: Path, processor: int) -> str:
    """What the processors of one core have in common; the processor itself if that is not known."""
    folder = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second one before Linux 5.3
        if siblings := _read(folder / name).strip():
            return siblings
    return f"only {processor}"


def core_shares(count: int, root: Path = ROOT) -> list[list[int]]:
    """The processors of this process in `count` equal shares of whole cores, those of one socket
    together; nothing for all where there are fewer cores."""
    cores: dict[tuple[int, str], list[int]] = {}
    for processor in sorted(_affinity()):
        folder = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        socket = _read_number(folder / "physical_package_id") or 0
        cores.setdefault((socket, _core(root, processor)), []).append(processor)
    in_order = [cores[key] for key in sorted(cores, key=lambda key: (key[0], cores[key][0]))]
    size = len(in_order) // count
    return [
        [one for core in in_order[share * size : (share + 1) * size] for one in core]
        for share in range(count)
    ]


def _cpu_quota(root: Path) -> float:
    """The smallest number of CPUs that a control group of this process grants."""
    quotas = [math.inf]
    for folder, unified in _control_groups(root, "cpu"):
        if unified:
            quota, _, period = _read(folder / "cpu.max").partition(" ")
            if quota.isdecimal() and period.strip().isdecimal():
                quotas.append(int(quota) / int(period))
        else:
            limit = _read_number(folder / "cpu.cfs_quota_us") or 0
            every = _read_number(folder / "cpu.cfs_period_us") or 0
            if limit > 0 and every > 0:
                quotas.append(limit / every)
    return min(quotas)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def launched_as(name: str) -> int | None:
    """What torchrun, or the like, has told this process: RANK, WORLD_SIZE or LOCAL_RANK."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None


def launcher_address() -> str:
    """Where processes of torchrun meet."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def ranks_share_devices() -> bool:
    """Whether a host may have more ranks than GPUs: for tests."""
    return os.environ.get("QUIRE_RANKS_SHARE_DEVICES") == "1"


def prefer_interface(address: str) -> None:
    """Have gloo use the network interface of this address, unless it is told another. By itself it
    looks up the name of the host, which is often that of the loopback, or of too many."""
    if ":" in address:
        digits = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for entry in map(str.split, _read(ROOT / "proc/net/if_inet6").splitlines()):
            if entry[0] == digits:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", entry[-1])
        return
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, asked)[20:24]
            except OSError:
                continue  # it has no address
        if socket.inet_ntoa(found) == address:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def tokenise_on_one_thread() -> None:
    """For a process of its own, which forks and leaves the other cores to the engine."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's control groups, innermost first, and whether they are version 2."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            base, unified = mount / controllers, False
            if not base.is_dir():
                base = mount / controller
        elif number == "0" and not controllers:
            base, unified = mount, True
        else:
            continue
        # Inside a container the path may be the host's: then only the mount point exists.
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder, unified


def _read(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    """The number a file consists of; None if it is something else."""
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _read_stat(path: Path, name: str) -> int:
    """The number after `name` in a file of one entry per line; 0 if there is none."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    return 0
