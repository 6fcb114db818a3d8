"""What runs wrote while they ran, read back thin enough to be drawn: losses, step times, memory over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup
from distexp.report.data.rows import Row
from distexp.runs.jsonl import read_entries
from distexp.runs.run_dir import MEMORY, METRICS

if TYPE_CHECKING:
    import pandas as pd

MOST_TRACED = 8  # trainings; more curves than colours tell nothing
MOST_POINTS = 240  # of a curve
MEMORY_COLUMNS = ["unix_time_s", "phase", "kind", "index", "used_mib"]


@dataclass(frozen=True)
class Interval:
    """A phase of a run."""

    phase: str
    begin_s: float  # since the first sample
    end_s: float


@dataclass(frozen=True)
class MemoryCurve:
    """The fullest device of a node over time; each point is the most of its stretch of time, so peaks stay."""

    node: int
    kind: str  # gpu, cpu
    points: tuple[tuple[float, float], ...]  # seconds since the first sample, MiB


@dataclass(frozen=True)
class RunTrace:
    """A training with the traces of its first run that counts."""

    group: RunGroup
    row: Row
    name: str
    steps: tuple[dict[str, Any], ...]  # lines of metrics.jsonl
    memory: tuple[MemoryCurve, ...]
    phases: tuple[Interval, ...]

    def curves(self, kind: str) -> list[MemoryCurve]:
        """Those of one kind of memory, by node."""
        return [curve for curve in self.memory if curve.kind == kind]


def load_traces(overview: Overview, chosen: Sequence[str] = ()) -> list[RunTrace]:
    """The traces of some trainings: of the runs with these labels, else of the most telling ones."""
    groups = [group for group in overview.groups if any(row.path for row in group.rows)]
    if chosen:
        groups = [group for group in groups if any(row.label in chosen for row in group.rows)]
    else:
        groups = most_informative(groups)
    names = [overview.format_settings(group) for group in groups]
    return [
        _read(group, chosen, name if name and names.count(name) == 1 else f"run {group.label}")
        for group, name in zip(groups, names, strict=True)
    ]


def most_informative(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """At most MOST_TRACED: the fastest, the smallest, those out of memory, then the others in their order."""
    started = [group for group in groups if group.status != "invalid"]
    if len(started) <= MOST_TRACED:
        return started
    kept: list[RunGroup] = _extremes(started, SPEED, largest=True)[:3]
    memory = next((name for name in MEMORIES if any(group.metric(name) for group in started)), None)
    if memory:
        kept += _extremes(started, memory, largest=False)[:2]
    kept += [group for group in started if "oom" in group.status][:2]
    ids = {id(group) for group in kept}
    for group in started:
        if len(ids) < MOST_TRACED:
            ids.add(id(group))
    return [group for group in started if id(group) in ids]


def _extremes(groups: Sequence[RunGroup], name: str, *, largest: bool) -> list[RunGroup]:
    known = [(figure.mean, n) for n, group in enumerate(groups) if group.completed and (figure := group.metric(name))]
    return [groups[n] for _, n in sorted(known, reverse=largest)]


def _read(group: RunGroup, chosen: Sequence[str], name: str) -> RunTrace:
    preferred = [row for row in group.rows if row.label in chosen] or list(group.counted_rows)
    row = next((row for row in preferred if row.path), group.rows[0])
    assert row.path is not None
    directory = row.path.parent
    memory, phases = read_memory(directory / MEMORY)
    steps = tuple(read_steps(directory / METRICS))
    return RunTrace(group, row, name, steps, tuple(memory), tuple(phases))


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, thinned evenly; a torn line, or a missing file, is passed over."""
    try:
        found = [entry for entry in read_entries(path) if isinstance(entry.get("step"), int)]
    except OSError:
        return []
    stride = max(1, -(-len(found) // MOST_POINTS))
    return [entry for n, entry in enumerate(found) if n % stride == 0 or n == len(found) - 1]


def read_memory(directory: Path) -> tuple[list[MemoryCurve], list[Interval]]:
    """The curves of every node, and the phases as the first node saw them; both empty where nothing was sampled."""
    files = sorted(directory.glob("node*.csv"), key=lambda path: (len(path.name), path.name))
    frames = [(int(path.stem.removeprefix("node")), frame) for path in files
              if path.stem.removeprefix("node").isdigit() and (frame := _frame(path)) is not None]  # fmt: skip
    if not frames:
        return [], []
    start = min(frame["unix_time_s"].iloc[0] for _, frame in frames)
    for _, frame in frames:
        frame["seconds"] = frame["unix_time_s"] - start
    curves = [curve for node, frame in frames for curve in _curves(node, frame)]
    return curves, list(_phases(frames[0][1]))


def _frame(path: Path) -> pd.DataFrame | None:
    import pandas as pd

    try:
        frame = pd.read_csv(path, usecols=MEMORY_COLUMNS, dtype=str, on_bad_lines="skip")
    except (OSError, ValueError):
        return None
    for name in ("unix_time_s", "used_mib"):
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    frame = frame.dropna(subset=["unix_time_s", "used_mib"])
    return frame if len(frame) else None


def _curves(node: int, frame: pd.DataFrame) -> Iterator[MemoryCurve]:
    for kind in ("gpu", "cpu"):
        devices = frame[frame["kind"] == kind]
        if devices.empty:
            continue
        fullest = devices.groupby("seconds", sort=True)["used_mib"].max()
        times = fullest.index.to_series()
        width = (times.iloc[-1] - times.iloc[0]) / MOST_POINTS
        bins = (times // width).astype(int) if len(fullest) > MOST_POINTS and width else times
        peaks = fullest.groupby(bins.to_numpy()).max()
        at = times.groupby(bins.to_numpy()).first()
        points = tuple((round(float(t), 2), round(float(m), 1)) for t, m in zip(at, peaks, strict=True))
        yield MemoryCurve(node, kind, points)


def _phases(frame: pd.DataFrame) -> Iterator[Interval]:
    """Stretches of equal phase; one ends where the next begins."""
    marks = frame.drop_duplicates("seconds").dropna(subset=["phase"])
    if marks.empty:
        return
    changed = marks[marks["phase"] != marks["phase"].shift()]
    begins = [float(second) for second in changed["seconds"]]
    ends = [*begins[1:], float(frame["seconds"].iloc[-1])]
    for phase, begin, end in zip(changed["phase"], begins, ends, strict=True):
        yield Interval(str(phase), round(begin, 2), round(end, 2))
