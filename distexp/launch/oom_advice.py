"""What would have made a run fit that was out of GPU memory: a change that was predicted before, or the command."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterable
from typing import Any

from distexp.config import Config
from distexp.config.batch_sizes import with_micro_batch
from distexp.plan.cache import read_estimate
from distexp.plan.estimate import GPU_ERROR_BOUND
from distexp.plan.search import candidate_overrides
from distexp.runs.spec import RunSpec
from distexp.system.units import MIB_PER_GB


def add_advice(memory: dict[str, Any], spec: RunSpec) -> None:
    """Add ``would_fit`` and ``command`` to a report of GPU memory. Nothing is traced, because that takes seconds."""
    memory["would_fit"] = predicted_change(spec.config, memory["reserved_mib"] + memory["free_mib"])
    memory["command"] = plan_command(spec, memory["total_mib"])


def predicted_change(config: Config, usable_mib: float) -> list[str]:
    """Return the overrides of the smallest change that fits, by a prediction in the cache; empty if there is none.

    Args:
        config: the configuration that did not fit.
        usable_mib: memory that torch had, and what was free.
    """
    for overrides in candidate_overrides(config):
        changed = apply_overrides(config, overrides)
        estimate = read_estimate(changed) if changed is not None else None
        required = estimate.required_mib if estimate is not None else None
        if required is not None and required * (1 + GPU_ERROR_BOUND) <= usable_mib:
            return list(overrides)
    return []


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config | None:
    """Return a copy with other options of the training; None for those that the resolution must complete."""
    changed = copy.deepcopy(config)
    for override in overrides:
        key, _, text = override.partition("=")
        section, _, name = key.partition(".")
        if section != "train":
            return None
        old = getattr(changed.train, name)
        value: Any = int(text) if isinstance(old, int) and not isinstance(old, bool) else text
        setattr(changed.train, name, text == "true" if isinstance(old, bool) else value)
    keeps_global_batch = changed.train.global_batch_size is not None
    return with_micro_batch(changed, changed.train.micro_batch) if keeps_global_batch else changed


def plan_command(spec: RunSpec, total_mib: float) -> str:
    """Return the command that predicts a run and what would fit, for a GPU of this size."""
    is_limited = spec.config.cluster.gpu_memory_limit_gb is not None  # The prediction reads this key.
    memory = [] if is_limited else [f"plan.gpu_memory_gb={total_mib / MIB_PER_GB:.1f}"]
    given = [text for text in spec.run.overrides if not text.startswith(("plan.gpu", "plan.only", "plan="))]
    return shlex.join(["distexp", "plan", *given, *memory])
