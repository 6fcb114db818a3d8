"""Progress of each rank, so that a hang can name the rank that the others wait for.

All ranks pass the same points of the program in the same order: phases, batches and steps. Each rank counts the points
that it has passed, in a small file that it overwrites in place. The rank with the lowest count is behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distexp.runs.run_dir import rank_progress_path, rank_progress_paths

FILE_BYTES = 256
"""Size of the file. It never changes, so that a full disk does not end the training here."""


@dataclass(frozen=True)
class RankProgress:
    """The last point that a rank has passed.

    Attributes:
        rank: The rank.
        pid: Its process.
        count: Points passed so far.
        phase: The current phase.
        step: Finished optimizer steps.
    """

    rank: int
    pid: int
    count: int
    phase: str
    step: int

    def __str__(self) -> str:
        after = f" after step {self.step}" if self.step else ""
        return f"rank {self.rank} in phase {self.phase}{after}"


class ProgressWriter:
    """Writer of the progress of one rank.

    Args:
        run_dir: Directory of the run.
        node: Node of the rank.
        rank: The rank.
    """

    def __init__(self, run_dir: Path, node: int, rank: int) -> None:
        self._rank, self._pid, self._count = rank, os.getpid(), 0
        self._file = os.open(rank_progress_path(run_dir, node, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def advance(self, phase: str, step: int) -> None:
        """Write that the rank has passed a point."""
        self._count += 1
        progress = {"rank": self._rank, "pid": self._pid, "count": self._count, "phase": phase, "step": step}
        os.pwrite(self._file, json.dumps(progress).ljust(FILE_BYTES).encode(), 0)


def read_rank_progress(run_dir: Path, node: int | None = None) -> list[RankProgress]:
    """Read the progress of all ranks, or of those of a node; ranks that have not started are left out."""
    return sorted(_read(run_dir, node), key=lambda progress: progress.rank)


def ranks_behind(progress: list[RankProgress]) -> list[RankProgress]:
    """Return the ranks with the lowest count; none if all ranks have the same count."""
    counts = {rank.count for rank in progress}
    return [rank for rank in progress if rank.count == min(counts)] if len(counts) > 1 else []


def _read(run_dir: Path, node: int | None) -> Iterator[RankProgress]:
    for path in rank_progress_paths(run_dir, node):
        try:
            yield RankProgress(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            continue  # The rank was killed before its first line.
