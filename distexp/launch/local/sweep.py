"""Local launcher: the runs of a sweep one after the other on this machine, then a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig
from rich.console import Console

from distexp.config import Config
from distexp.console.screen import Screen
from distexp.console.trial_screen import TrialScreen
from distexp.exceptions import InterruptedRunError, SweepFailedError
from distexp.launch.assigned_runs import AssignedRun, ExistingRunRules, assign_run_dirs
from distexp.launch.git_state import package_git_state
from distexp.launch.launcher import Sweep, TrialLauncher, TrialRunner
from distexp.launch.local.crowded_cores import crowded_core_warnings
from distexp.launch.local.hangup import continue_after_hangup
from distexp.launch.local.process_memory import refuse_too_many_processes
from distexp.launch.local.run import AgentCommand
from distexp.launch.local.runner import CellRunner, show_if_done
from distexp.launch.local.shared_start import SharedStart
from distexp.launch.sweep_dir import locked_sweep_dir
from distexp.runs.failure_text import join_errors
from distexp.runs.record import FAILURES


def run_sweep(sweep: Sweep, agent_command: AgentCommand) -> list[JobReturn]:
    """Run every cell, even if others fail.

    Args:
        sweep: The runs.
        agent_command: Returns the command of an agent.

    Raises:
        ConfigError: if there is one cell only, and it needs more memory than this machine has.
        SweepFailedError: at the end, if a run failed.
        InterruptedRunError: if a run was interrupted. The cells after it are not started.
    """
    if not sweep.master.sweep.resume:  # An invalid cell would match no run that the sweep has already.
        refuse_too_many_processes(sweep.cells)
    with locked_sweep_dir(sweep.master, len(sweep.cells)) as sweep_dir, continue_after_hangup(sweep_dir):
        return _run_cells(sweep, sweep_dir, agent_command)


def _run_cells(sweep: Sweep, sweep_dir: Path, agent_command: AgentCommand) -> list[JobReturn]:
    cells, master = sweep.cells, sweep.master
    for warning in crowded_core_warnings(cell.config for cell in cells if cell.config is not None):
        print(f"distexp: warning: {warning}", file=sys.stderr)
    invalid = [join_errors(cell.errors) for cell in cells if cell.config is None]
    screen = Screen(total=len(cells), sweep_dir=sweep_dir, invalid=invalid)
    rules = ExistingRunRules(should_skip=lambda run: show_if_done(screen, run.directory), warn=screen.print)
    runs = assign_run_dirs(cells, sweep_dir, package_git_state(), rules, resume=master.sweep.resume)
    try:
        with _shared_start(master, len(cells), screen) as shared_start:
            runner = CellRunner(sweep.context, screen, shared_start, agent_command)
            returns = [done for run in runs if (done := runner.run_if_free(run)) is not None]
    except (InterruptedRunError, KeyboardInterrupt, OSError):
        screen.show_interrupted()
        raise
    screen.show_comparison()
    if any(record.status in FAILURES for record in screen.records):
        raise SweepFailedError
    return returns


def _shared_start(master: DictConfig, cells: int, screen: Screen) -> AbstractContextManager[SharedStart | None]:
    """Return the start-up that the runs of a sweep share, if ``sweep.shared_start`` is set. A single run has none."""
    return SharedStart(screen.print) if master.sweep.shared_start and cells > 1 else nullcontext()


@dataclass(frozen=True)
class LocalTrials(TrialLauncher):
    """Launcher of the trials of ``distexp choose`` on this machine, one after the other.

    Attributes:
        context: Hydra's configuration loader and callbacks.
        label: Returns the name of a configuration.
        agent_command: Returns the command of an agent.
    """

    context: HydraContext
    label: Callable[[Config], str]
    agent_command: AgentCommand

    @contextmanager
    def runner(self, sweep_dir: Path, console: Console) -> Iterator[TrialRunner]:
        """Yield the runner of trials. The libraries are imported once for all of them."""
        labels: dict[int, str] = {}
        screen = TrialScreen(sweep_dir, console, labels)

        def run_all(runs: Sequence[AssignedRun], after_each: Callable[[], None]) -> None:
            for run in runs:
                labels[run.info.number] = "" if run.cell.config is None else self.label(run.cell.config)
                runner.run_if_free(run)
                after_each()

        with continue_after_hangup(sweep_dir), SharedStart(screen.log) as shared_start:
            runner = CellRunner(self.context, screen, shared_start, self.agent_command)
            yield TrialRunner(run_all, package_git_state())
