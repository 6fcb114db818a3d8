"""Runs of a sweep on this machine, one after the other, then a table; and the trials of ``distexp choose``."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, env_override
from hydra.types import HydraContext
from rich.console import Console

from distexp.compose.composition import Cell
from distexp.config import Config, ConfigError
from distexp.hardware.facts import facts
from distexp.launch.launcher import Sweep, TrialLauncher, TrialRunner
from distexp.launch.local.launcher import continue_after_hangup
from distexp.launch.local.runner import AgentCommand
from distexp.launch.local.shared_start import SharedStart
from distexp.launch.run_dirs import AssignedRun, locked_sweep_dir, package_git_state
from distexp.runs.record import RunSpec
from distexp.runs.record_sections import RunInfo
from distexp.system.cache_dir import check_configured_cache
from distexp.system.cgroups import usable_memory
from distexp.system.processes import handle_signals
from distexp.system.units import MIB, format_memory


def run_sweep(sweep: Sweep, agent_command: AgentCommand) -> list[JobReturn]:
    """Run every cell, even if others fail. Raise what ``run_cells`` and the checks raise."""
    check_configured_cache()
    cells, master = sweep.cells, sweep.master
    if not master.sweep.resume:  # An invalid cell would match no run that the sweep has already.
        refuse_too_many_processes(cells)
    # Several cells may have the same random weights, which are kept in memory between the runs.
    seeded = [f"{cell.config.model} {cell.config.train.seed}" for cell in cells if cell.config is not None]
    with SharedStart(shares_weights=len(set(seeded)) < len(seeded)) as shared_start:
        if not master.sweep.resume:  # All of its cells may be done.
            # The imports of the first valid cell start before its run is prepared, with the environment of a Hydra job.
            first = next((cell for cell in cells if cell.config is not None), None)
            if first is not None and (config := first.config) is not None:
                with env_override(dict(master.hydra.job.env_set)):
                    shared_start.prepare(RunSpec(config, RunInfo(first.id, config.name, 0, [])))
        # What shows the runs is imported while the libraries of the workers are.
        from distexp.launch.local.runner import run_cells

        with locked_sweep_dir(master, len(cells)) as sweep_dir, continue_after_hangup(sweep_dir):
            return run_cells(sweep, sweep_dir, shared_start, agent_command)


@dataclass(frozen=True)
class LocalTrials(TrialLauncher):
    """Launcher of the trials of ``distexp choose`` on this machine, one after the other."""

    context: HydraContext
    label: Callable[[Config], str]
    agent_command: AgentCommand

    @contextmanager
    def runner(self, sweep_dir: Path, console: Console) -> Iterator[TrialRunner]:
        """Yield the runner of trials. The libraries are imported once for all of them."""
        from distexp.console.screen import TrialScreen
        from distexp.launch.local.runner import CellRunner, stop_at_once

        check_configured_cache()
        labels: dict[int, str] = {}
        screen = TrialScreen(sweep_dir, console, labels)

        def run_all(runs: Sequence[AssignedRun], after_each: Callable[[], None]) -> None:
            for run in runs:
                labels[run.info.number] = "" if run.cell.config is None else self.label(run.cell.config)
                runner.run_if_free(run)
                after_each()

        stopping = handle_signals(stop_at_once, signal.SIGTERM)  # between two trials
        with continue_after_hangup(sweep_dir), stopping, SharedStart() as shared_start:
            shared_start.note = screen.log
            runner = CellRunner(self.context, screen, shared_start, self.agent_command)
            yield TrialRunner(run_all, package_git_state())


def refuse_too_many_processes(cells: Sequence[Cell]) -> None:
    """Make cells invalid whose processes alone need more memory than this machine has. The values are lower bounds.

    Without this check the kernel ends processes, also those of other programs. Raise ConfigError for a single cell.
    """
    memory_mib = usable_memory() / MIB
    for cell in cells:
        if cell.config is not None and (error := process_memory_error(cell.config, memory_mib)):
            cell.invalidate(error)
    if len(cells) == 1 and cells[0].errors:
        raise ConfigError(cells[0].errors)


def process_memory_error(config: Config, memory_mib: float) -> str | None:
    """Return why the processes of a local run do not fit into the memory of this machine; None if they fit."""
    cluster, processes = config.cluster, facts().processes
    workers = cluster.workers_per_node or 1

    def node_mib(workers: int) -> float:  # before any model
        return processes.started_node_mib + workers * processes.started_worker_mib

    if cluster.nodes * node_mib(workers) <= memory_mib:
        return None
    total = cluster.nodes * workers
    needed, available = format_memory(cluster.nodes * node_mib(workers)), format_memory(memory_mib)
    advice = "use a larger machine"
    for per_node in (1, workers):  # The most nodes that fit, better with as many workers each than with one.
        if nodes := int(memory_mib // node_mib(per_node)):
            fewer = "" if per_node == workers else f" cluster.workers_per_node={per_node}"
            advice = f"use at most cluster.nodes={nodes}{fewer}"
    return (
        f"cluster.nodes={cluster.nodes} x cluster.workers_per_node={workers} starts {total} workers on this "
        f"machine. Their processes need at least {needed} without any model, but it has {available}: "
        f"{advice}, or cluster=slurm on a cluster"
    )
