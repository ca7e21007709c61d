"""What the machine offers: memory and cores of this process, control groups respected. No torch."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class DeviceInfo:
    """The device an engine will run on, as far as options depend on it."""

    type: str
    """cpu or cuda."""
    name: str
    total_memory_bytes: int
    available_memory_bytes: int
    num_threads: int
    """CPU threads this process may keep busy."""
    supports_bfloat16: bool = True
    has_native_kernels: bool = False
    """Whether a CPU has the C++ library, without which packed weights are slow."""


def cpu_device(root: Path = ROOT) -> DeviceInfo:
    """The CPU. `root` is where /proc and /sys are looked for."""
    total, available = cpu_memory(root)
    return DeviceInfo("cpu", _cpu_name(root), total, available, cpu_threads(root))


def cpu_memory(root: Path = ROOT) -> tuple[int, int]:
    """Bytes of memory this process may use in all, and how many of them are free now."""
    machine, available = _machine_memory(root)
    total = machine
    for folder, unified in _groups(root, "memory"):
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


def cpu_threads(root: Path = ROOT) -> int:
    """Threads to run: cores of the affinity mask, within the CPU quota and OMP_NUM_THREADS."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    for folder, unified in _groups(root, "cpu"):
        quota, period = _cpu_quota(folder, unified)
        if quota > 0 and period > 0:
            count = min(count, math.ceil(quota / period))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        count = min(count, int(wanted))
    return max(1, count)


def _cpu_quota(folder: Path, unified: bool) -> tuple[int, int]:
    if unified:
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdecimal():
            return int(words[0]), int(words[1])
        return 0, 0
    quota = _read_number(folder / "cpu.cfs_quota_us")
    return quota or 0, _read_number(folder / "cpu.cfs_period_us") or 0


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
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


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _read_stat(path: Path, name: str) -> int:
    """The number after `name` in a file of one entry per line; 0 if there is none."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    return 0
