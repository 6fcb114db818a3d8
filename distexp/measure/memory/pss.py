"""Memory of a group of processes in which a shared page counts once, at a bounded cost.

The memory is PSS, the proportional set size: a page that n processes map counts 1/n in each, so that the
sum over a process tree counts it once. Pages shared with processes outside count in part; files of a tmpfs
that no process maps do not count.

To tell PSS the kernel walks all page tables: about 8 ms of CPU time for an idle process with torch, 15 ms a
GB in small pages. Between two such readings the sum is carried on by what is cheap to read: the growth
of private memory. What carrying cannot see is shared memory, so the reading is renewed after the shared
counts or the processes change, and from time to time in any case: a change shows after 50 times the CPU
time of a full reading at the latest (0.4 s for one process with torch), and one over by then is missed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass

from distexp.system.units import MIB

PAGE = os.sysconf("SC_PAGE_SIZE")
STEADY_SHARE = 0.005  # of one core's time, that renewing may cost while nothing shared changes
CHANGED_SHARE = 0.02  # while something does
LEAST_CHANGE = 4 * MIB  # of shared memory, that counts as a change
RELATIVE_CHANGE = 0.01


@dataclass(frozen=True)
class Resident:
    """Memory of some processes; ``source`` says how it was read.

    ``pss``: all page tables walked. ``pss+delta``: carried on since then. ``rss`` in place of or beside
    ``pss``: of some processes only the resident size is readable, where shared pages count every time.
    """

    mib: float
    source: str


@dataclass(frozen=True)
class _Counts:
    """The kernel's cheap counts for a process, in bytes."""

    private: int
    shared: int


class SharedOnce:
    """Reads the memory of processes, whichever are given."""

    def __init__(self) -> None:
        self._has_rollup = os.path.exists("/proc/self/smaps_rollup")
        self._base: dict[int, tuple[int, _Counts]] = {}  # bytes and counts when last read in full
        self._sources: set[str] = set()
        self._read_at = -float("inf")
        self._cost_s = 0.0

    def read(self, pids: Collection[int]) -> Resident | None:
        """The memory of the processes; None where none of them is left."""
        counts = {pid: found for pid in pids if (found := _counts(pid)) is not None}
        if not counts:
            return None
        if self._due(counts):
            self._renew(counts)
            total = sum(used for used, _ in self._base.values())
            return Resident(total / MIB, "+".join(sorted(self._sources)))
        carried = 0
        for pid, now in counts.items():
            # A process that was not read yet may share all it has with its parent: it counts from the next
            # reading on, so that no peak shows that never was.
            if pid in self._base:
                used, before = self._base[pid]
                carried += max(used + now.private - before.private, 0)
        return Resident(carried / MIB, "+".join([*sorted(self._sources), "delta"]))

    def _due(self, counts: dict[int, _Counts]) -> bool:
        elapsed = time.monotonic() - self._read_at
        if self._cost_s < elapsed * STEADY_SHARE:
            return True
        return self._cost_s < elapsed * CHANGED_SHARE and self._changed(counts)

    def _changed(self, counts: dict[int, _Counts]) -> bool:
        if counts.keys() != self._base.keys():
            return True
        change = sum(abs(now.shared - self._base[pid][1].shared) for pid, now in counts.items())
        used = sum(used for used, _ in self._base.values())
        return change > max(LEAST_CHANGE, used * RELATIVE_CHANGE)

    def _renew(self, counts: dict[int, _Counts]) -> None:
        started = time.thread_time()
        self._base, self._sources = {}, set()
        for pid, count in counts.items():
            pss = self._pss(pid)
            self._base[pid] = (count.private + count.shared if pss is None else pss, count)
            self._sources.add("rss" if pss is None else "pss")
        self._read_at = time.monotonic()
        self._cost_s = time.thread_time() - started

    def _pss(self, pid: int) -> int | None:
        """Bytes, 0 of a process that has ended; None where PSS is not readable."""
        if not self._has_rollup:
            return None
        try:
            rollup = read_proc(f"{pid}/smaps_rollup")
        except PermissionError:
            return None
        kib = 0
        for line in rollup.splitlines():
            # Huge pages of hugetlbfs are in counts of their own.
            if line.startswith((b"Pss:", b"Private_Hugetlb:", b"Shared_Hugetlb:")):
                kib += int(line.split()[1])
        return kib * 1024


def _counts(pid: int) -> _Counts | None:
    cells = read_proc(f"{pid}/statm").split()
    if not cells:
        return None
    resident, shared = int(cells[1]) * PAGE, int(cells[2]) * PAGE
    return _Counts(private=resident - shared, shared=shared)


def read_proc(name: str) -> bytes:
    """A small file of /proc; empty where its process has ended, PermissionError where it is another's."""
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
