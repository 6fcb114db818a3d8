"""What would have made a run fit that was out of GPU memory: a change that was predicted before, or the command."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distexp.config import Config
from distexp.config.batch_sizes import searches_micro_batch, with_micro_batch
from distexp.config.override_text import key_of
from distexp.plan.cache import read_estimate
from distexp.plan.search import candidate_overrides
from distexp.runs.copyable_command import copyable_command
from distexp.runs.micro_batch import MicroBatchSearch
from distexp.runs.run_dir import MICRO_BATCH
from distexp.runs.spec import RunSpec
from distexp.system.units import MIB_PER_GB


def add_advice(memory: dict[str, Any], spec: RunSpec, directory: Path) -> None:
    """Add ``would_fit`` and ``command`` to a report of GPU memory. Nothing is traced, because that takes seconds.

    Args:
        memory: The report, which a worker wrote.
        spec: The run.
        directory: Directory of the run, with the search of its micro-batch.

    Raises:
        ValueError: if the report lacks a value, or has another type.
    """
    reserved, free, total = (_number(memory, key) for key in ("reserved_mib", "free_mib", "total_mib"))
    config = chosen_config(spec.config, directory)
    known = not searches_micro_batch(config)
    memory["would_fit"] = predicted_change(config, reserved + free) if known else []
    memory["command"] = plan_command(spec, total, config.train.micro_batch if known else None)


def _number(memory: dict[str, Any], key: str) -> float:
    value = memory.get(key)
    if not isinstance(value, int | float):
        raise ValueError(f"{key} is {value!r}, which is no number")
    return value


def chosen_config(config: Config, directory: Path) -> Config:
    """Return a configuration with the micro-batch size that the search chose; the same if it chose none."""
    search = MicroBatchSearch.read(directory / MICRO_BATCH) if searches_micro_batch(config) else None
    return config if search is None or search.chosen is None else with_micro_batch(config, search.chosen)


def predicted_change(config: Config, usable_mib: float) -> list[str]:
    """Return the overrides of the smallest change that fits, by a prediction in the cache; empty if there is none.

    Args:
        config: the configuration that did not fit.
        usable_mib: memory that torch had, and what was free.
    """
    for overrides in candidate_overrides(config):
        changed = apply_overrides(config, overrides)
        estimate = read_estimate(changed) if changed is not None else None
        most = replace(estimate, overhead_mib=0.0).most_mib if estimate is not None else None
        if most is not None and most <= usable_mib:
            return list(overrides)
    return []


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config | None:
    """Return a copy with other options of the training, or of a custom strategy; None for others.

    The resolution must complete those.
    """
    changed = copy.deepcopy(config)
    places = {"train": vars(changed.train), "strategy.options": changed.strategy.options}
    for override in overrides:
        key, _, text = override.partition("=")
        section, _, name = key.rpartition(".")
        if name not in places.get(section, {}):
            return None
        old = places[section][name]
        value: Any = int(text) if isinstance(old, int) and not isinstance(old, bool) else text
        places[section][name] = text == "true" if isinstance(old, bool) else value
    keeps_global_batch = changed.train.global_batch_size is not None
    return with_micro_batch(changed, changed.train.micro_batch) if keeps_global_batch else changed


def plan_command(spec: RunSpec, total_mib: float, size: int | None) -> str:
    """Return the command that predicts a run and what would fit.

    Args:
        spec: The run.
        total_mib: Memory of the GPU.
        size: Its micro-batch; None if the search found none. Then the command has 1, the smallest.
    """
    is_limited = spec.config.cluster.gpu_memory_limit_gb is not None  # The prediction reads this key.
    memory = [] if is_limited else [f"plan.gpu_memory_gb={total_mib / MIB_PER_GB:.1f}"]
    dropped = ("plan.gpu", "plan.search_timeout_s", "plan=")
    given = [text for text in spec.run.overrides if not text.startswith(dropped)]
    if searches_micro_batch(spec.config):  # A search runs on the GPU, so it is not predicted.
        key = "train.micro_batch_size"
        given = [*(text for text in given if key_of(text) != key), f"{key}={size or 1}"]
    return copyable_command([*given, *memory], command="distexp plan")
