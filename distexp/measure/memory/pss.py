"""Memory of a group of processes; shared pages count once, and the CPU cost is bounded.

The memory is the PSS (proportional set size). A page that n processes map counts 1/n in each of them, so the sum over
a process tree counts it once. Pages that are shared with other processes count in part. Files in a tmpfs that no
process maps do not count.

The kernel walks all page tables to compute PSS, which is expensive. Measured for eight processes that import torch
and hold 256 MiB each (2 cores, Linux 6.18), CPU time per sample:

- PSS of all processes, from smaps_rollup: 57 ms; psutil's memory_full_info costs the same.
- Finding the processes with psutil's children(recursive=True): 2 ms more.
- The kernel's counts in statm, as used here between two PSS readings: 0.4 ms, including the search for processes.

With psutil alone, a sample every 0.5 s would cost 12 % of a core. So PSS is limited to ``PSS_SHARE`` of a core.
Between two PSS readings, each process counts its last PSS plus the growth of its private memory since then. A change
of shared memory, or a new process, appears in the next PSS reading: after 100 times its CPU time (6 s above, 0.7 s for
one process).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from distexp.measure.memory.cost_limit import CostLimit
from distexp.system.units import MIB

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

PSS_SHARE = 0.01
"""Share of one core's time that PSS readings may cost."""


@dataclass(frozen=True)
class TreeMemory:
    """Memory of some processes; ``source`` is how it was read.

    ``pss``: PSS of all processes. ``pss+delta``: PSS plus the growth of private memory. ``rss`` instead of ``pss``, or
    with it: PSS of some processes is not readable, and RSS counts their shared pages several times.
    """

    mib: float
    source: str
    compiler_mib: float | None = None  # compilers, which are not in ``mib``; None if there are none


@dataclass(frozen=True)
class _Counts:
    """Resident memory of a process in bytes."""

    private: int
    shared: int


@dataclass(frozen=True)
class _Rollup:
    """PSS of a process in bytes, and what is in it; all are of the same moment, and 0 if the process has ended."""

    pss: int = 0
    private: int = 0
    files: int = 0
    unshared: int = 0  # written pages that no other process has


class PssReader:
    """Reads the memory of processes.

    Attributes:
        page_holders: Further processes, whose memory counts without the pages that they alone have.
        file_holders: Further processes, of whose memory only the files count, such as libraries.
    """

    def __init__(self, page_holders: Sequence[int] = (), file_holders: Sequence[int] = ()) -> None:
        self.page_holders, self.file_holders = page_holders, file_holders
        self._held = 0  # bytes of these processes that count, at the last PSS reading
        self._has_rollup = os.path.exists("/proc/self/smaps_rollup")
        self._last: dict[int, tuple[int, int]] = {}  # PSS and private memory in bytes, at the same time
        self._sources: set[str] = set()
        self._limit = CostLimit(PSS_SHARE)

    def read(self, pids: Collection[int], compilers: Collection[int] = ()) -> TreeMemory | None:
        """Return the memory of some processes, or None if none of them is alive.

        Args:
            pids: The processes.
            compilers: Those of them whose memory is counted separately.
        """
        counts = {pid: found for pid in pids if (found := _read_counts(pid)) is not None}
        if not counts:
            return None
        if self._limit.allows():
            with self._limit.measure():
                self._read_pss(counts)
            used = {pid: pss for pid, (pss, _) in self._last.items()}
            return _split(used, self._held, compilers, "+".join(sorted(self._sources)))
        used = {pid: self._estimate(pid, now) for pid, now in counts.items()}
        return _split(used, self._held, compilers, "+".join([*sorted(self._sources), "delta"]))

    def _estimate(self, pid: int, now: _Counts) -> int:
        """Return the bytes of a process since the last PSS reading; 0 for a new process.

        A new process may share all its memory with its parent. Its RSS would show a peak that never existed.
        """
        if pid not in self._last:
            return 0
        used, before = self._last[pid]
        return max(used + now.private - before, 0)

    def _read_pss(self, counts: dict[int, _Counts]) -> None:
        self._last, self._sources = {}, set()
        for pid, count in counts.items():
            rollup = self._read_rollup(pid)
            self._last[pid] = (
                (count.private + count.shared, count.private) if rollup is None else (rollup.pss, rollup.private)
            )
            self._sources.add("rss" if rollup is None else "pss")
        pages, files = ([self._read_rollup(pid) for pid in pids] for pids in (self.page_holders, self.file_holders))
        self._held = sum(rollup.pss - rollup.unshared for rollup in pages if rollup is not None)
        self._held += sum(rollup.files for rollup in files if rollup is not None)

    def _read_rollup(self, pid: int) -> _Rollup | None:
        """Return the PSS of a process; None if it is not readable.

        Its parts are of the same moment. Counts from before would be too small for a process that grows, and all later
        estimates too large.
        """
        if not self._has_rollup:
            return None
        try:
            rollup = read_proc(f"{pid}/smaps_rollup")
        except PermissionError:
            return None
        kib = private_kib = files_kib = unshared_kib = 0
        for line in rollup.splitlines():
            # Pss does not include the huge pages of hugetlbfs.
            if line.startswith((b"Pss:", b"Private_Hugetlb:", b"Shared_Hugetlb:")):
                kib += int(line.split()[1])
            elif line.startswith(b"Anonymous:"):
                private_kib = int(line.split()[1])
            elif line.startswith(b"Pss_File:"):
                files_kib = int(line.split()[1])
            elif line.startswith(b"Private_Dirty:"):
                unshared_kib = int(line.split()[1])
        return _Rollup(kib * 1024, private_kib * 1024, files_kib * 1024, unshared_kib * 1024)


def _split(used: Mapping[int, int], held: int, compilers: Collection[int], source: str) -> TreeMemory:
    """Return the sum of the bytes of all processes and of those that others hold, with compilers separately."""
    apart = [used[pid] for pid in compilers if pid in used]
    rest = sum(used.values()) + held - sum(apart)
    return TreeMemory(rest / MIB, source, sum(apart) / MIB if apart else None)


def _read_counts(pid: int) -> _Counts | None:
    cells = read_proc(f"{pid}/statm").split()
    if not cells:
        return None
    resident, shared = int(cells[1]) * PAGE_BYTES, int(cells[2]) * PAGE_BYTES
    return _Counts(private=resident - shared, shared=shared)


def read_proc(name: str) -> bytes:
    """Read a small file in /proc; empty if its process has ended.

    Raises:
        PermissionError: the process belongs to another user.
    """
    try:
        descriptor = os.open(f"/proc/{name}", os.O_RDONLY)
    except (FileNotFoundError, ProcessLookupError):
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except ProcessLookupError:
        return b""
    finally:
        os.close(descriptor)
