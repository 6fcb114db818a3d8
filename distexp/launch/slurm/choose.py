"""Trials of ``distexp choose`` on Slurm: a job array for each batch of trials with the same resources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from distexp.choose.trial_launcher import TrialLauncher, TrialRunner
from distexp.console.plain_text import print_plain
from distexp.exceptions import MonitoringInterrupted
from distexp.launch.assigned_runs import AssignedRun
from distexp.launch.slurm.follow import poll_until_done
from distexp.launch.slurm.prepare import PreparedRun, prepare_run
from distexp.launch.slurm.status import poll
from distexp.launch.slurm.submission import submit_runs
from distexp.launch.snapshot import take_snapshot
from distexp.runs.command_text import suggest_command


@dataclass(frozen=True)
class SlurmTrials(TrialLauncher):
    """Launcher of trials on Slurm.

    Attributes:
        max_array_size: Jobs in the largest array that Slurm accepts.
        trusted: Packages to copy with the code.
    """

    max_array_size: int
    trusted: Sequence[str]

    @contextmanager
    def runner(self, sweep_dir: Path, console: Console) -> Iterator[TrialRunner]:
        """Yield the runner of trials, after the code was copied."""
        snapshot = take_snapshot(sweep_dir, list(self.trusted), partial(print_plain, console))
        batches = _Batches(sweep_dir, snapshot.folder, self.max_array_size, console)
        yield TrialRunner(batches.run_all, snapshot.git, snapshot.folder.name)


@dataclass(frozen=True)
class _Batches:
    """The batches of trials of one search.

    Attributes:
        sweep_dir: Directory of the search.
        snapshot: Folder of the code that the trials run.
        max_array_size: Jobs in the largest array that Slurm accepts.
        console: Where to print.
        printed: Last printed state of each trial, so that a later batch does not print it again.
    """

    sweep_dir: Path
    snapshot: Path
    max_array_size: int
    console: Console
    printed: dict[int, str] = field(default_factory=dict)

    def run_all(self, runs: Sequence[AssignedRun], after_each: Callable[[], None]) -> None:
        """Submit the trials of a batch that have no job yet, and wait until all have ended.

        Raises:
            MonitoringInterrupted: On Ctrl-C; the submitted trials continue.
        """
        active = {run.number for run in poll(self.sweep_dir) if run.is_active}
        outcomes = [prepare_run(run) for run in runs if run.info.number not in active]
        prepared = [outcome for outcome in outcomes if isinstance(outcome, PreparedRun)]
        submit_runs(prepared, self.sweep_dir, self.snapshot, self.max_array_size, self.console)
        try:
            poll_until_done(self.sweep_dir, self.console, self.printed)
        except KeyboardInterrupt:
            cancel = suggest_command("cancel", self.sweep_dir)
            print_plain(self.console, f"the submitted trials continue; to cancel them: {cancel}")
            raise MonitoringInterrupted from None
        after_each()
