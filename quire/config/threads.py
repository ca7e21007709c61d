"""How many threads compute on a CPU: one for each core this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quire.config.kernel_files import ROOT, control_groups, read, read_number


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
        if siblings := read(folder / name).strip():
            return siblings
    return f"only {processor}"


def _cpu_quota(root: Path) -> float:
    """The smallest number of CPUs that a control group of this process grants."""
    quotas = [math.inf]
    for folder, unified in control_groups(root, "cpu"):
        if unified:
            quota, _, period = read(folder / "cpu.max").partition(" ")
            if quota.isdecimal() and period.strip().isdecimal():
                quotas.append(int(quota) / int(period))
        else:
            limit = read_number(folder / "cpu.cfs_quota_us") or 0
            every = read_number(folder / "cpu.cfs_period_us") or 0
            if limit > 0 and every > 0:
                quotas.append(limit / every)
    return min(quotas)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def tokenise_on_one_thread() -> None:
    """For a process of its own, which forks and leaves the other cores to the engine."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
