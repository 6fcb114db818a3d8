"""What the search needs of a launcher: a context in which it runs batches of trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from distexp.launch.assigned_runs import AssignedRun
from distexp.launch.git_state import GitState

RunAll = Callable[[Sequence[AssignedRun], Callable[[], None]], None]
"""Function that runs all trials of a batch, and calls another one after each. Each has a record when it returns."""


@dataclass(frozen=True)
class TrialRunner:
    """How a launcher runs trials.

    Attributes:
        run_all: Runs a batch.
        code: Git state of the code.
        snapshot: Copy of the code that the runs use, relative to the directory of the search.
    """

    run_all: RunAll
    code: GitState
    snapshot: str | None = None


class TrialLauncher(Protocol):
    """A launcher that can run trials."""

    def runner(self, sweep_dir: Path, console: Console) -> AbstractContextManager[TrialRunner]:
        """Return a context manager with the runner of trials.

        Args:
            sweep_dir: Directory of the search.
            console: Where to print what happens.
        """
