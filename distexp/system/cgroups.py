"""Memory limits and out-of-memory counters of control groups (cgroup v1 and v2)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")

OOM_FILES = {1: ("memory.oom_control",), 2: ("memory.events.local", "memory.events")}
"""Files with the number of killed processes, by version. ``memory.events`` also counts those of cgroups below."""


@dataclass(frozen=True)
class MemoryCgroup:
    """The memory cgroup of a process: ``root`` is where its hierarchy is mounted."""

    root: Path
    group: str  # relative to the root
    version: int  # 1 or 2

    @property
    def folder(self) -> Path:
        """The folder with the files of this cgroup."""
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
        name = "memory.max" if cgroup.version == 2 else "memory.limit_in_bytes"
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
