"""Memory of the sizes of a forecast, as ``distexp plan`` predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distexp.forecast.size_row import SizeRow
from distexp.plan.cells import PlannedCell, plan_cells
from distexp.plan.planner import Planner, with_gpu
from distexp.plan.progress import show_predictions
from distexp.plan.verdict import memory_to_fit_mib, predict
from distexp.runs.record_sections import Predicted

CACHED, OFF = "cached", "off"

MAX_PREDICTED_WORKERS = 64
"""Most workers of a size whose memory is predicted."""

TOO_LARGE = f"memory is predicted up to {MAX_PREDICTED_WORKERS} workers only"
NOT_CACHED = "memory was not predicted before: leave forecast.memory=cached out"


def add_memory(rows: Sequence[SizeRow], mode: str, planner: Planner) -> list[SizeRow]:
    """Return the rows with their predicted memory.

    Args:
        rows: The sizes.
        mode: predict, cached or off.
        planner: Source of estimates.
    """
    if mode == OFF:
        return list(rows)
    reasons = [row.error or _reason(row, mode, planner) for row in rows]
    wanted = [row.cell for row, reason in zip(rows, reasons, strict=True) if not reason]
    configs = [cell.config for cell in wanted if cell.config is not None]
    with show_predictions(planner.count_missing(configs), "") as advance:
        planned = iter(plan_cells(wanted, planner, advance))
    return [
        replace(row, memory_error=reason) if reason else _with_memory(row, next(planned))
        for row, reason in zip(rows, reasons, strict=True)
    ]


def _reason(row: SizeRow, mode: str, planner: Planner) -> str:
    """Return why the memory of a size is not predicted; empty if it is."""
    if mode == CACHED and row.cell.config is not None:
        return "" if planner.cached(with_gpu(row.cell.config)) is not None else NOT_CACHED
    return TOO_LARGE if row.workers > MAX_PREDICTED_WORKERS else ""


def _with_memory(row: SizeRow, planned: PlannedCell) -> SizeRow:
    return replace(row, memory=_of_one_node(planned), memory_error=planned.error)


def _of_one_node(planned: PlannedCell) -> Predicted | None:
    """Return the prediction for a node with the memory of this machine, although a local run would simulate nodes."""
    estimate, config = planned.estimate, planned.cell.config
    if estimate is None or config is None or not estimate.on_cpu:
        return planned.predicted
    return predict(replace(estimate, step_mib=estimate.host_mib), memory_to_fit_mib(config))
