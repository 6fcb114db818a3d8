"""Limits of control groups, and the GPUs and CPU cores that this process may use."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from distexp.system.units import MIB

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
OOM_FILES = {1: ("memory.oom_control",), 2: ("memory.events.local", "memory.events")}
"""Files with the number of killed processes, by version. ``memory.events`` also counts those of cgroups below."""

MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
"""Files with the limit and the used bytes of a cgroup, by version."""


@dataclass(frozen=True)
class Cgroup:
    """A cgroup of a process: ``root`` is where its hierarchy is mounted."""

    root: Path
    group: str  # relative to the root
    version: int  # 1 or 2

    @property
    def folder(self) -> Path:
        """Return the folder with the files of this cgroup."""
        return self.root / self.group

    def folders(self) -> Iterator[Path]:
        """Yield the folder of this cgroup and of each parent, because the limits of all of them count."""
        below = Path(self.group)
        yield from (self.root / group for group in (below, *below.parents))


def memory_cgroups(pid: int | str = "self") -> list[Cgroup]:
    """Return the memory cgroups of a process; a machine may have both versions, or none."""
    return _cgroups(Path(f"/proc/{pid}/cgroup"), "memory")


def _cgroups(path: Path, controller: str) -> list[Cgroup]:
    """Return the cgroups for ``memory`` or ``cpu``, from ``/proc/PID/cgroup``: ``hierarchy:controllers:group``.

    In version 2 one cgroup has all controllers, and names none.
    """
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            found.append(Cgroup(CGROUP_ROOT, group.lstrip("/"), 2))
        elif controller in controllers.split(","):
            found.append(Cgroup(CGROUP_ROOT / controller, group.lstrip("/"), 1))
    return found


def memory_limits(pid: int | str = "self") -> Iterator[int]:
    """Yield the memory limits in bytes of a process's cgroup and of all its parents."""
    for cgroup in memory_cgroups(pid):
        limits = (_read_bytes(folder / MEMORY_FILES[cgroup.version][0]) for folder in cgroup.folders())
        yield from (limit for limit in limits if limit is not None)


def _read_bytes(path: Path) -> int | None:
    """Return the number in a file; None if it cannot be read, or states that there is no limit."""
    text = _read_text(path).strip()
    return None if text in ("", "max") else int(text)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def usable_memory(pid: int | str = "self") -> int:
    """Return the bytes of memory that a process may use: the machine's memory, or a lower limit of its cgroup."""
    return min([_read_meminfo("MemTotal"), *memory_limits(pid)])


def available_memory() -> int:
    """Return the free bytes of memory for this process, by the machine and its cgroups. Cached files count as free."""
    free = [_read_meminfo("MemAvailable")]
    for cgroup in memory_cgroups():
        for folder in cgroup.folders():
            limit, used = (_read_bytes(folder / name) for name in MEMORY_FILES[cgroup.version])
            if limit is not None:
                free.append(limit - max(0, (used or 0) - _reclaimable(folder / "memory.stat")))
    return max(0, min(free))


def _read_meminfo(name: str) -> int:
    """Return a size of the machine's memory in bytes."""
    text = Path("/proc/meminfo").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def _reclaimable(path: Path) -> int:
    """Return the bytes of cached files that a cgroup has not used lately; 0 if they are not known."""
    text = _read_text(path)
    # In version 1, the name without ``total_`` leaves out the cgroups below.
    counters = (re.search(rf"^{name} (\d+)$", text, re.MULTILINE) for name in ("total_inactive_file", "inactive_file"))
    return next((int(counter[1]) for counter in counters if counter), 0)


def cpu_limit() -> float | None:
    """Return how many cores the cgroups of this process allow, as with ``docker --cpus``; None without a limit."""
    cgroups = _cgroups(OWN_CGROUPS, "cpu")
    quotas = [_read_quota(folder, cgroup.version) for cgroup in cgroups for folder in cgroup.folders()]
    return min((cores for cores in quotas if cores is not None), default=None)


def _read_quota(folder: Path, version: int) -> float | None:
    """Return the quota of a folder in cores; None if it has none."""
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    values = " ".join(_read_text(folder / name) for name in names).split()
    return None if len(values) != 2 or values[0] in ("max", "-1") else int(values[0]) / int(values[1])


def oom_kills() -> dict[str, int]:
    """Return how many processes the kernel has killed for memory since boot: ``machine`` and ``cgroup``, if known."""
    files = [cgroup.folder / name for cgroup in memory_cgroups() for name in OOM_FILES[cgroup.version]]
    in_cgroup = next((count for path in files if (count := _read_counter(path)) is not None), None)
    counters = {"machine": _read_counter(Path("/proc/vmstat")), "cgroup": in_cgroup}
    return {name: count for name, count in counters.items() if count is not None}


def have_increased(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Return whether the OOM counter of this cgroup has increased, or without one that of the machine."""
    name = "cgroup" if "cgroup" in before and "cgroup" in now else "machine"
    return now.get(name, 0) > before.get(name, now.get(name, 0))


def _read_counter(path: Path) -> int | None:
    found = re.search(r"^oom_kill (\d+)$", _read_text(path), re.MULTILINE)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use; ``index`` is the index in NVML, not in CUDA_VISIBLE_DEVICES."""

    index: int
    uuid: str
    name: str
    total_mib: float


@lru_cache(maxsize=1)
def visible_gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that CUDA_VISIBLE_DEVICES allows, in CUDA's order."""
    try:
        with nvml_session() as nvml:
            gpus = []
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid, name = as_text(nvml.nvmlDeviceGetUUID(handle)), as_text(nvml.nvmlDeviceGetName(handle))
                gpus.append(Gpu(index, uuid, name, nvml.nvmlDeviceGetMemoryInfo(handle).total / MIB))
    except NvmlUnavailableError:
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(gpus)
    selected = [_gpus_named(name.strip(), gpus) for name in visible.split(",") if name.strip()]
    return tuple(found[0] for found in selected if found)


def _gpus_named(name: str, gpus: list[Gpu]) -> list[Gpu]:
    """Return the GPUs with an index or a prefix of a UUID, as CUDA_VISIBLE_DEVICES lists them."""
    return [g for g in gpus if name == str(g.index) or (name.startswith("GPU-") and g.uuid.startswith(name))]


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


BUSY_MIB = 2048
"""A GPU with more memory in use counts as busy. The driver keeps several hundred MiB; a training takes GiB."""


class NvmlUnavailableError(RuntimeError):
    """NVML cannot be initialized on this machine."""


@contextmanager
def nvml_session() -> Iterator[Any]:
    """Initialize NVML, yield ``pynvml``, and shut NVML down; may be nested. Raise NvmlUnavailableError without it."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(str(error)) from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def as_text(value: str | bytes) -> str:
    """Return a string of NVML as text; older versions of pynvml return bytes."""
    return value.decode() if isinstance(value, bytes) else value
