"""All descendants of a process, with their memory and CPU time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.measure.memory.pss import PssReader, TreeMemory, read_proc
from distexp.system.process_shutdown import descendants

COMPILER = re.compile(
    rb"ninja|nvcc|cicc|ptxas|fatbinary|cudafe\+\+|nvlink|hipcc|cc1(plus)?|collect2|lto1|as|ld(\.\w+)?|lld"
    rb"|(g?cc|[gc]\+\+|clang(\+\+)?)(-[\d.]+)?|(x86_64|aarch64|powerpc64le)-.*"
)
"""Names of the programs that compile C++ and CUDA. The kernel truncates a name to 15 characters."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


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
    """The descendants of ``root_pid``, without that process itself.

    A process that was found once is followed until it ends, even if its parent dies and it leaves the tree.

    Args:
        root_pid: Root of the tree.
    """

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

        Args:
            member: The process.
            forked_from: Idle process from which it was forked. The PSS of the member lacks its part of the shared
                pages, so its memory counts too while the tree has a process. Pages that only this process has do not
                count: the member has a copy, or does not need them.
            others: Other idle processes with the same libraries. The PSS of the member lacks their part of the files,
                so this part of their memory counts too.
        """
        self._memory.page_holders, self._memory.file_holders = (forked_from,), others
        self._added.append(member)
        self._newest_pid = 0

    def read(self) -> TreeReading:
        """Read all processes that are alive."""
        before, self._members = self._members, {}
        for pid in self._find(before):
            stat = _read_stat(pid)
            if stat is not None and stat.alive:
                self._members[pid] = stat
        ticks = sum(
            stat.cpu_ticks - (before[pid].cpu_ticks if _is_same(before.get(pid), stat) else 0)
            for pid, stat in self._members.items()
        )
        compilers = {pid for pid, stat in self._members.items() if stat.compiles}
        return TreeReading(
            pids=frozenset(self._members),
            memory=self._memory.read(self._members, compilers),
            cpu_s=ticks / TICKS_PER_S,
        )

    def _find(self, known: dict[int, _Stat]) -> list[int]:
        """Return the known pids that are alive, and all descendants of them and of the root."""
        found = {pid: None for pid, stat in known.items() if _is_same(stat, _read_stat(pid))}
        if not self._may_have_grown():
            return list(found)
        found |= dict.fromkeys(self._added)
        to_search = [self.root_pid, *found]
        while to_search:
            for child in self._children(to_search.pop()):
                if child not in found:
                    found[child] = None
                    to_search.append(child)
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
        if self._kernel_lists_children:
            yield from _children_listed_by_kernel(pid)
        else:
            yield from (child.pid for child in descendants(pid, recursive=False))


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


def _children_listed_by_kernel(pid: int) -> Iterator[int]:
    """Yield the children of a process. The kernel lists them per thread that started them."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return
    for thread in threads:
        yield from map(int, read_proc(f"{pid}/task/{thread}/children").split())
