"""Trials of ``distexp choose`` on Slurm: a job array for each batch of trials with the same resources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from distexp.choose.trial_launcher import TrialLauncher, TrialRunner
from distexp.exceptions import MonitoringInterrupted
from distexp.launch.slurm.follow import poll_until_done
from distexp.launch.slurm.prepare import prepare_run
from distexp.launch.slurm.status import poll
from distexp.launch.slurm.submission import PreparedRun, submit_runs
from distexp.launch.snapshot import take_snapshot
from distexp.launch.sweep import AssignedRun
from distexp.runs.command_text import suggest_command


@dataclass(frozen=True)
class SlurmTrials(TrialLauncher):
    """Launcher of trials on Slurm.

    Attributes:
        max_size: Most jobs of an array.
        trusted: Packages to copy with the code.
    """

    max_size: int
    trusted: Sequence[str]

    @contextmanager
    def runner(self, sweep_dir: Path, console: Console) -> Iterator[TrialRunner]:
        """Yield the runner of trials, after the code was copied."""
        warn = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        snapshot = take_snapshot(sweep_dir, list(self.trusted), warn)
        printed: dict[int, str] = {}

        def run_all(runs: Sequence[AssignedRun], after_each: Callable[[], None]) -> None:
            active = {run.number for run in poll(sweep_dir) if run.is_active}
            new = [run for run in runs if run.info.number not in active]
            prepared = [each for each in map(prepare_run, new) if isinstance(each, PreparedRun)]
            submit_runs(prepared, sweep_dir, snapshot.folder, self.max_size, console)
            try:
                poll_until_done(sweep_dir, console, printed)
            except KeyboardInterrupt:
                console.print(
                    f"the submitted trials continue; to cancel them: {suggest_command('cancel', sweep_dir)}",
                    highlight=False, markup=False, soft_wrap=True,
                )  # fmt: skip
                raise MonitoringInterrupted from None
            after_each()

        yield TrialRunner(run_all, snapshot.git, snapshot.folder.name)
