"""Runs of cells on this machine. Each is a Hydra job, with Hydra's callbacks and its ``.hydra/`` folder."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, run_job
from hydra.types import HydraContext

from distexp.console.screen import Screen
from distexp.exceptions import InterruptedRunError, SweepFailedError
from distexp.launch.assigned_runs import AssignedRun, ExistingRunRules, assign_run_dirs, write_invalid
from distexp.launch.git_state import package_git_state
from distexp.launch.launcher import Sweep
from distexp.launch.local.crowded_cores import crowded_core_warnings
from distexp.launch.local.run import AgentCommand, run_locally
from distexp.launch.local.shared_start import SharedStart
from distexp.runs.command_text import format_override
from distexp.runs.existing import DONE
from distexp.runs.failure_text import join_errors
from distexp.runs.full_disk import name_folder, release_reserve
from distexp.runs.owner import wait_for_agent
from distexp.runs.record import FAILURES, RunRecord
from distexp.runs.run_dir import RECORD
from distexp.runs.run_lock import run_lock
from distexp.runs.spec import RunSpec


def run_cells(sweep: Sweep, sweep_dir: Path, shared_start: SharedStart, agent_command: AgentCommand) -> list[JobReturn]:
    """Run every cell, even if others fail, and show a table.

    Raises:
        SweepFailedError: at the end, if a run failed.
        InterruptedRunError: if a run was interrupted. The cells after it are not started.
    """
    cells = sweep.cells
    for warning in crowded_core_warnings(cell.config for cell in cells if cell.config is not None):
        print(f"distexp: warning: {warning}", file=sys.stderr)
    invalid = [join_errors(cell.errors) for cell in cells if cell.config is None]
    screen = Screen(total=len(cells), sweep_dir=sweep_dir, invalid=invalid)
    shared_start.note = screen.print
    rules = ExistingRunRules(should_skip=lambda run: show_if_done(screen, run.directory), warn=screen.print)
    runs = assign_run_dirs(cells, sweep_dir, package_git_state(), rules, resume=sweep.master.sweep.resume)
    try:
        runner = CellRunner(sweep.context, screen, shared_start, agent_command)
        returns = [done for run in runs if (done := runner.run_if_free(run)) is not None]
    except (InterruptedRunError, KeyboardInterrupt, OSError):
        screen.show_interrupted()
        raise
    screen.show_comparison()
    if any(record.status in FAILURES for record in screen.records):
        raise SweepFailedError
    return returns


@dataclass(frozen=True)
class CellRunner:
    """Runner of cells.

    Attributes:
        context: Hydra's configuration loader and callbacks.
        screen: What shows the runs.
        shared_start: Processes from which the workers are forked.
        agent_command: Returns the command of an agent.
    """

    context: HydraContext
    screen: Screen
    shared_start: SharedStart
    agent_command: AgentCommand

    def run_if_free(self, run: AssignedRun) -> JobReturn | None:
        """Run a cell, unless another command runs it or has just finished it."""
        with run_lock(run.directory) as other:
            owner = other or wait_for_agent(run.directory)
            if owner is not None:
                self.screen.show_busy(run.info.number, owner)
                return None
            if show_if_done(self.screen, run.directory):
                return None
            with name_folder(run.directory):
                return self._run_job(run)

    def _run_job(self, run: AssignedRun) -> JobReturn:
        failures: list[OSError] = []

        def task(_: Any) -> str | None:
            try:
                return self._run(run).status
            except OSError as error:  # Hydra would print a line about it.
                failures.append(error)
                return None

        done = run_job(
            hydra_context=self.context,
            task_function=task,
            config=run.composed,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if failures:
            with suppress(OSError):  # The first error matters.
                release_reserve(run.directory)
            raise failures[0]
        done.return_value  # noqa: B018  # It raises what the task raised.
        done.cfg = done.hydra_cfg = None  # Thousands of configurations would fill the memory.
        return done

    def _run(self, run: AssignedRun) -> RunRecord:
        if run.cell.config is None:
            record = write_invalid(run)
            self.screen.show_invalid(record)
            return record
        self.screen.run_header(run.info.number, " ".join(map(format_override, run.cell.varied)))
        run.cell.write_prediction(run.directory)
        spec = RunSpec(run.cell.config, run.info)
        return run_locally(spec, run.directory, self.screen, self.shared_start, self.agent_command)


def show_if_done(screen: Screen, directory: Path) -> bool:
    """Show the run of a directory and return True, if it has a readable record and needs no further attempt."""
    try:
        record = RunRecord.read(directory / RECORD)
    except ValueError:
        return False
    if record.status in DONE:
        screen.show_skipped(record)
    return record.status in DONE
