"""The sbatch file of a job array, whose runs have equal resources, and the options of Hydra's submitit launcher."""

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from distexp.config import ClusterConfig, Config, ConfigError
from distexp.config.overrides import key_of, sbatch_name
from distexp.runs.run_dir import SLURM


@dataclass(frozen=True)
class JobArray:
    """Runs with equal resources, submitted together. Array element k runs ``directories[k]``."""

    name: str
    config: Config  # of any of the runs: their resources are equal
    sweep_dir: Path
    snapshot: Path
    directories: tuple[str, ...]  # relative to sweep_dir

    def path(self, suffix: str) -> Path:
        """Return the sbatch file (``sbatch``), or the file that lists the run directories (``json``)."""
        return self.sweep_dir / SLURM / f"{self.name}.{suffix}"

    def render(self) -> str:
        """Return the text of the sbatch file."""
        cluster = self.config.cluster
        python, task = cluster.python or shlex.quote(sys.executable), "distexp.launch.slurm.node_task"
        memory = "0" if cluster.exclusive else None  # The default of an exclusive node is all of its memory.
        if cluster.memory_gb is not None:
            memory = f"{math.ceil(cluster.memory_gb * 1024)}M"
        return render_sbatch(
            command=f"{python} -u -m {task} {shlex.quote(str(self.path('json')))}",
            folder=self.sweep_dir / SLURM,
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
            cpus_per_task=cpus_per_task(cluster),
            mem=memory,
            signal_delay_s=cluster.signal_delay_s,
            stderr_to_stdout=True,
            wckey=None,
            setup=setup_lines(cluster, self.snapshot),
            srun_args=srun_options(cluster),
            additional_parameters=extra_options(cluster, self.snapshot),
        )


def render_sbatch(**options: Any) -> str:
    """Return an sbatch file written by submitit, which knows the spelling and the quoting of sbatch's options.

    This is the only use of a private function of submitit; pyproject.toml therefore limits its version.
    """
    from submitit.slurm.slurm import _make_sbatch_string

    text: str = _make_sbatch_string(**options)
    return text


def resource_key(config: Config) -> str:
    """Return a key that is equal for runs whose jobs request the same."""
    return JobArray("", config, Path(), Path(), ("",)).render()


def cpus_per_task(cluster: ClusterConfig) -> int | None:
    """Return the CPUs of a node's task, for all its workers; None if an option in ``cluster.sbatch`` decides."""
    assert cluster.cpus_per_worker is not None
    assert cluster.workers_per_node is not None
    if "cpus-per-gpu" in map(sbatch_name, cluster.sbatch):
        return None
    return cluster.cpus_per_worker * cluster.workers_per_node


def extra_options(cluster: ClusterConfig, snapshot: Path) -> dict[str, Any]:
    """Return the sbatch options that submitit has no parameter for, with those of ``cluster.sbatch``."""
    options: dict[str, Any] = {"chdir": str(snapshot), "requeue" if cluster.requeue else "no-requeue": True}
    if cluster.reservation is not None:
        options["reservation"] = cluster.reservation
    user = {sbatch_name(key): value for key, value in cluster.sbatch.items()}
    return options | {key: value for key, value in user.items() if value is not False and value is not None}


def srun_options(cluster: ClusterConfig) -> list[str]:
    """Return the options of srun."""
    options = ["--kill-on-bad-exit=1"]
    if (count := cpus_per_task(cluster)) is not None:  # Since Slurm 22.05 srun does not inherit it from sbatch.
        options.append(f"--cpus-per-task={count}")
    if cluster.exclusive:
        options.append("--cpu-bind=none")  # allow all CPUs of an exclusive node, not only the requested ones
    if cluster.device == "cuda":
        options.append("--gpu-bind=none")  # a node's task distributes all GPUs of the node over its workers
    return [*options, *cluster.srun]


def setup_lines(cluster: ClusterConfig, snapshot: Path) -> list[str]:
    """Return the shell lines before srun: modules, ``cluster.setup``, variables and the path of the code."""
    on_error = '|| { echo "distexp: module load failed" >&2; exit 1; }'
    lines = []
    if cluster.modules:
        lines.append("command -v module > /dev/null || source /etc/profile")
        lines.append(f"module load {shlex.join(cluster.modules)} {on_error}")
    lines += cluster.setup
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in cluster.environment.items()]
    lines.append(f"export PYTHONPATH={shlex.quote(str(snapshot))}${{PYTHONPATH:+:$PYTHONPATH}}")
    return lines


# Conversion of the options of Hydra's submitit launcher, under ``hydra.launcher``, to options of ``cluster``.

SAME_KEYS = (
    *("nodes", "timeout_min", "gpus_per_node", "partition", "qos", "constraint", "account"),
    *("signal_delay_s", "array_parallelism", "setup"),
)
MAPPED = {"mem_gb": "memory_gb", **dict(zip(SAME_KEYS, SAME_KEYS, strict=True))}
"""Keys of ``hydra.launcher`` with their keys of ``cluster``."""

SAME_OPTIONS = ("comment", "exclude", "gres", "cpus_per_gpu", "gpus_per_task", "mem_per_gpu", "mem_per_cpu")
SBATCH_ONLY = {"name": "job-name", **{key: key.replace("_", "-") for key in SAME_OPTIONS}}
"""Keys of ``hydra.launcher`` that become entries of ``cluster.sbatch``."""

UNSUPPORTED = {
    "submitit_folder": "the logs of the jobs are in slurm/ of the sweep's directory",
    "max_num_timeout": "use cluster.requeue=true or false",
}
"""Keys of ``hydra.launcher`` that are refused, with a hint."""

ACCEPTED = (("tasks_per_node", 1), ("stderr_to_stdout", True))
"""Values that agree with what distexp does anyway."""


def apply_submitit_options(given: Mapping[str, Any], composed: DictConfig, overrides: Sequence[str]) -> None:
    """Move options of ``hydra.launcher`` to ``cluster``. Raise ConfigError if one contradicts it or is unsupported."""
    overridden = {key_of(text) for text in overrides}
    errors: list[str] = []
    with open_dict(composed):
        for key, value in given.items():
            errors += _apply(composed.cluster, key, value, overridden)
    if errors:
        raise ConfigError(errors)


def _apply(cluster: DictConfig, key: str, value: Any, overridden: set[str]) -> list[str]:
    if key in MAPPED:
        return _set_cluster(cluster, MAPPED[key], key, value, overridden)
    if key in SBATCH_ONLY:
        return _set_sbatch(cluster.sbatch, SBATCH_ONLY[key], key, value)
    if key == "additional_parameters":
        return [
            error
            for option, setting in value.items()
            for error in _set_sbatch(cluster.sbatch, option.replace("_", "-"), f"{key}.{option}", setting)
        ]
    if key == "cpus_per_task":
        return _set_cpus(cluster, value, overridden)
    if (key, value) in ACCEPTED:
        return []
    hint = UNSUPPORTED.get(key, "remove it (distexp starts one task per node, which writes one log file)")
    return [f"hydra.launcher.{key}={value} is not supported: {hint}"]


def _set_cluster(cluster: DictConfig, name: str, key: str, value: Any, overridden: set[str]) -> list[str]:
    section = OmegaConf.to_container(cluster)
    assert isinstance(section, dict)
    current, default = section[name], getattr(ClusterConfig(), name)
    if current != value and (current != default or f"cluster.{name}" in overridden):
        return [f"hydra.launcher.{key}={value} contradicts cluster.{name}={current}: set only cluster.{name}"]
    cluster[name] = value
    return []


def _set_cpus(cluster: DictConfig, cpus: int, overridden: set[str]) -> list[str]:
    workers = cluster.workers_per_node or cluster.gpus_per_node or 1
    if cpus % workers:
        return [
            f"hydra.launcher.cpus_per_task={cpus} is not divisible by cluster.workers_per_node={workers}: "
            "set cluster.cpus_per_worker instead"
        ]
    return _set_cluster(cluster, "cpus_per_worker", "cpus_per_task", cpus // workers, overridden)


def _set_sbatch(sbatch: DictConfig, option: str, key: str, value: Any) -> list[str]:
    if sbatch.get(option, value) != value:
        return [
            f"hydra.launcher.{key}={value} contradicts cluster.sbatch.{option}={sbatch[option]}: remove one of the two"
        ]
    sbatch[option] = value
    return []
