"""Launcher for this machine: runs start one after the other, each with an agent for every simulated node."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distexp.config import Config
from distexp.guard.sweep_files import is_own_file
from distexp.launch.launcher import Cancelled, Launcher, Sweep, TrialLauncher
from distexp.resolve.resources import needs_one_worker
from distexp.runs.run_dir import COMMAND
from distexp.runs.run_state import RunState, dead_launcher, local_state
from distexp.runs.spec import ExistingRun
from distexp.system.cgroups import cpu_count, visible_gpus

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

CPU_WORKERS = 2


class LocalLauncher(Launcher):
    """Launcher of ``cluster=local``. A subclass may start the agents in another way (``agent_command``)."""

    runs_here = True

    def agent_command(self, config: Config, arguments: Sequence[str]) -> list[str]:
        """Return the command that starts the agent of a node, from arguments for Python.

        The agent must be this process, or get its signals.
        """
        return [sys.executable, *arguments]

    def decide_resources(self, config: Config) -> list[str]:
        """Decide what the user left open, for the GPUs and the cores of this machine."""
        cluster, gpus = config.cluster, visible_gpus()
        if cluster.device == "auto":
            cluster.device = "cuda" if gpus or config.is_prediction else "cpu"
        on_gpu = cluster.device == "cuda"
        if cluster.workers_per_node is None:
            available = (len(gpus) if on_gpu else CPU_WORKERS) // cluster.nodes
            cluster.workers_per_node = 1 if needs_one_worker(config) else max(1, available)
        if cluster.cpus_per_worker is None:
            # Simulated nodes share the cores of one machine. Tiny models need one thread only. Then runs with different
            # numbers of workers have the same number of threads per worker, and their speeds can be compared.
            tiny = config.scale.name == "tiny" and not on_gpu
            cluster.cpus_per_worker = 1 if tiny else max(1, cpu_count() // cluster.world_size)
        return _gpu_errors(config)

    def start(self, sweep: Sweep) -> list[JobReturn]:
        """Run every cell, even if others fail."""
        from distexp.launch.local.sweep import run_sweep

        return run_sweep(sweep, self.agent_command)

    def trials(self, sweep: Sweep, label: Callable[[Config], str]) -> TrialLauncher:
        """Return what runs trials one after the other."""
        from distexp.launch.local.sweep import LocalTrials

        return LocalTrials(sweep.context, label, self.agent_command)

    def states(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> list[RunState]:
        """Return the states of runs, from their files and processes."""
        _finalize_dead_runs(sweep_dir, runs)
        return [local_state(run) for run in runs]

    def cancel(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> Cancelled:
        """End the commands that run these runs. Each ends its workers, writes the record, and starts no other run."""
        from distexp.launch.local.cancel import cancel_local

        _finalize_dead_runs(sweep_dir, runs)
        return cancel_local(sweep_dir, runs)


def _finalize_dead_runs(sweep_dir: Path, runs: Sequence[ExistingRun]) -> None:
    """Write the records of runs whose launcher and agent died together, in a sweep that this user has started.

    That of another user may name code of a strategy, which would be imported.
    """
    dead = [(run.directory, pid) for run in runs if (pid := dead_launcher(run)) is not None]
    if not dead or not is_own_file(sweep_dir / COMMAND):
        return
    from distexp.launch.outcome import finalize_dead_run

    for directory, pid in dead:
        finalize_dead_run(directory, pid)


def _gpu_errors(config: Config) -> list[str]:
    """Return an error if this machine has too few GPUs. A prediction is for GPUs that it need not have."""
    cluster, gpus = config.cluster, visible_gpus()
    if config.is_prediction or cluster.device != "cuda":
        return []
    if not gpus:
        return ["cluster.device=cuda needs a GPU, but this machine has none: choose cluster.device=cpu"]
    if cluster.world_size > len(gpus):
        return [
            f"cluster.nodes={cluster.nodes} x cluster.workers_per_node={cluster.workers_per_node} needs "
            f"{cluster.world_size} GPUs, but this machine has {len(gpus)}: lower one of them, or choose "
            "cluster.device=cpu"
        ]
    return []
