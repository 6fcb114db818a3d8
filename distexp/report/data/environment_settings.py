"""Under which conditions a training ran: they make it no other training, but runs under others are no repeats of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from distexp.config import ClusterConfig
from distexp.report.data.short_names import flatten, short_name
from distexp.runs.record import RunRecord

OF_THE_TRAINING = frozenset({"nodes", "workers_per_node", "device"})
OF_SUBMISSION = frozenset(
    {"name", "launcher", "gpus_per_node", "timeout_min", "hang_timeout_min", "account", "qos", "reservation"}
    | {"signal_delay_s", "requeue", "array_parallelism", "wait", "dry_run"}
)
"""Keys of ``cluster`` that say when, by whom and for how long: no figure comes from them."""

OF_CLUSTER = frozenset(field.name for field in fields(ClusterConfig)) - OF_THE_TRAINING - OF_SUBMISSION
OF_TRAIN = frozenset({"checkpoint_every", "profile_steps"})
SECTIONS = frozenset({"measure", "preflight", "tracker"})

GPU = "gpu"
SILENT = ("NCCL_VERSION", "NCCL_DEBUG")
"""How variables begin that change nothing but what is said."""


def is_environment_key(key: str) -> bool:
    """Whether a dotted key of the configuration is a condition."""
    section, _, rest = key.partition(".")
    own = {"cluster": OF_CLUSTER, "train": OF_TRAIN}.get(section)
    return section in SECTIONS if own is None else rest.partition(".")[0] in own


def is_environment_setting(name: str) -> bool:
    """Whether a short name is that of a condition."""
    head = name.partition(".")[0]
    return is_hardware(name) or head in OF_CLUSTER or head in OF_TRAIN or head in SECTIONS


def is_hardware(name: str) -> bool:
    """Whether it was found on the machine, as the GPU and variables are: a run that broke early does not know it."""
    return name == GPU or name.isupper()


def read_environment_settings(record: RunRecord) -> dict[str, Any]:
    """The conditions of a run under their short names; variables are those that the workers saw."""
    seen = record.environment
    found = {short_name(key): value for key, value in flatten(record.config) if is_environment_key(key)}
    found |= {name: value for name, value in (seen.variables if seen else {}).items() if not name.startswith(SILENT)}
    return {GPU: seen.gpu_name if seen else None, **found}


def is_distinguishing(name: str, typed: Collection[str]) -> bool:
    """Whether a condition may tell runs apart: one of the machine always, a key where somebody set it."""
    return is_hardware(name) or name in typed or name.partition(".")[0] in typed


def knows_hardware(record: RunRecord) -> bool:
    """Whether a run came so far that what it does not say of its machine is not there."""
    return record.status == "completed" or bool(record.environment and record.environment.gpu_name)
