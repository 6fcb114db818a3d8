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
"""A login node has many cores and many users."""

MIN_PARALLEL = 32
"""Number of cells from which processes are started."""

CHUNK = 8
"""Number of cells that a process composes at a time."""

Chunk = Sequence[Sequence[str]]
"""Overrides of the cells that a process composes at a time."""


def compose_all(make: MakeCell, overrides: Sequence[Sequence[str]]) -> Iterator[Cell]:
    """Yield all cells in order. If there are many, several processes make them.

    Raises:
        OSError: if a process was killed.
    """
    if not overrides:
        return
    # The processes inherit what the first cell has imported, read and composed.
    yield make(overrides[0])
    others = overrides[1:]
    processes = min(cpu_count(), MAX_PROCESSES, len(overrides) // CHUNK)
    if len(overrides) < MIN_PARALLEL or processes < 2:
        yield from map(make, others)
        return
    chunks = [others[start : start + CHUNK] for start in range(0, len(others), CHUNK)]
    for chunk, cells in zip(chunks, _compose_chunks(make, chunks, processes), strict=True):
        yield from cells
        # A process returns fewer cells if one raises. Here the same cell raises an error that has its cause.
        yield from map(make, chunk[len(cells) :])


def _compose_chunks(make: MakeCell, chunks: Sequence[Chunk], processes: int) -> Iterator[list[Cell]]:
    """Yield the cells of each chunk, fewer if one of them raises an error."""
    pool = ProcessPoolExecutor(processes, get_context("fork"), _start_process, (make, chunks, getpid()))
    try:
        yield from pool.map(_compose_chunk, range(len(chunks)))
    except BrokenProcessPool:
        raise OSError("a process that composed cells was killed, and no run was started: try again") from None
    finally:
        pool.shutdown(cancel_futures=True)


_inherited: dict[str, Any] = {}
"""What a forked process needs. It is not pickled for each chunk."""


def _start_process(make: MakeCell, chunks: Sequence[Chunk], parent: int) -> None:
    """Prepare a process that composes. On Ctrl-C the launcher ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent=parent)
    _inherited.update(make=make, chunks=chunks)


def _compose_chunk(index: int) -> list[Cell]:
    """Return the cells of a chunk up to the first that raises an error."""
    cells: list[Cell] = []
    for overrides in _inherited["chunks"][index]:
        try:
            cells.append(_inherited["make"](overrides))
        except Exception:  # The launcher makes this cell again, and raises the error.
            break
    return cells
