"""Conversion of Hydra's submitit options to options of ``cluster``.

Hydra's submitit launcher has its options under ``hydra.launcher``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from distexp.config import ClusterConfig, ConfigError
from distexp.config.override_text import key_of

MAPPED = {
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
"""Keys of ``hydra.launcher`` with their keys of ``cluster``."""

SBATCH_ONLY = {
    "name": "job-name",
    "comment": "comment",
    "exclude": "exclude",
    "gres": "gres",
    "cpus_per_gpu": "cpus-per-gpu",
    "gpus_per_task": "gpus-per-task",
    "mem_per_gpu": "mem-per-gpu",
    "mem_per_cpu": "mem-per-cpu",
}
"""Keys of ``hydra.launcher`` that become entries of ``cluster.sbatch``."""

UNSUPPORTED = {
    "submitit_folder": "the logs of the jobs are in slurm/ of the sweep's directory",
    "max_num_timeout": "use cluster.requeue=true or false",
}
"""Keys of ``hydra.launcher`` that are refused, with a hint."""

ACCEPTED = (("tasks_per_node", 1), ("stderr_to_stdout", True))
"""Values that agree with what distexp does anyway."""


def apply_submitit_options(given: Mapping[str, Any], composed: DictConfig, overrides: Sequence[str]) -> None:
    """Move the options under ``hydra.launcher`` into the ``cluster`` section.

    Args:
        given: The options under ``hydra.launcher``.
        composed: The composed configuration of the cell; changed in place.
        overrides: The overrides of the cell.

    Raises:
        ConfigError: If an option contradicts ``cluster``, or is not supported.
    """
    overridden = {key_of(text) for text in overrides}
    errors: list[str] = []
    with open_dict(composed):
        for key, value in given.items():
            errors += _apply(composed.cluster, key, value, overridden)
    if errors:
        raise ConfigError(errors)


def _apply(cluster: DictConfig, key: str, value: Any, overridden: set[str]) -> list[str]:
    """Apply one option, and return its errors."""
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
