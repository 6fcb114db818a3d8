"""Composition of many cells in several processes, in the order of the sweep."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from os import getpid
from typing import Any

from distexp.launch.cell import Cell, MakeCell
from distexp.system.hardware import cpu_count
from distexp.system.processes import die_with_parent

MAX_PROCESSES = 8
"""Most processes that compose; a login node has many cores and many users."""


MIN_PARALLEL, CHUNK = 32, 8
"""Number of cells from which processes are started, and number of cells that a process composes at a time."""


def compose_all(make: MakeCell, overrides: Sequence[Sequence[str]]) -> Iterator[Cell]:
    """Yield all cells in order. If there are many, several processes make them.

    Raises:
        OSError: if a process was killed.
    """
    if not overrides:
        return
    # The processes inherit what the first cell has imported, read and composed.
    yield make(overrides[0])
    processes = min(cpu_count(), MAX_PROCESSES, len(overrides) // CHUNK)
    if len(overrides) < MIN_PARALLEL or processes < 2:
        yield from map(make, overrides[1:])
        return
    done = 1
    for cells in _compose_chunks(make, overrides, processes):
        yield from cells
        done += len(cells)
        end = min(done - len(cells) + CHUNK, len(overrides))
        # A process returns fewer cells if one raises. Here the same cell raises an error that has its cause.
        yield from map(make, overrides[done:end])
        done = end


def _compose_chunks(make: MakeCell, overrides: Sequence[Sequence[str]], processes: int) -> Iterator[list[Cell]]:
    """Yield the cells after the first one in chunks."""
    pool = ProcessPoolExecutor(processes, get_context("fork"), _start_process, (make, overrides, getpid()))
    try:
        yield from pool.map(_compose_chunk, range(1, len(overrides), CHUNK))
    except BrokenProcessPool:
        raise OSError("a process that composed cells was killed, and no run was started: try again") from None
    finally:
        pool.shutdown(cancel_futures=True)


_inherited: dict[str, Any] = {}


def _start_process(make: MakeCell, overrides: Sequence[Sequence[str]], parent: int) -> None:
    """Prepare a process that composes. On Ctrl-C the launcher ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent=parent)
    _inherited.update(make=make, overrides=overrides)


def _compose_chunk(start: int) -> list[Cell]:
    """Return up to CHUNK cells, fewer if a cell raises an error."""
    cells: list[Cell] = []
    for wanted in _inherited["overrides"][start : start + CHUNK]:
        try:
            cells.append(_inherited["make"](wanted))
        except Exception:  # The launcher makes this cell again, and raises the error.
            break
    return cells
