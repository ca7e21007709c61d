"""CPU threads on made-up machines: one per core, within what may be used, and whole cores for each
rank.

A change that counts the halves of a core twice, ignores a container's quota or overrules the user
turns these red.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.device import choose_num_threads, core_shares, cpu_device


def machine(root: Path, cores: list[str], files: dict[str, str] | None = None) -> Path:
    """A /sys with these cores, each a list of its logical processors, and some more files."""
    wanted = dict(files or {})
    for core in cores:
        for processor in core.split(","):
            folder = f"sys/devices/system/cpu/cpu{processor}/topology"
            wanted[f"{folder}/core_cpus_list"] = f"{core}\n"
    for name, text in wanted.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


HYPERTHREADS = ["0,4", "1,5", "2,6", "3,7"]


def test_a_core_counts_once(tmp_path: Path) -> None:
    choice = choose_num_threads(machine(tmp_path, HYPERTHREADS), range(8), "")
    assert choice.count == 4 and choice.reason == "4 physical cores of 8 logical processors"


def test_cores_without_hyperthreads(tmp_path: Path) -> None:
    choice = choose_num_threads(machine(tmp_path, ["0", "1"]), range(2), "")
    assert choice.count == 2 and choice.reason == "2 physical cores"


@pytest.mark.parametrize(
    ("allowed", "count"), [((0, 4), 1), ((0, 1), 2), ((0, 1, 4, 5, 6), 3), ((7,), 1)]
)
def test_only_cores_of_the_affinity_mask(
    tmp_path: Path, allowed: tuple[int, ...], count: int
) -> None:
    assert choose_num_threads(machine(tmp_path, HYPERTHREADS), allowed, "").count == count


def test_older_kernels_name_siblings_otherwise(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = machine(tmp_path, [], {topology.format(i): "0-1\n" for i in (0, 1)})
    assert choose_num_threads(root, (0, 1), "").count == 1


def test_without_a_topology_processors_are_cores(tmp_path: Path) -> None:
    assert choose_num_threads(tmp_path, range(3), "").count == 3


@pytest.mark.parametrize(
    ("quota", "count"),
    [("50000", 1), ("100000", 1), ("200000", 2), ("250000", 3), ("900000", 4), ("max", 4)],
)
def test_quota_of_a_version_2_group(tmp_path: Path, quota: str, count: int) -> None:
    """The tightest limit on the way up counts."""
    files = {
        "proc/self/cgroup": "0::/jobs/mine\n",
        "sys/fs/cgroup/jobs/mine/cpu.max": "max 100000\n",
        "sys/fs/cgroup/jobs/cpu.max": f"{quota} 100000\n",
    }
    choice = choose_num_threads(machine(tmp_path, HYPERTHREADS, files), range(8), "")
    assert choice.count == count
    assert ("quota" in choice.reason) == (count < 4)


@pytest.mark.parametrize(("quota", "count"), [("150000", 2), ("-1", 4)])
def test_quota_of_a_version_1_group(tmp_path: Path, quota: str, count: int) -> None:
    """Inside a container the path is the host's, and only the mount point is there."""
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": f"{quota}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    choice = choose_num_threads(machine(tmp_path, HYPERTHREADS, files), range(8), "")
    assert choice.count == count


@pytest.mark.parametrize(("wanted", "count"), [("1", 1), ("6", 6), ("3,2", 3), ("0", 4), ("x", 4)])
def test_omp_num_threads_wins(tmp_path: Path, wanted: str, count: int) -> None:
    """Users set it for all numeric libraries, and expect to be obeyed."""
    choice = choose_num_threads(machine(tmp_path, HYPERTHREADS), range(8), wanted)
    assert choice.count == count
    assert choice.reason.startswith("OMP_NUM_THREADS") == (wanted not in ("0", "x"))


def test_omp_num_threads_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    device = cpu_device()
    assert device.num_threads == 5 and device.why_num_threads == "OMP_NUM_THREADS=5"
    assert device.is_num_threads_wanted


def two_sockets(root: Path) -> Path:
    """Four cores of two processors each; odd cores are in the second socket."""
    sockets = {
        f"sys/devices/system/cpu/cpu{i}/topology/physical_package_id": f"{i % 2}\n"
        for i in range(8)
    }
    return machine(root, HYPERTHREADS, sockets)


@pytest.mark.parametrize(
    ("count", "allowed", "shares"),
    [
        (1, range(8), [[0, 4, 2, 6, 1, 5, 3, 7]]),
        (2, range(8), [[0, 4, 2, 6], [1, 5, 3, 7]]),  # a socket each
        (3, range(8), [[0, 4], [2, 6], [1, 5]]),  # the last core is left over
        (4, range(8), [[0, 4], [2, 6], [1, 5], [3, 7]]),
        (2, (0, 1, 4, 5), [[0, 4], [1, 5]]),  # no core is divided
        (5, range(8), [[]] * 5),
    ],
)
def test_ranks_share_whole_cores(
    count: int,
    allowed: tuple[int, ...],
    shares: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(allowed))
    assert core_shares(count, two_sockets(tmp_path)) == shares
