"""Launcher of ``cluster=slurm``: each run is an element of a job array, with a task on each node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from distexp.config import ClusterConfig, Config
from distexp.config.overrides import sbatch_name
from distexp.launch import run_dirs
from distexp.launch.launcher import Cancelled, Launcher, Sweep, TrialLauncher
from distexp.resolve.resources import needs_one_worker
from distexp.runs.record import ExistingRun
from distexp.runs.run_state import RunState

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from rich.console import Console

GPU_OPTIONS = frozenset({"gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"})
CPUS_PER_WORKER = 4
"""As in the scripts of the workshop. The nodes of a cluster have at least as many cores per GPU."""

SAME_OPTIONS = ("nodes", "partition", "constraint", "account", "qos", "reservation", "exclusive", "requeue")
KEYS_OF_SBATCH_OPTIONS = {
    **{option: f"cluster.{option}" for option in SAME_OPTIONS},
    "array": "cluster.array_parallelism",
    "ntasks": "cluster.nodes",
    "ntasks-per-node": "cluster.workers_per_node",
    "gpus-per-node": "cluster.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_worker",
    "mem": "cluster.memory_gb",
    "time": "cluster.timeout_min",
    "signal": "cluster.signal_delay_s",
    **dict.fromkeys(("chdir", "output", "error", "open-mode")),
}
"""Options of sbatch that distexp sets, with the keys that change them; None if no key does."""


class SlurmLauncher(Launcher):
    """Launcher of ``cluster=slurm``. This machine is not inspected, because the jobs run on others."""

    queues = True
    reads = frozenset(spec.name for spec in fields(ClusterConfig))

    def adjust(self, options: Mapping[str, Any], composed: DictConfig, overrides: Sequence[str]) -> None:
        """Move the options of Hydra's submitit launcher into the ``cluster`` section."""
        from distexp.launch.slurm.script import apply_submitit_options

        apply_submitit_options(options, composed, overrides)

    def key_errors(self, config: Config) -> Iterator[str]:
        """Yield an error for each option that distexp sets itself, and for a setting of local sweeps."""
        yield from super().key_errors(config)
        gpus, option = config.cluster.gpus_per_node, gpu_option(config.cluster)
        if gpus is not None and option is not None:
            request = f"cluster.sbatch.{option}={config.cluster.sbatch[option]}"
            yield f"cluster.gpus_per_node={gpus} and {request} both request GPUs: leave one of them out"
        for option in config.cluster.sbatch:
            name = sbatch_name(option)
            if name in KEYS_OF_SBATCH_OPTIONS:
                key = KEYS_OF_SBATCH_OPTIONS[name]
                yield f"cluster.sbatch may not set {option}: " + (f"set {key} instead" if key else "distexp sets it")

    def decide_resources(self, config: Config) -> list[str]:
        """Decide what the user left open. A node has as many GPUs as workers."""
        cluster = config.cluster
        if cluster.device == "auto":
            cluster.device = "cuda"
        if cluster.workers_per_node is None:
            cluster.workers_per_node = 1 if needs_one_worker(config) else (cluster.gpus_per_node or 1)
        if cluster.gpus_per_node is None and cluster.device == "cuda" and gpu_option(cluster) is None:
            cluster.gpus_per_node = cluster.workers_per_node
        if cluster.cpus_per_worker is None:
            cluster.cpus_per_worker = CPUS_PER_WORKER
        gpus, workers = cluster.gpus_per_node, cluster.workers_per_node
        if cluster.device != "cuda" or gpus is None or gpus >= workers:
            return []
        return [
            f"cluster.gpus_per_node={gpus} is less than cluster.workers_per_node={workers}, but every worker needs a "
            "GPU: raise the first, lower the second, or choose cluster.device=cpu"
        ]

    def check(self) -> None:
        """Check that Slurm is configured on this machine, and answers."""
        from distexp.launch.slurm.slurm_sweep import max_array_size

        max_array_size()

    def start(self, sweep: Sweep) -> list[JobReturn]:
        """Submit every cell, and follow the runs unless ``cluster.wait=false``. The jobs run without Hydra."""
        from distexp.launch.slurm.slurm_sweep import start_sweep

        start_sweep(sweep, self.follow)
        return []

    def print_dry_run(self, sweep: Sweep) -> None:
        """Print the sbatch files."""
        from rich.console import Console

        from distexp.launch.slurm.slurm_sweep import print_scripts

        print_scripts(sweep.cells, Path(sweep.master.hydra.sweep.dir).absolute(), Console())

    def trials(self, sweep: Sweep, label: Callable[[Config], str]) -> TrialLauncher:
        """Return what submits a job array for each batch of trials."""
        from distexp.launch.slurm.slurm_sweep import SlurmTrials, max_array_size, trusted_packages

        submits_nothing = sweep.master.choose.dry_run or sweep.cells[0].composed.cluster.dry_run
        return SlurmTrials(0 if submits_nothing else max_array_size(), trusted_packages(sweep.cells))

    def claimed(self, sweep_dir: Path) -> Collection[int]:
        """Return the numbers of the runs in the ledger."""
        return run_dirs.latest(sweep_dir).keys()

    def states(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> list[RunState]:
        """Return the states of all runs in the ledger."""
        from distexp.launch.slurm.status import poll

        return poll(sweep_dir)

    def cancel(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> Cancelled:
        """Cancel the jobs of all runs in the ledger."""
        from distexp.launch.slurm.slurm_sweep import cancel_jobs

        return cancel_jobs(sweep_dir)

    def follow(self, sweep_dir: Path, console: Console) -> None:
        """Show the runs until the last has ended. The records of finished ones are read once."""
        from distexp.launch.queued_runs import follow
        from distexp.launch.slurm.status import FinishedRuns, poll

        finished: FinishedRuns = {}
        follow(lambda: poll(sweep_dir, finished), len(self.claimed(sweep_dir)), sweep_dir, console)


def gpu_option(cluster: ClusterConfig) -> str | None:
    """Return the user's own option of sbatch that requests GPUs, as ``gres=gpu:4``. A second request may differ."""
    for option, value in cluster.sbatch.items():
        name = sbatch_name(option)
        if name in GPU_OPTIONS or (name == "gres" and "gpu" in str(value)):
            return option
    return None
