"""Comparison of runs: repeats, varying settings, baseline, scaling series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.report.data.failures import failure_notes
from distexp.report.data.metrics import EFFICIENCY, NOISE, SPEED, SPEEDUP, TABLE_METRICS, Metric
from distexp.report.data.repeats import RunGroup, group_repeats, share_deviations
from distexp.report.data.rows import Row, rows_from_records
from distexp.report.data.scaling import ScalingSeries, add_efficiency, find_scaling_series
from distexp.report.data.setting_names import SEED
from distexp.report.data.settings import MAX_LENGTH, format_setting, format_settings, run_label
from distexp.report.data.speedup import add_speedup, exceeds_workers
from distexp.report.data.varying import varying_settings
from distexp.runs.record import RunRecord
from distexp.statistics.noise import is_within_noise

MAX_SETTINGS = 4  # in a description of a run
NOISE_MARK = "~"
DISTURBED_MARK = "!"


@dataclass(frozen=True)
class Overview:
    """A comparison of runs.

    Attributes:
        varied: Names of the settings in which the groups differ.
        baseline: The group that speedups are relative to.
        series: Configurations that ran on different numbers of workers.
    """

    rows: tuple[Row, ...]
    groups: tuple[RunGroup, ...]
    varied: tuple[str, ...]
    baseline: RunGroup | None
    series: tuple[ScalingSeries, ...]

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> Overview:
        """Group and compare rows, and fill in their speedups and efficiencies."""
        groups = share_deviations(group_repeats(rows))
        _add_noise(groups)
        varied = varying_settings([row.record for row in rows], [row.settings for row in rows])
        if any(group.has_several_seeds for group in groups):
            varied = [name for name in varied if name != SEED]
        series = find_scaling_series(groups, varied)
        add_efficiency(series)
        return cls(tuple(rows), tuple(groups), tuple(varied), add_speedup(groups), tuple(series))

    @classmethod
    def from_records(cls, records: Sequence[RunRecord]) -> Overview:
        """Compare records in memory."""
        return cls.from_rows(rows_from_records(records))

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics for tables that any run has."""
        for metric in TABLE_METRICS:
            values = [value for row in self.rows if (value := row.metrics[metric.name]) is not None]
            if any(values) if metric.hides_zero else values:
                yield metric

    def describe(self, group: RunGroup, number: str = "") -> str:
        """Return the label of a training, or of one of its repeats; without settings if too many vary."""
        return run_label(number or group.label, self.format_settings(group))

    def format_settings(self, group: RunGroup) -> str:
        """Return ``strategy=fsdp, offload=true``; empty if too many settings vary."""
        names = [name for name in self.varied if group.setting(name) is not None]
        return format_settings(group.settings, names) if len(names) <= MAX_SETTINGS else ""

    def equals_baseline(self, group: RunGroup) -> bool:
        """Return whether the speed of another group equals that of the baseline within the noise."""
        if self.baseline is None or group is self.baseline or group.task != self.baseline.task:
            return False
        speed, other = group.metric(SPEED), self.baseline.metric(SPEED)
        return bool(group.completed and speed and other and is_within_noise(speed, other))

    def exceeds_workers(self, group: RunGroup) -> bool:
        """Return whether the number of workers does not explain a speedup."""
        return self.baseline is not None and group.completed and exceeds_workers(group, self.baseline, self.varied)

    def label_columns(self, labels: Sequence[str], groups: Sequence[RunGroup]) -> dict[str, list[str]]:
        """Return the first columns of a table: the runs, and their settings that vary.

        Args:
            labels: Label of the run of each row.
            groups: Training of each row.
        """
        settings = {name: [format_setting(group.setting(name), MAX_LENGTH) for group in groups] for name in self.varied}
        return {"run": list(labels), **settings}

    def mark(self, metric: str, group: RunGroup) -> str:
        """Return the mark behind a metric of a run: it was disturbed, or equals the baseline within the noise."""
        if any(one.disturbance for one in self._groups_of_metric(metric, group)):
            return DISTURBED_MARK
        if metric == SPEEDUP and self.exceeds_workers(group):
            return DISTURBED_MARK
        return NOISE_MARK if metric == SPEEDUP and self.equals_baseline(group) else ""

    def _groups_of_metric(self, metric: str, group: RunGroup) -> Iterator[RunGroup]:
        """Yield the groups whose speeds make a metric: none, its own, and that of a baseline."""
        if group.metric(metric) is None or metric not in (SPEED, SPEEDUP, EFFICIENCY):
            return
        yield group
        if metric == SPEEDUP and self.baseline is not None:
            yield self.baseline
        if metric == EFFICIENCY:
            yield from (one.baseline.group for one in self.series if any(point.group is group for point in one.points))

    def notes(self) -> Iterator[str]:
        """Yield why runs did not complete, one line for each reason."""
        yield from failure_notes(self.rows)


def _add_noise(groups: Sequence[RunGroup]) -> None:
    """Fill in the noise of the speed of each group, in percent."""
    for group in groups:
        speed = group.metric(SPEED)
        for row in group.counted_rows:
            row.metrics[NOISE] = 100 * speed.noise / speed.mean if speed and speed.noise and speed.mean else None
