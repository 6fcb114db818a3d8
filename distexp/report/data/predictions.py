"""Predicted memory next to the measured one."""

from __future__ import annotations

from distexp.report.data.metrics import METRICS_BY_NAME
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup, format_metric
from distexp.tables.text_table import TextTable

TITLE = "Predicted and measured memory (MiB)"
NOTE = "Predicted by distexp plan before the run. Error: predicted minus measured, in percent of the measured peak."

COLUMNS = {
    "predicted": "predicted_peak_allocated_mib",
    "measured": "torch_peak_allocated_mib",
    "error %": "prediction_error_pct",
    "reserved, predicted": "predicted_peak_reserved_mib",
    "reserved, measured": "torch_peak_reserved_mib",
    "nvidia-smi, predicted": "predicted_nvidia_smi_mib",
    "nvidia-smi, measured": "gpu_peak_mib",
    "host, predicted": "predicted_host_peak_mib",
    "host, measured": "cpu_peak_mib",
}
"""Metric of each column, by its title."""


def predicted_groups(overview: Overview) -> list[RunGroup]:
    """Return the groups whose memory was predicted."""
    names = (COLUMNS["predicted"], COLUMNS["host, predicted"])
    return [group for group in overview.groups if any(group.metric(name) for name in names)]


def build_predictions_table(overview: Overview) -> TextTable | None:
    """Build the table with a row per training; None if no run was predicted."""
    groups = predicted_groups(overview)
    if not groups:
        return None
    columns = {title: format_metric(groups, METRICS_BY_NAME[name]) for title, name in COLUMNS.items()}
    labels = overview.label_columns([group.label for group in groups], groups)
    return TextTable.from_columns(TITLE, {**labels, **columns}, NOTE, num_labels=len(labels))
