"""The sbatch file of one shape: an array of runs that ask for the same, and a task a node in each."""

from __future__ import annotations

import json
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distexp.config import ClusterConfig, Config

FOLDER = "slurm"
"""Where in a sweep's directory the sbatch files, the lists of their runs and the jobs' own logs are."""

TASK = "distexp.launch.slurm.node_task"
CPU_OPTIONS = ("cpus-per-gpu",)
EXIT_SETUP = 1


@dataclass(frozen=True)
class Array:
    """Runs of one shape, submitted together: element k of the array is ``directories[k]``."""

    name: str
    config: Config  # of any of them: they ask for the same
    sweep_dir: Path
    snapshot: Path
    directories: tuple[str, ...]  # relative to the sweep's

    @property
    def list_path(self) -> Path:
        """What a job finds its run in."""
        return self.sweep_dir / FOLDER / f"{self.name}.json"

    @property
    def script_path(self) -> Path:
        """The sbatch file."""
        return self.sweep_dir / FOLDER / f"{self.name}.sbatch"

    def text(self) -> str:
        """The sbatch file, written by submitit, which knows how its options are spelt and quoted."""
        from submitit.slurm.slurm import _make_sbatch_string

        cluster = self.config.cluster
        text: str = _make_sbatch_string(
            command=f"{cluster.python or shlex.quote(sys.executable)} -u -m {TASK} {shlex.quote(str(self.list_path))}",
            folder=self.sweep_dir / FOLDER,
            map_count=len(self.directories),
            array_parallelism=cluster.array_parallelism or len(self.directories),
            job_name=self.config.name,
            nodes=cluster.nodes,
            ntasks_per_node=1,
            partition=cluster.partition,
            constraint=cluster.constraint,
            account=cluster.account,
            qos=cluster.qos,
            exclusive=cluster.exclusive or None,
            time=math.ceil(cluster.timeout_min) if cluster.timeout_min else None,
            gpus_per_node=cluster.gpus_per_node or None,
            cpus_per_task=cores(cluster),
            mem=memory(cluster),
            signal_delay_s=cluster.signal_delay_s,
            stderr_to_stdout=True,
            wckey=None,
            setup=before(cluster, self.snapshot),
            srun_args=srun_options(cluster),
            additional_parameters=further(cluster, self.snapshot),
        )
        return text


def shape(config: Config) -> str:
    """Equal for two runs exactly where their jobs ask for the same."""
    return json.dumps(Array("", config, Path(), Path(), ("",)).text())


def cores(cluster: ClusterConfig) -> int | None:
    """CPUs of a node's task, which are those of all its workers; None where sbatch is told otherwise."""
    assert cluster.cpus_per_worker is not None
    assert cluster.workers_per_node is not None
    if any(option in cluster.sbatch for option in CPU_OPTIONS):
        return None
    return cluster.cpus_per_worker * cluster.workers_per_node


def memory(cluster: ClusterConfig) -> str | None:
    """Memory of a node; all of it (0) where the node is ours alone and nothing else was said."""
    if cluster.memory_gb is None:
        return "0" if cluster.exclusive else None
    return f"{math.ceil(cluster.memory_gb * 1024)}M"


def further(cluster: ClusterConfig, snapshot: Path) -> dict[str, Any]:
    """Options that submitit has no name for, and the user's own."""
    options: dict[str, Any] = {"chdir": str(snapshot), "requeue" if cluster.requeue else "no-requeue": True}
    if cluster.reservation is not None:
        options["reservation"] = cluster.reservation
    own = {key.lstrip("-").replace("_", "-"): value for key, value in cluster.sbatch.items()}
    return options | {key: value for key, value in own.items() if value is not False and value is not None}


def srun_options(cluster: ClusterConfig) -> list[str]:
    """How the tasks start: since Slurm 22.05 srun does not take the cores over from sbatch by itself."""
    options = ["--kill-on-bad-exit=1"]
    if (count := cores(cluster)) is not None:
        options.append(f"--cpus-per-task={count}")
    if cluster.exclusive:
        options.append("--cpu-bind=none")  # the node is ours, beyond the cores that were counted
    if cluster.device == "cuda":
        options.append("--gpu-bind=none")  # a node's task sees all of the node's GPUs, and its workers share them
    return [*options, *cluster.srun]


def before(cluster: ClusterConfig, snapshot: Path) -> list[str]:
    """Shell lines of a job: modules, the user's own, variables, and the code that was on disk at submission."""
    failed = f'|| {{ echo "distexp: the job could not be set up" >&2; exit {EXIT_SETUP}; }}'
    lines = []
    if cluster.modules:
        lines.append("command -v module > /dev/null || source /etc/profile")
        lines.append(f"module load {shlex.join(cluster.modules)} {failed}")
    lines += cluster.setup
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in cluster.environment.items()]
    lines.append(f"export PYTHONPATH={shlex.quote(str(snapshot))}${{PYTHONPATH:+:$PYTHONPATH}}")
    return lines
