"""Run of one cell on this machine, as a Hydra job: with Hydra's callbacks and its ``.hydra/`` folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, run_job
from hydra.types import HydraContext

from distexp.console.screen import Screen
from distexp.launch.assigned_runs import AssignedRun, write_invalid
from distexp.launch.local.run import AgentCommand, run_locally
from distexp.launch.local.shared_start import SharedStart
from distexp.runs.command_text import format_override
from distexp.runs.existing import DONE
from distexp.runs.full_disk import name_folder, release_reserve
from distexp.runs.owner import wait_for_agent
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD
from distexp.runs.run_lock import run_lock
from distexp.runs.spec import RunSpec


@dataclass(frozen=True)
class CellRunner:
    """Runner of cells.

    Attributes:
        context: Hydra's configuration loader and callbacks.
        screen: What shows the runs.
        shared_start: Start-up that the runs share; None if each imports the libraries itself.
        agent_command: Returns the command of an agent; None: this Python.
    """

    context: HydraContext
    screen: Screen
    shared_start: SharedStart | None = None
    agent_command: AgentCommand | None = None

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
