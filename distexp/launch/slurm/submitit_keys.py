"""The keys that users of Hydra's submitit launcher know, brought into ``cluster``, or refused where both differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from distexp.config import ClusterConfig, ConfigError

SAME = {
    "nodes": "nodes",
    "timeout_min": "timeout_min",
    "gpus_per_node": "gpus_per_node",
    "mem_gb": "memory_gb",
    "partition": "partition",
    "qos": "qos",
    "constraint": "constraint",
    "account": "account",
    "signal_delay_s": "signal_delay_s",
    "array_parallelism": "array_parallelism",
    "setup": "setup",
}
"""Keys of ``hydra.launcher`` that have a key of ``cluster``."""

FURTHER = {
    "name": "job-name",
    "comment": "comment",
    "exclude": "exclude",
    "gres": "gres",
    "cpus_per_gpu": "cpus-per-gpu",
    "gpus_per_task": "gpus-per-task",
    "mem_per_gpu": "mem-per-gpu",
    "mem_per_cpu": "mem-per-cpu",
}
"""Those that are options of sbatch without one."""

REFUSED = {
    "submitit_folder": "the logs of the jobs are in slurm/ of the sweep's directory",
    "max_num_timeout": "cluster.requeue says whether Slurm may start a run anew",
}


def adopt(given: Mapping[str, Any], composed: DictConfig, overrides: Sequence[str]) -> None:
    """Moves what was set under ``hydra.launcher`` into a cell's ``cluster``.

    Raises:
        ConfigError: where the two say different things, or where a key cannot be followed.
    """
    typed = {text.partition("=")[0].lstrip("+") for text in overrides}
    errors: list[str] = []
    with open_dict(composed):
        for key, value in given.items():
            if key in SAME:
                errors += _set(composed.cluster, SAME[key], key, value, typed)
            elif key in FURTHER:
                errors += _further(composed.cluster.sbatch, FURTHER[key], key, value)
            elif key == "additional_parameters":
                for option, setting in value.items():
                    errors += _further(composed.cluster.sbatch, option.replace("_", "-"), f"{key}.{option}", setting)
            elif key == "cpus_per_task":
                errors += _threads(composed.cluster, value, typed)
            elif key in REFUSED:
                errors.append(f"hydra.launcher.{key}={value} is not followed: {REFUSED[key]}")
            elif (key, value) not in (("tasks_per_node", 1), ("stderr_to_stdout", True)):
                errors.append(
                    f"hydra.launcher.{key}={value} is not followed: one task a node starts the node's workers, and "
                    "what it prints goes to one file; leave it out"
                )
    if errors:
        raise ConfigError(errors)


def _set(cluster: DictConfig, name: str, key: str, value: Any, typed: set[str]) -> list[str]:
    present = OmegaConf.to_container(cluster)
    assert isinstance(present, dict)
    ours, unset = present[name], getattr(ClusterConfig(), name)
    if ours != value and (ours != unset or f"cluster.{name}" in typed):
        return [
            f"hydra.launcher.{key}={value} and cluster.{name}={ours} say different things: set cluster.{name} alone"
        ]
    cluster[name] = value
    return []


def _threads(cluster: DictConfig, cpus: int, typed: set[str]) -> list[str]:
    workers = cluster.workers_per_node or cluster.gpus_per_node or 1
    if cpus % workers:
        return [
            f"hydra.launcher.cpus_per_task={cpus} cannot be shared out among cluster.workers_per_node={workers}: "
            "set cluster.cpus_per_worker instead"
        ]
    return _set(cluster, "cpus_per_worker", "cpus_per_task", cpus // workers, typed)


def _further(sbatch: DictConfig, option: str, key: str, value: Any) -> list[str]:
    if sbatch.get(option, value) != value:
        return [
            f"hydra.launcher.{key}={value} and cluster.sbatch.{option}={sbatch[option]} say different things: "
            "leave one of them out"
        ]
    sbatch[option] = value
    return []
