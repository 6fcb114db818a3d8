"""Memory of one worker by part, next to that of all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distexp.report.data.metric_readers import PARTS
from distexp.report.data.metrics import METRICS_BY_NAME, NOT_OFFLOADED, PARTS_TOTAL
from distexp.report.data.overview import Overview
from distexp.report.data.ranking import memory_metric
from distexp.report.data.repeats import RunGroup, format_metric
from distexp.tables.text_table import TextTable

TITLE = "Memory of one worker by part (MiB)"
NOTE = (
    "Measured on the tensors of the first step, on the worker with the most. Gradients: in memory at the update. "
    "Activations: saved for the backward pass of a micro-batch."
)
OFFLOAD_NOTE = (
    "Not offloaded: the sum without the parts that offloading moves to the host. It is what a GPU would hold."
)
SMALL = 0.5  # of the process memory

PEAK_TITLES = {
    "gpu_peak_mib": "GPU peak",
    "torch_peak_allocated_mib": "GPU peak (torch)",
    "cpu_peak_mib": "peak of all processes",
}
"""Titles of the metrics in ``MEMORIES``."""


def measured_groups(overview: Overview) -> list[RunGroup]:
    """Return the completed groups whose parts were measured."""
    return [group for group in overview.groups if group.completed and group.metric(PARTS_TOTAL)]


def has_small_parts(overview: Overview) -> bool:
    """Return whether the parts of a run are less than half of its peak: then the peak hides them."""
    name = memory_metric(overview)
    return name is not None and any(_has_small_parts(group, name) for group in measured_groups(overview))


def _has_small_parts(group: RunGroup, peak_metric: str) -> bool:
    parts, peak = group.metric(PARTS_TOTAL), group.metric(peak_metric)
    return parts is not None and peak is not None and parts.mean < SMALL * peak.mean


def build_parts_table(overview: Overview) -> TextTable | None:
    """Build the table with a row per training; None if no run measured its parts."""
    groups = measured_groups(overview)
    if not groups:
        return None
    metrics = _metrics_by_title(overview, groups)
    labels = overview.label_columns([group.label for group in groups], groups)
    columns = [format_metric(groups, METRICS_BY_NAME[name]) for name in metrics.values()]
    rows = tuple(zip(*labels.values(), *columns, strict=True))
    return TextTable(TITLE, (*labels, *metrics), rows, _note(metrics, groups), num_labels=len(labels))


def _note(metrics: Mapping[str, str], groups: Sequence[RunGroup]) -> str:
    """Return what the columns mean."""
    strategies = [row.record.strategy for group in groups for row in group.counted_rows]
    notes = dict.fromkeys(strategy.memory_note for strategy in strategies if strategy is not None)
    return " ".join(filter(None, (NOTE, *notes, OFFLOAD_NOTE if NOT_OFFLOADED in metrics.values() else "")))


def _metrics_by_title(overview: Overview, groups: Sequence[RunGroup]) -> dict[str, str]:
    """Return the metric of each column, by its title."""
    metrics = {**{title: name for name, title in PARTS.items()}, "sum": PARTS_TOTAL}
    if any(_is_offloaded(group) for group in groups):
        metrics["not offloaded"] = NOT_OFFLOADED
    peak = memory_metric(overview)
    return metrics if peak is None else {**metrics, PEAK_TITLES[peak]: peak}


def _is_offloaded(group: RunGroup) -> bool:
    return any(row.record.built and row.record.built.offload != "none" for row in group.counted_rows)
