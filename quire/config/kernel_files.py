"""Files in which the kernel tells about the machine and this process's control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
"""Where /proc and /sys are."""


def control_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's control groups, innermost first, and whether they are version 2."""
    mount = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
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


def read(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The number a file consists of; None if it is something else."""
    text = read(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def read_stat(path: Path, name: str) -> int:
    """The number after `name` in a file of one entry per line; 0 if there is none."""
    for line in read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    return 0
