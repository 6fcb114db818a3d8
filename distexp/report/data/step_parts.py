"""Parts of a profiled training step by rank, and its lanes: what a rank does at which time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup
from distexp.report.data.rows import Row, global_batch
from distexp.runs.metrics import HIDDEN, PARTS
from distexp.runs.predictions import measured_step_s
from distexp.runs.step_files import RankStep, read_profile_summary, read_ranks
from distexp.system.typed_values import matches, number_of, texts_of
from distexp.tables.columns import NOT_MEASURED, TextTable, cell

NOTE = "Hidden communication runs behind computation. It is not part of the sum."
SLOWEST_NOTE = (
    "Each row shows the slowest rank (without its waiting). The column bottleneck uses the mean of all ranks."
)
MAX_ROWS = 32
DIFFERENT = 0.05  # relative difference from which a profiled step differs from the median of the other steps
LANES = {"compute": "compute", "communication": "communication", "cpu": "CPU"}  # titles of the lanes, in their order
TITLES = {  # titles of labels that are parts of a step with another name
    "matmul": PARTS["matmul"], "other kernel": PARTS["other_kernels"], "waiting": PARTS["waiting"],
    "data": PARTS["data_wait"],
}  # fmt: skip

MAX_SPANS = 2000  # of a lane; a run writes fewer


@dataclass(frozen=True)
class ProfiledRun:
    """A profiled run. It is the first of its repeats that was profiled."""

    group: RunGroup
    row: Row
    ranks: tuple[RankStep, ...]

    @property
    def slowest(self) -> RankStep:
        """Return the rank with the most time of its own: the others wait for it."""
        return max(self.ranks, key=lambda rank: (rank.own_ms, -rank.rank))

    @property
    def median_ms(self) -> float | None:
        """Return the median of the steps that were not profiled; None if it is unknown."""
        median_s = measured_step_s(self.row.record)
        return 1000 * median_s if median_s else None

    @property
    def differs(self) -> bool:
        """Return whether the profiled step of the slowest rank differs from the median of the other steps."""
        median = self.median_ms
        return median is not None and abs(self.slowest.step_ms - median) > DIFFERENT * median

    @property
    def is_scaled(self) -> bool:
        """Return whether the parts are scaled to the median of the other steps, as on a CPU."""
        entries = [entry for entry in self.row.record.metrics.step_breakdown or () if isinstance(entry, dict)]
        on_cpu = any(entry.get("includes_overhead") and entry.get("launch_idle_ms") is None for entry in entries)
        return on_cpu and not self.differs

    @property
    def samples(self) -> float | None:
        """Return the samples of a step on all workers; None if unknown. A packed row has several samples."""
        settings, steps = self.row.settings, self.row.record.metrics.steps_per_epoch
        if not settings.get("dataset.packing"):
            return global_batch(settings)
        size = settings.get("dataset.train_size")
        return float(size) / steps if size and steps else None

    @property
    def sentence(self) -> str:
        """Return the sentence about the bottleneck, with the overrides to try; empty if there is none."""
        explanation = self.row.record.metrics.explanation or {}
        sentences = texts_of(explanation, "sentence")
        if not sentences:
            return ""
        overrides = [text for text in texts_of(explanation, "try") if text not in sentences[0]]
        larger = [text for text in texts_of(explanation, "larger_global_batch") if text in overrides]
        tried = f" Try {' or '.join(overrides)}." if overrides else ""
        changing = f" A larger global batch changes the training: {', '.join(larger)}." if larger else ""
        return f"{sentences[0]}{tried}{changing}"


def profiled_runs(overview: Overview) -> list[ProfiledRun]:
    """Return the completed runs whose step was profiled, one of each group of repeats."""
    completed = [group for group in overview.groups if group.completed]
    found = [[ProfiledRun(group, row, read_ranks(row.record)) for row in group.counted_rows] for group in completed]
    first = (next((run for run in runs if run.ranks), None) for runs in found)
    return [run for run in first if run is not None]


@dataclass(frozen=True)
class StepUnit:
    """What the steps of some runs are divided by, so that a comparison is fair."""

    per_sample: bool  # times of a sample, because the steps have different numbers of samples
    of_median: bool = False  # times scaled, so that a step is as long as the median of those without the profiler

    @property
    def title(self) -> str:
        """Return the title of the axis."""
        return "ms per sample" if self.per_sample else "ms per step"

    def convert(self, run: ProfiledRun, milliseconds: float) -> float:
        """Return a time of a run in this unit."""
        batch = run.samples if self.per_sample else None
        scale = run.median_ms / run.slowest.step_ms if self.of_median and run.median_ms else 1.0
        return milliseconds * scale / (batch or 1)


def fair_unit(runs: Sequence[ProfiledRun]) -> StepUnit:
    """Return the unit: per sample if the runs have different global batches, and all are known."""
    batches = {run.samples for run in runs}
    return StepUnit(per_sample=len(batches) > 1 and None not in batches)


def bar_unit(runs: Sequence[ProfiledRun]) -> StepUnit:
    """Return the fair unit of bars, scaled to the medians if any profiled step differs and all medians are known."""
    of_median = any(run.differs for run in runs) and all(run.median_ms is not None for run in runs)
    return replace(fair_unit(runs), of_median=of_median)


def build_step_table(overview: Overview, runs: Sequence[ProfiledRun]) -> TextTable:
    """Build the table: the slowest rank of each run, or all ranks of the only one."""
    shown = [(run, step) for run in runs for step in (run.ranks if len(runs) == 1 else (run.slowest,))]
    labels = overview.label_columns([run.row.label for run, _ in shown], [run.group for run, _ in shown])
    labels["rank"] = [str(step.rank) for _, step in shown]
    more = f"{len(shown) - MAX_ROWS} more rows are in the records." if len(shown) > MAX_ROWS else ""
    note = " ".join(filter(None, (NOTE, SLOWEST_NOTE if len(runs) > 1 else "", more)))
    unit = fair_unit(runs)
    columns = {**labels, "step (ms)": [f"{step.step_ms:,.2f}" for _, step in shown]}
    if any(run.differs for run in runs):
        columns["median of the other steps (ms)"] = [
            NOT_MEASURED if run.median_ms is None else f"{run.median_ms:,.2f}" for run, _ in shown
        ]
    if unit.per_sample:
        columns[unit.title] = [f"{unit.convert(run, step.step_ms):,.3f}" for run, step in shown]
    for name, title in {**PARTS, HIDDEN: "hidden communication"}.items():
        shares = [None if (ms := step.parts[name]) is None else 100 * ms / step.step_ms for _, step in shown]
        if name == "bubble" and not any(shares):
            continue
        columns[title] = [cell(share, ".1f") for share in shares]
    columns["bottleneck"] = [_bottleneck(run) for run, _ in shown]
    table = TextTable.from_columns("Parts of the median profiled step (%)", columns, note, num_labels=len(labels))
    return replace(table, rows=table.rows[:MAX_ROWS])


def _bottleneck(run: ProfiledRun) -> str:
    explanation = run.row.record.metrics.explanation or {}
    name, share = texts_of(explanation, "loss"), number_of(explanation, "share")
    if not name:
        return NOT_MEASURED
    if name == ["compute"]:
        return "none: compute"
    return PARTS.get(name[0], name[0].replace("_", " ")) + ("" if share is None else f", {share:.0%}")


@dataclass(frozen=True)
class Span:
    """An interval of a lane, in milliseconds since the start of the step."""

    begin_ms: float
    end_ms: float
    label: str


@dataclass(frozen=True)
class RankLanes:
    """The lanes of a rank by title."""

    rank: int
    step_ms: float
    lanes: dict[str, tuple[Span, ...]]


def read_lanes(run_dir: Path) -> tuple[RankLanes, ...]:
    """Return the lanes of all ranks of a run; empty if it was not profiled, or if the file is damaged."""
    content = read_profile_summary(run_dir)
    if content is None:
        return ()
    labels, found = texts_of(content, "labels"), []
    for entry in _dicts(content.get("ranks")):
        rank, step = number_of(entry, "rank"), number_of(entry, "step_ms")
        spans = {
            str(lane.get("name")): tuple(_read_spans(lane.get("spans"), labels)) for lane in _dicts(entry.get("lanes"))
        }
        drawn = {title: spans[name] for name, title in LANES.items() if spans.get(name)}
        if rank is not None and step and drawn:
            found.append(RankLanes(int(rank), step, drawn))
    return tuple(sorted(found, key=lambda lane: lane.rank))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _read_spans(spans: Any, labels: Sequence[str]) -> Iterator[Span]:
    for span in spans[:MAX_SPANS] if isinstance(spans, list) else ():
        if matches(span, list[float]) and len(span) == 3 and None not in span and 0 <= span[2] < len(labels):
            label = labels[int(span[2])]
            yield Span(float(span[0]), float(span[1]), TITLES.get(label, label))
