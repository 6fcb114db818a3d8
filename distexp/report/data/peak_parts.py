"""Parts of the GPU memory at the peak of a step: measured, and predicted before the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup
from distexp.report.data.rows import Row
from distexp.runs.entry_values import number_of, texts_of
from distexp.runs.memory_parts import PEAK_PARTS, highest_peak
from distexp.runs.record import RunRecord
from distexp.tables.text_table import NOT_MEASURED, TextTable

RESERVE, CONTEXT = "reserve_mib", "context_mib"
TITLES = {
    **{name: name.removesuffix("_mib").replace("_", " ") for name in PEAK_PARTS},
    RESERVE: "allocator reserve",
    CONTEXT: "CUDA context",
}
"""Titles of the parts. All but the last two are allocated."""

MAX_RUNS = 32
TITLE = "GPU memory of one worker at the peak of a step (MiB)"
NOTE = (
    "Measured: the rank and the phase with the most, with train.profile_steps. Predicted: by distexp plan. "
    "Reserve: held by torch's allocator and not allocated. Context: outside of the allocator."
)


@dataclass(frozen=True)
class Peak:
    """The parts of a peak.

    Attributes:
        kind: ``measured`` or ``predicted``.
        phase: Phase of the step; empty if unknown.
        parts: MiB by key of ``TITLES``, without those that are unknown.
    """

    kind: str
    phase: str
    parts: dict[str, float]


@dataclass(frozen=True)
class GroupPeaks:
    """The measured peak of a training, and the predicted one if there is one. It is that of the first such run."""

    group: RunGroup
    row: Row
    peaks: tuple[Peak, ...]


def measured_peaks(overview: Overview) -> list[GroupPeaks]:
    """Return the peaks of the groups with a run whose step was recorded."""
    found = []
    for group in overview.groups:
        runs = ((row, tuple(_peaks(row.record))) for row in group.counted_rows)
        first = next(((row, peaks) for row, peaks in runs if peaks), None)
        if first is not None:
            found.append(GroupPeaks(group, *first))
    return found


def _peaks(record: RunRecord) -> Iterator[Peak]:
    entry = highest_peak(record.memory)
    if entry is None:
        return
    parts = {name: value for name in TITLES if (value := number_of(entry, name)) is not None}
    yield Peak("measured", "".join(texts_of(entry, "phase")), parts)
    if record.predicted is not None and record.predicted.parts:
        yield Peak("predicted", record.predicted.phase or "", _predicted_parts(record))


def _predicted_parts(record: RunRecord) -> dict[str, float]:
    """Return the predicted parts with the reserve and the context, which are differences of predicted totals."""
    predicted = record.predicted
    assert predicted is not None
    parts = {f"{name}_mib": float(value) for name, value in predicted.parts.items() if value is not None}
    totals = (predicted.peak_allocated_mib, predicted.peak_reserved_mib, predicted.nvidia_smi_mib)
    for name, less, more in ((RESERVE, *totals[:2]), (CONTEXT, *totals[1:])):
        if less is not None and more is not None:
            parts[name] = max(0.0, more - less)
    return {name: parts[name] for name in TITLES if name in parts}


def build_peaks_table(overview: Overview, found: Sequence[GroupPeaks]) -> TextTable:
    """Build the table with a row for each measured and each predicted peak."""
    shown = [(run, peak) for run in found[:MAX_RUNS] for peak in run.peaks]
    columns = overview.label_columns([run.row.label for run, _ in shown], [run.group for run, _ in shown])
    columns["peak"] = [peak.kind for _, peak in shown]
    num_labels = len(columns)
    columns["phase"] = [peak.phase or NOT_MEASURED for _, peak in shown]
    for name, title in TITLES.items():
        columns[title] = [f"{peak.parts[name]:,.0f}" if name in peak.parts else NOT_MEASURED for _, peak in shown]
    columns["sum"] = [f"{sum(peak.parts.values()):,.0f}" for _, peak in shown]
    more = f" {len(found) - MAX_RUNS} more runs are in the records." if len(found) > MAX_RUNS else ""
    return TextTable.from_columns(TITLE, columns, NOTE + more, num_labels=num_labels)
