"""Trials of ``distexp choose`` on this machine, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra.types import HydraContext
from rich.console import Console

from distexp.choose.labels import config_label
from distexp.choose.trial_launcher import TrialLauncher, TrialRunner
from distexp.console.trial_screen import TrialScreen
from distexp.launch.assigned_runs import AssignedRun
from distexp.launch.git_state import package_git_state
from distexp.launch.local.hangup import continue_after_hangup
from distexp.launch.local.runner import CellRunner
from distexp.launch.local.shared_start import SharedStart


@dataclass(frozen=True)
class LocalTrials(TrialLauncher):
    """Launcher of trials on this machine."""

    context: HydraContext

    @contextmanager
    def runner(self, sweep_dir: Path, console: Console) -> Iterator[TrialRunner]:
        """Yield the runner of trials. The libraries are imported once for all of them."""
        labels: dict[int, str] = {}
        screen = TrialScreen(sweep_dir, console, labels)

        def run_all(runs: Sequence[AssignedRun], after_each: Callable[[], None]) -> None:
            for run in runs:
                labels[run.info.number] = "" if run.cell.config is None else config_label(run.cell.config)
                runner.run_if_free(run)
                after_each()

        with continue_after_hangup(sweep_dir), SharedStart() as shared_start:
            shared_start.note = screen.log
            runner = CellRunner(self.context, screen, shared_start)
            yield TrialRunner(run_all, package_git_state())
