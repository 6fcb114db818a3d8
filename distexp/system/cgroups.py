"""Limits of memory and CPU, and out-of-memory counters, of control groups (cgroup v1 and v2)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")

OOM_FILES = {1: ("memory.oom_control",), 2: ("memory.events.local", "memory.events")}
"""Files with the number of killed processes, by version. ``memory.events`` also counts those of cgroups below."""

LIMIT_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
"""Files with the limit and the used bytes of a cgroup, by version."""


@dataclass(frozen=True)
class MemoryCgroup:
    """The memory cgroup of a process: ``root`` is where its hierarchy is mounted."""

    root: Path
    group: str  # relative to the root
    version: int  # 1 or 2

    @property
    def folder(self) -> Path:
        """Return the folder with the files of this cgroup."""
        return self.root / self.group


def memory_cgroups(pid: int | str = "self") -> list[MemoryCgroup]:
    """Return the memory cgroups of a process; a machine may have both versions, or none."""
    path, found = Path(f"/proc/{pid}/cgroup"), []
    for line in path.read_text().splitlines() if path.is_file() else []:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            found.append(MemoryCgroup(CGROUP_ROOT, group.lstrip("/"), 2))
        elif "memory" in controllers.split(","):
            found.append(MemoryCgroup(CGROUP_ROOT / "memory", group.lstrip("/"), 1))
    return found


def memory_limits(pid: int | str = "self") -> Iterator[int]:
    """Yield the memory limits in bytes of a process's cgroup and of all its parents."""
    for cgroup in memory_cgroups(pid):
        name, _ = LIMIT_FILES[cgroup.version]
        below = Path(cgroup.group)
        for folder in (below, *below.parents):
            limit = _read_limit(cgroup.root / folder / name)
            if limit is not None:
                yield limit


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def usable_memory(pid: int | str = "self") -> int:
    """Return the bytes of memory that a process may use: the machine's memory, or a lower limit of its cgroup."""
    meminfo = Path("/proc/meminfo").read_text()
    total = int(meminfo.split("MemTotal:")[1].split()[0]) * 1024
    return min([total, *memory_limits(pid)])


def available_memory(pid: int | str = "self") -> int:
    """Return the bytes of memory that are free for a process: of the machine, or less by the limits of its cgroups.

    What the kernel can reclaim, as cached files, counts as free.
    """
    meminfo = Path("/proc/meminfo").read_text()
    available = int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024
    return max(0, min([available, *_free_in_cgroups(pid)]))


def _free_in_cgroups(pid: int | str) -> Iterator[int]:
    for cgroup in memory_cgroups(pid):
        limit_name, used_name = LIMIT_FILES[cgroup.version]
        below = Path(cgroup.group)
        for folder in (below, *below.parents):
            limit, used = (_read_limit(cgroup.root / folder / name) for name in (limit_name, used_name))
            if limit is not None:
                yield limit - max(0, (used or 0) - _reclaimable(cgroup.root / folder / "memory.stat"))


def _reclaimable(path: Path) -> int:
    """Return the bytes of cached files that a cgroup has not used lately; 0 if they are not known."""
    try:
        text = path.read_text()
    except OSError:
        return 0
    # In version 1, the name without ``total_`` leaves out the cgroups below.
    found = (re.search(rf"^{name} (\d+)$", text, re.MULTILINE) for name in ("total_inactive_file", "inactive_file"))
    return next((int(each[1]) for each in found if each), 0)


def cpu_limit() -> float | None:
    """Return how many cores the cgroups of this process allow, as with ``docker --cpus``; None without a limit."""
    limits = [limit for folder, version in _cpu_folders() if (limit := _read_cpus(folder, version)) is not None]
    return min(limits, default=None)


def _cpu_folders() -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's CPU cgroup and of all its parents, with the version."""
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.is_file() else []:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root, version = (CGROUP_ROOT / "cpu", 1) if controllers else (CGROUP_ROOT, 2)
        below = Path(group.lstrip("/"))
        yield from ((root / folder, version) for folder in (below, *below.parents))


def _read_cpus(folder: Path, version: int) -> float | None:
    """Return the quota of a folder in cores; None if it has none."""
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = " ".join((folder / name).read_text() for name in names).split()
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def oom_kills() -> dict[str, int]:
    """Return how many processes the kernel has killed for lack of memory, on this machine and in this cgroup.

    Returns:
        Counters ``machine`` and ``cgroup`` since boot; one that cannot be read is absent.
    """
    files = [cgroup.folder / name for cgroup in memory_cgroups() for name in OOM_FILES[cgroup.version]]
    in_cgroup = next((count for path in files if (count := _read_counter(path)) is not None), None)
    counters = {"machine": _read_counter(Path("/proc/vmstat")), "cgroup": in_cgroup}
    return {name: count for name, count in counters.items() if count is not None}


def _read_counter(path: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
