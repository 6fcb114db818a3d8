"""All that a report draws from: rows, repeats, what differs, and the row that others are measured against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.report.data.metrics import TABLE_METRICS, Metric
from distexp.report.data.repeats import RunGroup, add_speedup, group_repeats
from distexp.report.data.rows import Row, row_from_record
from distexp.report.data.scaling import ScalingSeries, add_efficiency, find_scaling_series
from distexp.report.data.settings import SEED, format_setting, varying_settings
from distexp.runs.record import RunRecord

FAULTS_JOINED_BY = " | "
"""Between the sentences of an invalid record's message."""

MOST_SAID = 4  # settings in a sentence


@dataclass(frozen=True)
class Overview:
    """Some runs, compared."""

    rows: tuple[Row, ...]
    groups: tuple[RunGroup, ...]
    varied: tuple[str, ...]  # settings that tell the groups apart
    baseline: RunGroup | None  # of the speedups
    series: tuple[ScalingSeries, ...]  # what ran on several numbers of workers

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> Overview:
        """Groups rows and finds what differs between them."""
        groups = group_repeats(rows)
        varied = varying_settings([row.record for row in rows], [row.settings for row in rows])
        if _mixes_seeds(groups):
            varied = [name for name in varied if name != SEED]
        series = find_scaling_series(groups, varied)
        add_efficiency(series)
        return cls(tuple(rows), tuple(groups), tuple(varied), add_speedup(groups), tuple(series))

    def metrics(self) -> Iterator[Metric]:
        """The figures of a terminal that any run has."""
        for figure in TABLE_METRICS:
            if any(row.metrics[figure.name] is not None for row in self.rows):
                yield figure

    def describe(self, group: RunGroup) -> str:
        """``run 3 (strategy=fsdp, offload=true)``; the run alone where too much differs to be said."""
        chosen = self.format_settings(group)
        return f"run {group.label}" + (f" ({chosen})" if chosen else "")

    def format_settings(self, group: RunGroup) -> str:
        """``strategy=fsdp, offload=true``; empty where too much differs to be said."""
        chosen = [
            f"{name}={format_setting(group.setting(name), 24)}" for name in self.varied
            if group.setting(name) is not None
        ]  # fmt: skip
        return ", ".join(chosen) if len(chosen) <= MOST_SAID else ""

    def notes(self) -> Iterator[str]:
        """Why runs did not complete, a sentence a reason."""
        reasons: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if not row.completed:
                for why in _reasons(row):
                    reasons.setdefault((row.record.status, why), []).append(row.label)
        for (status, why), labels in reasons.items():
            shown = ", ".join(labels[:8]) + (f" and {len(labels) - 8} more" if len(labels) > 8 else "")
            yield f"run{'s' if len(labels) > 1 else ''} {shown} {status}: {why}"


def _mixes_seeds(groups: Sequence[RunGroup]) -> bool:
    return any(len({row.settings.get(SEED) for row in group.rows}) > 1 for group in groups)


def _reasons(row: Row) -> list[str]:
    """One for each error of a refused cell, so that cells share the lines that they share."""
    text = reason(row)
    return text.split(FAULTS_JOINED_BY) if row.record.status == "invalid" else [text]


def reason(row: Row, limit: int = 300) -> str:
    """Why a run did not complete, in one line: for memory, the phase and the peak."""
    record = row.record
    if record.error is None:
        return "its record does not say why"
    where = " in phase " + record.error.phase if record.error.phase else ""
    if record.status in ("oom_gpu", "oom_host"):
        return f"out of {'GPU' if record.status == 'oom_gpu' else 'host'} memory{where}{_peak(row)}"
    message = " ".join(record.error.message.split())
    if record.status == "invalid":
        return message
    if len(message) > limit:
        message = message[: limit - 1] + "…"
    return f"{record.error.type}{where}: {message}"


def _peak(row: Row) -> str:
    if row.record.status == "oom_host":
        peak = row.metrics["cpu_peak_mib"]
        return "" if peak is None else f", at a peak of {peak:,.0f} MiB on a node"
    total = row.record.environment.gpu_total_mib if row.record.environment else None
    most = f" of {total:,.0f}" if total else ""
    for name, what in (("gpu_peak_mib", "on a GPU"), ("torch_peak_allocated_mib", "allocated by torch")):
        if (peak := row.metrics[name]) is not None:
            return f", at a peak of {peak:,.0f}{most} MiB {what}"
    return ""


def rows_from_records(records: Sequence[RunRecord]) -> list[Row]:
    """Rows of records at hand, under their run numbers."""
    return [row_from_record(record, str(record.run.number)) for record in records]
