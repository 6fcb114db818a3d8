"""Checks of the chosen options: targets that may be imported, and keys that the options have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from distexp.config import ClusterConfig, Config
from distexp.config.cluster_section import sbatch_name
from distexp.config.field_info import info_of
from distexp.config.model_checks import model_errors, unused_key_errors
from distexp.config.targets import check_target

KEYS_OF_SBATCH_OPTIONS = {
    "array": "cluster.array_parallelism",
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes",
    "ntasks-per-node": "cluster.workers_per_node",
    "gpus-per-node": "cluster.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_worker",
    "mem": "cluster.memory_gb",
    "time": "cluster.timeout_min",
    "partition": "cluster.partition",
    "constraint": "cluster.constraint",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "reservation": "cluster.reservation",
    "exclusive": "cluster.exclusive",
    "signal": "cluster.signal_delay_s",
    "requeue": "cluster.requeue",
    "chdir": None,
    "output": None,
    "error": None,
    "open-mode": None,
}
"""Options of sbatch that distexp sets, with the keys that change them; None if no key does."""


KEYS_OF_VARIABLES = {"OMP_NUM_THREADS": "cluster.cpus_per_worker", "DS_ACCELERATOR": "cluster.device"}
"""Environment variables of the workers that distexp sets, with the keys that change them."""


def check_targets(config: Config) -> Iterator[str]:
    """Yield an error for each ``_target_`` in a package that the user does not trust."""
    sections = (config.model, config.dataset, config.strategy, config.engine, config.tracker)
    for target in filter(None, (section._target_ for section in sections)):
        error = check_target(target, config.trusted_packages)
        if error:
            yield error


def check_model_keys(config: Config) -> list[str]:
    """Return the errors of the model section."""
    return model_errors(config.model)


def check_dataset_keys(config: Config) -> list[str]:
    """Return an error for each key that the dataset does not have."""
    return unused_key_errors("dataset", config.dataset)


def check_cluster_keys(config: Config) -> Iterator[str]:
    """Yield an error for each cluster key that the launcher ignores, or that contradicts another one."""
    cluster = config.cluster
    if cluster.launcher == "local":
        yield from _slurm_only_errors(cluster)
    yield from _sbatch_errors(cluster)
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"cluster.environment sets {name!r}, which is not a variable name: use letters, digits and _"
        elif name in KEYS_OF_VARIABLES:
            yield f"cluster.environment may not set {name}: set {KEYS_OF_VARIABLES[name]} instead"


def _sbatch_errors(cluster: ClusterConfig) -> Iterator[str]:
    """Yield an error for each option of sbatch that distexp sets itself."""
    for option in cluster.sbatch:
        name = sbatch_name(option)
        if name in KEYS_OF_SBATCH_OPTIONS:
            key = KEYS_OF_SBATCH_OPTIONS[name]
            yield f"cluster.sbatch may not set {option}: " + (f"set {key} instead" if key else "distexp sets it")


def _slurm_only_errors(cluster: ClusterConfig) -> Iterator[str]:
    """Yield an error for each key that is set and that only Slurm uses."""
    defaults = ClusterConfig()
    for spec in fields(ClusterConfig):
        value = getattr(cluster, spec.name)
        if info_of(spec).slurm_only and value != getattr(defaults, spec.name):
            yield f"cluster.{spec.name}={value} is for Slurm only: leave it out, or choose cluster=slurm"
