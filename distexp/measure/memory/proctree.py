"""All processes below one: which they are, their memory and their CPU time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from distexp.measure.memory.pss import Resident, SharedOnce, read_proc

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class TreeReading:
    """A process tree at one time."""

    pids: frozenset[int]
    memory: Resident | None  # None where no process is left
    cpu_s: float  # CPU time spent since the reading before


@dataclass(frozen=True)
class _Stat:
    started: int  # ticks since boot; with the pid it names a process for good
    cpu_ticks: int
    alive: bool  # not a zombie


class ProcessTree:
    """The processes below ``root_pid``, itself left out.

    One that was seen is followed until it ends, also when its parent dies and it moves out of the tree.
    """

    def __init__(self, root_pid: int) -> None:
        self.root_pid = root_pid
        self._members: dict[int, _Stat] = {}
        self._memory = SharedOnce()
        self._listed_by_kernel = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
        self._last_born = 0
        self._settled = False  # no process was born between the last two looks

    def read(self) -> TreeReading:
        """Reads all processes that live now; those that end meanwhile are left out."""
        before, self._members = self._members, {}
        for pid in self._find(before):
            stat = _stat(pid)
            if stat is not None and stat.alive:
                self._members[pid] = stat
        ticks = sum(
            stat.cpu_ticks - (before[pid].cpu_ticks if _same(before.get(pid), stat) else 0)
            for pid, stat in self._members.items()
        )
        return TreeReading(
            pids=frozenset(self._members),
            memory=self._memory.read(self._members),
            cpu_s=ticks / TICKS_PER_S,
        )

    def _find(self, known: dict[int, _Stat]) -> list[int]:
        """The pids below the root and below every known process, and the known ones."""
        found = {pid: None for pid, stat in known.items() if _same(stat, _stat(pid))}
        if not self._may_have_grown():
            return list(found)
        open_ends = [self.root_pid, *found]
        while open_ends:
            for child in self._children(open_ends.pop()):
                if child not in found:
                    found[child] = None
                    open_ends.append(child)
        return list(found)

    def _may_have_grown(self) -> bool:
        """Whether a process or thread may have been started since the last look for children.

        To look costs some microseconds for each thread of the tree, and there are thousands. So it is left
        out while the number of the last-born process stands still; once more it is done after that, for a
        process gets its number a moment before it becomes its parent's child.
        """
        before, self._last_born = self._last_born, int(read_proc("loadavg").split()[-1])
        was_settled, self._settled = self._settled, self._last_born == before
        # Where /proc is emulated the number may mean nothing; it cannot be below a pid that was given.
        return not (self._settled and was_settled) or self._last_born < os.getpid()

    def _children(self, pid: int) -> Iterator[int]:
        if self._listed_by_kernel:
            yield from _children_by_kernel(pid)
            return
        import psutil

        try:
            yield from [child.pid for child in psutil.Process(pid).children()]
        except psutil.NoSuchProcess:
            return


def _same(one: _Stat | None, other: _Stat | None) -> bool:
    return one is not None and other is not None and one.started == other.started


def _stat(pid: int) -> _Stat | None:
    content = read_proc(f"{pid}/stat")
    if not content:
        return None
    # The name, in brackets, may hold anything; from the state on the fields are plain (proc(5), field 3).
    cells = content.rpartition(b")")[2].split()
    return _Stat(started=int(cells[19]), cpu_ticks=int(cells[11]) + int(cells[12]), alive=cells[0] not in (b"Z", b"X"))


def _children_by_kernel(pid: int) -> Iterator[int]:
    """Children hang on the thread that started them, so every thread is asked."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return
    for thread in threads:
        yield from map(int, read_proc(f"{pid}/task/{thread}/children").split())
