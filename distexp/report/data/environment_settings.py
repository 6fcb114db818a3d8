"""Hardware and environment settings.

They do not define a training, but repeats must share them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from distexp.config import ClusterConfig
from distexp.config.flatten import flatten
from distexp.report.data.setting_names import short_name
from distexp.runs.record import RunRecord

TRAINING_KEYS = frozenset({"nodes", "workers_per_node", "device"})
SUBMISSION_KEYS = frozenset(
    {"name", "_target_", "gpus_per_node", "timeout_min", "hang_timeout_min", "account", "qos", "reservation"}
    | {"signal_delay_s", "requeue", "array_parallelism", "wait", "dry_run"}
)
"""Keys of ``cluster`` that no metric depends on: how a job is submitted, and how long it may run."""

CLUSTER_KEYS = frozenset(field.name for field in fields(ClusterConfig)) - TRAINING_KEYS - SUBMISSION_KEYS
TRAIN_KEYS = frozenset({"checkpoint_every", "profile_steps", "micro_batch_search_s"})
SECTIONS = frozenset({"measure", "preflight", "tracker"})

GPU = "gpu"

IGNORED_VARIABLES = ("NCCL_VERSION", "NCCL_DEBUG")
"""Prefixes of environment variables that change nothing but the logs."""


def is_environment_key(key: str) -> bool:
    """Return whether a dotted key of the configuration is an environment setting."""
    section, _, rest = key.partition(".")
    keys = {"cluster": CLUSTER_KEYS, "train": TRAIN_KEYS}.get(section)
    return section in SECTIONS if keys is None else rest.partition(".")[0] in keys


def is_environment_setting(name: str) -> bool:
    """Return whether a short name is that of an environment setting."""
    head = name.partition(".")[0]
    return is_hardware(name) or head in CLUSTER_KEYS or head in TRAIN_KEYS or head in SECTIONS


def is_hardware(name: str) -> bool:
    """Return whether a setting is the GPU or an environment variable.

    A run that failed early may not know it.
    """
    return name == GPU or name.isupper()


def read_environment_settings(record: RunRecord) -> dict[str, Any]:
    """Return the environment settings of a run by short name."""
    environment = record.environment
    found = {short_name(key): value for key, value in flatten(record.config) if is_environment_key(key)}
    variables = environment.variables if environment else {}
    found |= {name: value for name, value in variables.items() if not name.startswith(IGNORED_VARIABLES)}
    return {GPU: environment.gpu_name if environment else None, **found}


def is_distinguishing(name: str, overridden: Collection[str]) -> bool:
    """Return whether an environment setting may distinguish runs.

    Hardware always does, a key only if a user set it.
    """
    return is_hardware(name) or name in overridden or name.partition(".")[0] in overridden


def knows_hardware(record: RunRecord) -> bool:
    """Return whether a run got far enough to record all of its hardware."""
    return record.status == "completed" or bool(record.environment and record.environment.gpu_name)
