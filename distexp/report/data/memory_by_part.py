"""Memory of one worker by part: next to that of all processes, and at the peak of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.report.data.metrics import METRICS_BY_NAME, NOT_OFFLOADED, PARTS, PARTS_TOTAL
from distexp.report.data.overview import Overview, memory_metric
from distexp.report.data.repeats import RunGroup, format_metric
from distexp.report.data.rows import Row
from distexp.runs.memory_trace import PEAK_PARTS, highest_peak
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Predicted
from distexp.system.typed_values import number_of, texts_of
from distexp.tables.columns import NOT_MEASURED, TextTable

TITLE = "Memory of one worker by part (MiB)"
NOTE = (
    "Measured on the tensors of the first step, on the worker with the most. Gradients: in memory at the update. "
    "Activations: saved for the backward pass of a micro-batch."
)
OFFLOAD_NOTE = (
    "Not offloaded: the sum without the parts that offloading moves to the host. It is what a GPU would hold."
)
SMALL = 0.5  # of the process memory

PEAK_TITLES = {  # titles of the metrics in `MEMORIES`
    "gpu_peak_mib": "GPU peak",
    "torch_peak_allocated_mib": "GPU peak (torch)",
    "cpu_peak_mib": "peak of all processes",
}

RESERVE, CONTEXT = "reserve_mib", "context_mib"
TITLES = {  # Titles of the parts. All but the last two are allocated.
    **{name: name.removesuffix("_mib").replace("_", " ") for name in PEAK_PARTS},
    RESERVE: "allocator reserve",
    CONTEXT: "CUDA context",
}

MAX_RUNS = 32
PEAK_TITLE = "GPU memory of one worker at the peak of a step (MiB)"
PEAK_NOTE = (
    "Measured: the rank and the phase with the most, with train.profile_steps. Predicted: by distexp plan. "
    "Reserve: held by torch's allocator and not allocated. Context: outside of the allocator."
)


def measured_groups(overview: Overview) -> list[RunGroup]:
    """Return the completed groups whose parts were measured."""
    return [group for group in overview.groups if group.completed and group.metric(PARTS_TOTAL)]


def has_small_parts(overview: Overview) -> bool:
    """Return whether the parts of a run are less than half of its peak: then the peak hides them."""
    name = memory_metric(overview)
    sizes = [(group.metric(PARTS_TOTAL), group.metric(name)) for group in measured_groups(overview)] if name else []
    return any(parts and peak and parts.mean < SMALL * peak.mean for parts, peak in sizes)


def build_parts_table(overview: Overview) -> TextTable | None:
    """Build the table with a row per training; None if no run measured its parts."""
    groups = measured_groups(overview)
    if not groups:
        return None
    records = [row.record for group in groups for row in group.counted_rows]
    is_offloaded = any(record.built and record.built.offload != "none" for record in records)
    metrics = {**{title: name for name, title in PARTS.items()}, "sum": PARTS_TOTAL}
    if is_offloaded:
        metrics["not offloaded"] = NOT_OFFLOADED
    if peak := memory_metric(overview):
        metrics[PEAK_TITLES[peak]] = peak
    notes = dict.fromkeys(record.strategy.memory_note for record in records if record.strategy is not None)
    note = " ".join(filter(None, (NOTE, *notes, OFFLOAD_NOTE if is_offloaded else "")))
    labels = overview.label_columns([group.label for group in groups], groups)
    columns = {title: format_metric(groups, METRICS_BY_NAME[name]) for title, name in metrics.items()}
    rows = tuple(zip(*labels.values(), *columns.values(), strict=True))
    return TextTable(TITLE, (*labels, *columns), rows, note, num_labels=len(labels))


@dataclass(frozen=True)
class Peak:
    """The parts of a peak in MiB by key of ``TITLES``; ``kind`` is ``measured`` or ``predicted``."""

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
    runs = (
        (GroupPeaks(group, row, tuple(_peaks(row.record))) for row in group.counted_rows) for group in overview.groups
    )
    first = (next((run for run in of_group if run.peaks), None) for of_group in runs)
    return [run for run in first if run is not None]


def _peaks(record: RunRecord) -> Iterator[Peak]:
    entry = highest_peak(record.memory)
    if entry is None:
        return
    parts = {name: value for name in TITLES if (value := number_of(entry, name)) is not None}
    yield Peak("measured", "".join(texts_of(entry, "phase")), parts)
    if record.predicted is not None and record.predicted.parts:
        yield Peak("predicted", record.predicted.phase or "", _predicted_parts(record.predicted))


def _predicted_parts(predicted: Predicted) -> dict[str, float]:
    """Return the predicted parts with the reserve and the context, which are differences of predicted totals."""
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
    return TextTable.from_columns(PEAK_TITLE, columns, PEAK_NOTE + more, num_labels=num_labels)
