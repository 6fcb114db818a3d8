"""Prediction of memory before runs start: ``plan=check`` and ``plan=warn``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import inf
from time import monotonic

from distexp.config import Config, ConfigError
from distexp.config.batch_sizes import searches_micro_batch
from distexp.launch.cell import Cell, MakeCell
from distexp.plan.cells import search_of
from distexp.plan.command import SLOW_S
from distexp.plan.estimate import Estimate
from distexp.plan.planner import Planner, parallel_processes
from distexp.plan.progress import show_predictions, show_search
from distexp.plan.search import candidate_overrides
from distexp.plan.verdict import (
    DOES_NOT_FIT,
    LARGER_MACHINE,
    TOO_CLOSE,
    available_mib,
    describe_verdict,
    memory_to_fit_mib,
    predict,
)
from distexp.runs.command_text import format_override
from distexp.runs.record import INVALID_ID
from distexp.runs.record_sections import Predicted
from distexp.system.units import format_memory

CHECK, WARN = "check", "warn"
UNKNOWN_GPU = "the memory of its GPU is unknown: set plan.gpu=a100-80gb or plan.gpu_memory_gb=80"
UNKNOWN_HOST = "the memory of its node is unknown: set cluster.memory_gb or plan.host_memory_gb"
BEFORE_START = " before the first run starts (plan=off: start at once)"
MAX_SEARCHED_CELLS = 4
"""If more cells do not fit, no changes are predicted. Each search takes as long as several predictions."""


def predict_runs(cells: Sequence[Cell], make: MakeCell, planner: Planner | None = None) -> None:
    """Predict the memory of the cells. With ``plan=check`` a cell that cannot fit becomes invalid.

    Args:
        cells: The cells of the command. They get their prediction.
        make: Composes a variant of a cell.
        planner: Source of estimates.

    Raises:
        ConfigError: if there is one cell only, and it cannot fit.
    """
    with planner or Planner() as source:
        _predict_runs(cells, make, source)
    if len(cells) == 1 and cells[0].errors:
        raise ConfigError(cells[0].errors)


def _predict_runs(cells: Sequence[Cell], make: MakeCell, planner: Planner) -> None:
    checked = [cell for cell in cells if _mode(cell) == CHECK]
    _predict_checked(checked, planner)
    for cell in cells:
        if _mode(cell) == WARN and (cached := planner.cached(_config(cell))) is not None:
            _store_prediction(cell, cached)
    for cell in cells:
        _warn_about_memory(cell)
    _invalidate([cell for cell in checked if _does_not_fit(cell)], make, planner)


def _predict_checked(cells: Sequence[Cell], planner: Planner) -> None:
    """Predict cells with ``plan=check``, which may take minutes; warn about those that cannot be predicted."""
    configs = [_config(cell) for cell in cells]
    with show_predictions(planner.count_missing(configs), BEFORE_START) as advance:
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
    cell.predicted = predict(estimate, memory_to_fit_mib(_config(cell)))
    cell.curve = estimate.curve


def _does_not_fit(cell: Cell) -> bool:
    return cell.predicted is not None and cell.predicted.verdict == DOES_NOT_FIT


def _warn_about_memory(cell: Cell) -> None:
    """Warn if the memory of a cell is not known, or may not be enough."""
    predicted = cell.predicted
    if predicted is None:
        return
    if available_mib(predicted) is None and _mode(cell) == CHECK:
        _warn(cell, UNKNOWN_HOST if _config(cell).cluster.device == "cpu" else UNKNOWN_GPU)
    elif predicted.verdict is None and _mode(cell) == CHECK:
        _warn(cell, f"it is not checked: {'; '.join(predicted.notes)}")
    elif predicted.verdict == TOO_CLOSE or (predicted.verdict == DOES_NOT_FIT and _mode(cell) == WARN):
        _warn(cell, f"{describe_need(predicted)}: {describe_verdict(predicted)}")


def _warn(cell: Cell, text: str) -> None:
    label = " ".join(map(format_override, cell.varied))
    print(f"distexp: warning: {label + ': ' if label else ''}{text}", file=sys.stderr)


def describe_need(predicted: Predicted) -> str:
    """Return how much memory a run needs, and how much its GPU has."""
    owner = "GPU" if predicted.host_memory_mib is None else "machine"
    available = f"the {owner} has {format_memory(available_mib(predicted) or 0.0)}"
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
        cell.errors = [f"plan=check: {describe_need(cell.predicted)}: {hint}, or run it anyway with plan=warn"]
        cell.config, cell.decided, cell.id = None, cell.config, INVALID_ID


def _hint(cell: Cell, make: MakeCell, planner: Planner, start: float) -> str:
    """Return the smallest change that makes a cell fit.

    Args:
        cell: The cell.
        make: Composes a variant of it.
        planner: Source of estimates.
        start: Time at which the first search of the command started.
    """
    assert cell.predicted is not None
    larger = LARGER_MACHINE[_config(cell).cluster.device]
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
    return f"use {' '.join(best.overrides)} (needs {format_memory(best.estimate.required_mib or 0.0)})"
