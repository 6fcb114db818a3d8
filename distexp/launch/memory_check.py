"""Prediction of memory before runs start: ``plan=check`` and ``plan=warn``."""

import copy
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from distexp.compose.composition import Cell, MakeCell
from distexp.config import Config, ConfigError
from distexp.config.model_checks import searches_micro_batch, with_micro_batch
from distexp.config.overrides import copyable_command, format_override, key_of
from distexp.plan import verdict
from distexp.plan.command import SLOW_S, show_predictions, show_search
from distexp.plan.estimate import Estimate
from distexp.plan.fitting_change import candidate_overrides
from distexp.plan.plan_table import replaced_overrides, search_of
from distexp.plan.planner import Planner, parallel_processes, read_estimate
from distexp.runs.record import RunSpec, config_dir_options
from distexp.runs.record_sections import Predicted
from distexp.runs.run_dir import MICRO_BATCH
from distexp.runs.step_files import MicroBatchSearch
from distexp.system.cache_dir import cache_dir
from distexp.system.units import MIB_PER_GIB, format_memory

CHECK, WARN = "check", "warn"
UNKNOWN_GPU = "the memory of its GPU is unknown: set plan.gpu=a100-80gb or plan.gpu_memory_gb=80"
UNKNOWN_HOST = "the memory of its node is unknown: set cluster.memory_gb or plan.host_memory_gb"
MAX_SEARCHED_CELLS = 4
"""If more cells do not fit, no changes are predicted. Each search takes as long as several predictions."""


def predict_runs(cells: Sequence[Cell], make: MakeCell, planner: Planner | None = None) -> None:
    """Predict the memory of the cells. With ``plan=check`` a cell that cannot fit becomes invalid.

    Raise ConfigError if there is one cell only, and it cannot fit.
    """
    with planner or Planner() as source:
        checked = [cell for cell in cells if _mode(cell) == CHECK]
        _predict_checked(checked, source)
        for cell in cells:
            if _mode(cell) == WARN and (cached := source.cached(_config(cell))) is not None:
                _store_prediction(cell, cached)
        for cell in cells:
            _warn_about_memory(cell)
        misfits = [cell for cell in checked if cell.predicted and cell.predicted.verdict == verdict.DOES_NOT_FIT]
        _invalidate(misfits, make, source)
    if len(cells) == 1 and cells[0].errors:
        raise ConfigError(cells[0].errors)


def _predict_checked(cells: Sequence[Cell], planner: Planner) -> None:
    """Predict cells with ``plan=check``, which may take minutes; warn about those that cannot be predicted."""
    configs = [_config(cell) for cell in cells]
    note = " before the first run starts (plan=off: start at once)"
    with show_predictions(planner.count_missing(configs), note) as advance:
        outcomes = planner.estimate(configs, advance)
    for cell, outcome in zip(cells, outcomes, strict=True):
        if isinstance(outcome, str):
            _warn(cell, f"its memory is not predicted: {outcome}")
        else:
            _store_prediction(cell, outcome)


def _mode(cell: Cell) -> str:
    """Return ``check`` or ``warn``; empty for a cell that is not predicted."""
    config = cell.config
    if config is None or config.is_preflight or searches_micro_batch(config):
        return ""
    return config.plan.name if config.plan.name in (CHECK, WARN) else ""


def _config(cell: Cell) -> Config:
    assert cell.config is not None, "only valid cells are predicted"
    return cell.config


def _store_prediction(cell: Cell, estimate: Estimate) -> None:
    cell.predicted = verdict.predict(estimate, verdict.memory_to_fit_mib(_config(cell)))
    cell.curve = estimate.curve


def _warn_about_memory(cell: Cell) -> None:
    predicted = cell.predicted
    if predicted is None:
        return
    if verdict.available_mib(predicted) is None and _mode(cell) == CHECK:
        _warn(cell, UNKNOWN_HOST if _config(cell).cluster.device == "cpu" else UNKNOWN_GPU)
    elif predicted.verdict is None and _mode(cell) == CHECK:
        _warn(cell, f"it is not checked: {'; '.join(predicted.notes)}")
    elif predicted.verdict == verdict.TOO_CLOSE or (predicted.verdict == verdict.DOES_NOT_FIT and _mode(cell) == WARN):
        _warn(cell, f"{describe_need(predicted)}: {verdict.describe_verdict(predicted)}")


def _warn(cell: Cell, text: str) -> None:
    label = " ".join(map(format_override, cell.varied))
    print(f"distexp: warning: {label + ': ' if label else ''}{text}", file=sys.stderr)


def describe_need(predicted: Predicted) -> str:
    """Return how much memory a run needs, and how much its GPU has."""
    owner = "GPU" if predicted.host_memory_mib is None else "machine"
    available = f"the {owner} has {format_memory(verdict.available_mib(predicted) or 0.0)}"
    if predicted.required_mib is None:
        return f"the model states need {format_memory(sum(predicted.parts.values()))}, and {available}"
    peak = f"peak of {format_memory(predicted.peak_allocated_mib or 0.0)} in phase {predicted.phase}"
    whose = "" if owner == "GPU" else "each worker: "
    return f"the run needs {format_memory(predicted.required_mib)} ({whose}{peak}), and {available}"


def _invalidate(cells: Sequence[Cell], make: MakeCell, planner: Planner) -> None:
    search, start = len(cells) <= MAX_SEARCHED_CELLS, monotonic()
    for cell in cells:
        assert cell.predicted is not None
        hint = _hint(cell, make, planner, start) if search else "distexp plan shows what would fit"
        cell.invalidate(f"plan=check: {describe_need(cell.predicted)}: {hint}, or run it anyway with plan=warn")


def _hint(cell: Cell, make: MakeCell, planner: Planner, start: float) -> str:
    """Return the smallest change that makes a cell fit. ``start``: time of the first search of the command."""
    assert cell.predicted is not None
    larger = verdict.LARGER_MACHINE[_config(cell).cluster.device]
    if cell.predicted.required_mib is None:  # Its variants cannot be traced either.
        return larger
    prediction_s, limit_s = cell.predicted.seconds or 0.0, _config(cell).plan.search_timeout_s
    if prediction_s > min(SLOW_S, inf if limit_s is None else limit_s):
        return f"a prediction takes {prediction_s:.0f} s, so no changes are predicted: {larger}"

    def has_time() -> bool:
        return limit_s is None or monotonic() + prediction_s <= start + limit_s

    with show_search("what fits", len(list(candidate_overrides(_config(cell))))) as advance:
        search = search_of(cell, _config(cell), make, planner, advance)
        best, left_out = search.first_change(parallel_processes(), has_time) if search else (None, 0)
    if left_out:
        return (
            f"no change found within plan.search_timeout_s={limit_s:g}, and {left_out} were not predicted: "
            f"run distexp plan, which predicts all, or {larger}"
        )
    if best is None:
        return larger
    replaced = " ".join(replaced_overrides(cell.overrides, [best]))
    change = " ".join(best.overrides) + (f" in place of {replaced}" if replaced else "")
    return f"use {change} (needs {format_memory(best.estimate.required_mib or 0.0)})"


def predict_before_start(cells: Sequence[Cell], make: MakeCell) -> None:
    """Predict the memory of cells if that is requested, or if predictions are cached. It raises as ``predict_runs``."""
    modes = {cell.config.plan.name for cell in cells if cell.config is not None} - {"off"}
    has_cache = False
    with suppress(ConfigError):  # Without a home directory there is no cache.
        has_cache = (cache_dir() / "plan").is_dir()
    if CHECK in modes or (modes and has_cache):
        predict_runs(cells, make)


def add_advice(memory: dict[str, Any], spec: RunSpec, directory: Path) -> None:
    """Add ``would_fit`` and ``command`` to a report of GPU memory. Nothing is traced, because that takes seconds.

    Raise ValueError if the report lacks a value, or has another type.
    """
    reserved, free, total = (_number(memory, key) for key in ("reserved_mib", "free_mib", "total_mib"))
    config = spec.config
    search = MicroBatchSearch.read(directory / MICRO_BATCH) if searches_micro_batch(config) else None
    if search is not None and search.chosen is not None:
        config = with_micro_batch(config, search.chosen)
    known = not searches_micro_batch(config)
    memory["would_fit"] = predicted_change(config, reserved + free) if known else []
    memory["command"] = plan_command(
        spec, total, config.train.micro_batch if known else None, config_dir_options(directory)
    )


def _number(memory: dict[str, Any], key: str) -> float:
    value = memory.get(key)
    if not isinstance(value, int | float):
        raise ValueError(f"{key} is {value!r}, which is no number")
    return value


def predicted_change(config: Config, usable_mib: float) -> list[str]:
    """Return the overrides of the smallest change that fits into memory, by a cached prediction; empty without one."""
    for overrides in candidate_overrides(config):
        changed = apply_overrides(config, overrides)
        estimate = read_estimate(changed) if changed is not None else None
        most = replace(estimate, overhead_mib=0.0).most_mib if estimate is not None else None
        if most is not None and most <= usable_mib:
            return list(overrides)
    return []


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config | None:
    """Return a copy with other options of the training or a custom strategy; None for others; they need ``resolve``."""
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


def plan_command(spec: RunSpec, total_mib: float, size: int | None, options: Sequence[str] = ()) -> str:
    """Return the command that predicts a run and what would fit. ``size`` is the micro-batch; None if none fits.

    ``options`` are those of Hydra.
    """
    is_limited = spec.config.cluster.gpu_memory_limit_gb is not None  # The prediction reads this key.
    memory = [] if is_limited else [f"plan.gpu_memory_gb={total_mib / MIB_PER_GIB:.1f}"]
    dropped = ("plan.gpu", "plan.search_timeout_s", "plan=")
    given = [text for text in spec.run.overrides if not text.startswith(dropped)]
    if searches_micro_batch(spec.config):  # A search runs on the GPU, so it is not predicted.
        key = "train.micro_batch_size"
        given = [*(text for text in given if key_of(text) != key), f"{key}={size or 1}"]
    return copyable_command([*given, *memory, *options], command="distexp plan")
