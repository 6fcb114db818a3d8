"""All descendants of a process, with their memory and CPU time."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from distexp.system import processes, units

# Names of the programs that compile C++ and CUDA. The kernel truncates a name to 15 characters.
COMPILER = re.compile(
    rb"ninja|nvcc|cicc|ptxas|fatbinary|cudafe\+\+|nvlink|hipcc|cc1(plus)?|collect2|lto1|as|ld(\.\w+)?|lld"
    rb"|(g?cc|[gc]\+\+|clang(\+\+)?)(-[\d.]+)?|(x86_64|aarch64|powerpc64le)-.*"
)


@dataclass(frozen=True)
class TreeReading:
    """Processes, memory and CPU time of a process tree at one time."""

    pids: frozenset[int]
    memory: TreeMemory | None  # None if no process is left
    cpu_s: float  # CPU time since the previous reading


@dataclass(frozen=True)
class _Stat:
    """Fields of /proc/PID/stat."""

    started: int  # ticks since boot; identifies a process together with the pid
    cpu_ticks: int
    alive: bool  # not a zombie
    compiles: bool  # a program of a compiler


class ProcessTree:
    """The descendants of ``root_pid``. One that was found is followed until it ends, even if it leaves the tree."""

    def __init__(self, root_pid: int) -> None:
        self.root_pid = root_pid
        self._added: list[int] = []
        self._members: dict[int, _Stat] = {}
        self._memory = PssReader()
        self._kernel_lists_children = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
        self._newest_pid = 0
        self._unchanged = False  # no process was started between the last two readings

    def include(self, member: int, forked_from: int, others: Sequence[int] = ()) -> None:
        """Add a process that is no descendant of the root, with its descendants.

        It was forked from an idle process, whose part of the shared pages is missing in its PSS. So the memory of that
        process counts too while the tree has a process, without the pages that only that process has: the member has a
        copy, or does not need them. The PSS also lacks the part of the files of ``others``, idle processes with the
        same libraries, so this part counts too.
        """
        self._memory.page_holders, self._memory.file_holders = (forked_from,), others
        self._added.append(member)
        self._newest_pid = 0

    def read(self) -> TreeReading:
        """Read all processes that are alive."""
        before = self._members
        found = {pid: _read_stat(pid) for pid in self._find(before)}
        self._members = {pid: stat for pid, stat in found.items() if stat is not None and stat.alive}
        ticks = sum(stat.cpu_ticks for stat in self._members.values())
        ticks -= sum(before[pid].cpu_ticks for pid, stat in self._members.items() if _is_same(before.get(pid), stat))
        compilers = {pid for pid, stat in self._members.items() if stat.compiles}
        memory = self._memory.read(self._members, compilers)
        return TreeReading(frozenset(self._members), memory, cpu_s=ticks / os.sysconf("SC_CLK_TCK"))

    def _find(self, known: dict[int, _Stat]) -> list[int]:
        """Return the known pids that are alive, and all descendants of them and of the root."""
        found = {pid: None for pid, stat in known.items() if _is_same(stat, _read_stat(pid))}
        if not self._may_have_grown():
            return list(found)
        found |= dict.fromkeys(self._added)
        to_search = [self.root_pid, *found]
        while to_search:
            new = dict.fromkeys(child for child in self._children(to_search.pop()) if child not in found)
            found |= new
            to_search += new
        return list(found)

    def _may_have_grown(self) -> bool:
        """Return whether a process or thread may have been started since the last search for children.

        A search costs microseconds per thread of the tree, and there are thousands of threads. So there is no search
        while the newest pid of the machine stays the same. One more search follows after each change, because a
        process gets its pid shortly before its parent lists it as a child.
        """
        before, self._newest_pid = self._newest_pid, int(read_proc("loadavg").split()[-1])
        was_unchanged, self._unchanged = self._unchanged, self._newest_pid == before
        # An emulated /proc may report a meaningless number, which is then below the pid of this process.
        return not (self._unchanged and was_unchanged) or self._newest_pid < os.getpid()

    def _children(self, pid: int) -> Iterator[int]:
        if not self._kernel_lists_children:
            yield from (child.pid for child in processes.descendants(pid, recursive=False))
            return
        with suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{pid}/task"):  # The kernel lists them per thread that started them.
                yield from map(int, read_proc(f"{pid}/task/{thread}/children").split())


def _is_same(one: _Stat | None, other: _Stat | None) -> bool:
    return one is not None and other is not None and one.started == other.started


def _read_stat(pid: int) -> _Stat | None:
    content = read_proc(f"{pid}/stat")
    if not content:
        return None
    # The name, in parentheses, may contain any character. The fields after it are plain; the state is first (proc(5)).
    head, _, rest = content.rpartition(b")")
    cells = rest.split()
    return _Stat(
        started=int(cells[19]),
        cpu_ticks=int(cells[11]) + int(cells[12]),
        alive=cells[0] not in (b"Z", b"X"),
        compiles=COMPILER.fullmatch(head.partition(b"(")[2]) is not None,
    )


# Memory of a group of processes: the PSS (proportional set size). A page that n processes map counts 1/n in each of
# them, so the sum over a tree counts it once. Pages shared with other processes count in part, and files in a tmpfs
# that no process maps do not count.
# The kernel walks all page tables to compute PSS. For eight processes that import torch and hold 256 MiB each (2 cores,
# Linux 6.18), it takes 57 ms of CPU time, also with psutil, and 2 ms more with psutil's search for children. A sample
# every 0.5 s would cost 12 % of a core. So PSS is limited to ``PSS_SHARE`` of a core. In between, each process counts
# its last PSS plus the growth of its private memory, from the counts in statm (0.4 ms with the search for processes). A
# new process counts with the pages that no other has. A change of shared memory appears in the next PSS reading: after
# 100 times its CPU time (6 s above).

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PSS_SHARE = 0.01  # share of one core's time that PSS readings may cost


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
class _Rollup:
    """PSS of a process in bytes, and what is in it; all are of the same moment, and 0 if the process has ended."""

    pss: int = 0
    private: int = 0
    files: int = 0
    unshared: int = 0  # written pages that no other process has


class PssReader:
    """Reads the memory of processes; of ``page_holders`` the shared pages count too, of ``file_holders`` the files."""

    def __init__(self, page_holders: Sequence[int] = (), file_holders: Sequence[int] = ()) -> None:
        self.page_holders, self.file_holders = page_holders, file_holders
        self._held = 0  # bytes of these processes that count, at the last PSS reading
        self._has_rollup = os.path.exists("/proc/self/smaps_rollup")
        self._last: dict[int, tuple[int, int]] = {}  # PSS and private memory in bytes, at the same time
        self._sources: set[str] = set()
        self._limit = CostLimit(PSS_SHARE)

    def read(self, pids: Collection[int], compilers: Collection[int] = ()) -> TreeMemory | None:
        """Return the memory of some processes, or None if none of them is alive."""
        counts = {pid: found for pid in pids if (found := _read_counts(pid)) is not None}
        if not counts:
            return None
        if self._limit.allows():
            with self._limit.measure():
                self._read_pss(counts)
            used, sources = {pid: pss for pid, (pss, _) in self._last.items()}, sorted(self._sources)
        else:
            for pid in counts.keys() - self._last.keys():
                # It may share memory with its parent, whose PSS has these pages. So only what it has alone counts.
                rollup = self._read_rollup(pid)
                self._last[pid] = (0, counts[pid][1]) if rollup is None else (rollup.unshared, rollup.private)
                counts[pid] = (counts[pid][0], self._last[pid][1])  # of the same moment: it may have grown, or ended
            grown = {pid: (*self._last[pid], private) for pid, (_, private) in counts.items()}
            used = {pid: max(pss + private - before, 0) for pid, (pss, before, private) in grown.items()}
            sources = [*sorted(self._sources), "delta"]
        apart = [used[pid] for pid in compilers if pid in used]
        rest = sum(used.values()) + self._held - sum(apart)
        return TreeMemory(rest / units.MIB, "+".join(sources), sum(apart) / units.MIB if apart else None)

    def _read_pss(self, counts: dict[int, tuple[int, int]]) -> None:
        self._last, self._sources = {}, set()
        for pid, count in counts.items():
            rollup = self._read_rollup(pid)
            self._last[pid] = count if rollup is None else (rollup.pss, rollup.private)
            self._sources.add("rss" if rollup is None else "pss")
        pages, files = ([self._read_rollup(pid) for pid in pids] for pids in (self.page_holders, self.file_holders))
        self._held = sum(rollup.pss - rollup.unshared for rollup in pages if rollup is not None)
        self._held += sum(rollup.files for rollup in files if rollup is not None)

    def _read_rollup(self, pid: int) -> _Rollup | None:
        """Return the PSS of a process, with parts of one moment, because it may grow; None if it is not readable."""
        if not self._has_rollup:
            return None
        try:
            rollup = read_proc(f"{pid}/smaps_rollup")
        except PermissionError:
            return None
        rows = (line.split() for line in rollup.splitlines())
        sizes = {cells[0]: int(cells[1]) * 1024 for cells in rows if cells and cells[0].endswith(b":")}
        # Pss does not include the huge pages of hugetlbfs.
        pss = sum(sizes.get(name, 0) for name in (b"Pss:", b"Private_Hugetlb:", b"Shared_Hugetlb:"))
        return _Rollup(pss, *(sizes.get(name, 0) for name in (b"Anonymous:", b"Pss_File:", b"Private_Dirty:")))


def _read_counts(pid: int) -> tuple[int, int] | None:
    """Return the resident and the private bytes of a process; None if it has ended."""
    cells = read_proc(f"{pid}/statm").split()
    if not cells:
        return None
    resident, shared = int(cells[1]) * PAGE_BYTES, int(cells[2]) * PAGE_BYTES
    return resident, resident - shared


def read_proc(name: str) -> bytes:
    """Read a small file in /proc; empty if its process has ended. Raises PermissionError for that of another user."""
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


class CostLimit:
    """Limits repeated work of one thread to a share of one core. Its cost is the minimum of ``window`` repetitions."""

    def __init__(self, share: float, window: int = 1) -> None:
        self.share = share
        self._costs: deque[float] = deque(maxlen=window)
        self._started_at = 0.0

    @property
    def cost_s(self) -> float:
        """CPU time of one repetition in seconds; 0 until the window is full."""
        return min(self._costs) if len(self._costs) == self._costs.maxlen else 0.0

    def allows(self) -> bool:
        """Return whether enough time has passed since the last repetition started."""
        return self.cost_s <= self.share * (time.monotonic() - self._started_at)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the CPU time of one repetition, which is the ``with`` block."""
        self._started_at, before = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            self._costs.append(time.thread_time() - before)
