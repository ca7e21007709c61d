"""What the machine offers: memory and cores of this process, control groups respected. No torch."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from quire.config.kernel_files import ROOT, control_groups, read, read_number, read_stat
from quire.config.threads import choose_num_threads


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
    is_num_threads_wanted: bool = False
    """Whether a user asked for that number of threads."""


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
    )


def cpu_memory(root: Path = ROOT) -> tuple[int, int]:
    """Bytes of memory this process may use in all, and how many of them are free now."""
    machine, available = _machine_memory(root)
    total = machine
    for folder, unified in control_groups(root, "memory"):
        limit = read_number(folder / ("memory.max" if unified else "memory.limit_in_bytes"))
        usage = read_number(folder / ("memory.current" if unified else "memory.usage_in_bytes"))
        if limit is None or limit >= machine:
            continue
        # Cached file pages count as used, yet the kernel gives them up before anything else.
        cached = read_stat(
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
    total = read_stat(root / "proc/meminfo", "MemTotal:") * 1024
    available = read_stat(root / "proc/meminfo", "MemAvailable:") * 1024
    if not total:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        available = total
    return total, available or total


def _cpu_name(root: Path) -> str:
    for line in read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
