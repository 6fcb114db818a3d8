"""Table and summary of the states of a sweep's runs, why cells are invalid, and lines about what is running."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distexp.config.overrides import format_runs
from distexp.console.run_summary import format_loss, status_color
from distexp.runs.memory_trace import COLUMNS, CPU, GPU
from distexp.runs.record import RunRecord
from distexp.runs.run_state import RunState, read_progress
from distexp.system.files import Tail, one_line
from distexp.system.units import format_about, format_memory

MIN_DETAIL_WIDTH = 20
COLUMN_GAP = 2
HIDEABLE = ("overrides", "job", "folder")  # the first one is hidden first
MIN_SPREAD = 1.5  # longest over shortest duration from which both are printed
TRAIN = "train"
"""Phase that starts after the first step."""


@dataclass(frozen=True)
class Row:
    """A row of the table: a run, with the overrides of its own, and the folder of its sweep if there are several."""

    run: RunState
    overrides: str = ""
    sweep: str = ""


def states_table(rows: Sequence[Row], width: int) -> Table:
    """Build a table with one row per run, and at least one."""
    table = Table(box=None, padding=(0, COLUMN_GAP, 0, 0))
    widths = column_widths(rows, width)
    for name, size in widths.items():
        table.add_column(name, no_wrap=True, width=size, justify="right" if name == "run" else "left")
    for row in rows:
        run = row.run
        color = status_color(run.state) if run.record is not None else "dim" if run.state == "pending" else "cyan"
        cells = {
            "folder": escape(_truncate_left(row.sweep, widths.get("folder", 0))),
            "run": str(run.number),
            "job": run.job or "",
            "state": f"[{color}]{run.state}[/{color}]",
            "overrides": escape(_truncate_left(row.overrides, widths.get("overrides", 0))),
            "detail": escape(one_line(state_detail(run))),
        }
        table.add_row(*(cells[name] for name in widths))
    return table


def followed_states(rows: Sequence[Row], width: int, followed_s: float) -> Group:
    """Return the table with a line about all runs, and for how many seconds the user has waited for them."""
    counted = count_states([row.run for row in rows])
    return Group(states_table(rows, width), Text(f"{counted}, for {followed_s:,.0f} s", style="dim"))


def column_widths(rows: Sequence[Row], width: int) -> dict[str, int]:
    """Return the widths of the columns that are not empty; "detail" gets the remaining width, if any.

    On a narrow terminal the others are left out, and ``hidden_lines`` has them.
    """
    longest = {
        "folder": min(max(len(row.sweep) for row in rows), width // 4),
        "run": max(len(str(row.run.number)) for row in rows),
        "job": max(len(row.run.job or "") for row in rows),
        "state": max(len(row.run.state) for row in rows),
        "overrides": min(max(len(row.overrides) for row in rows), width // 3),
    }
    widths = {name: max(len(name), size) for name, size in longest.items() if size}
    while (detail := width - sum(widths.values()) - COLUMN_GAP * (len(widths) + 1)) < MIN_DETAIL_WIDTH:
        hidden = next((name for name in HIDEABLE if name in widths), None)
        if hidden is None:
            break
        del widths[hidden]
    return {**widths, "detail": max(1, detail)}


def hidden_lines(rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield a line for each run with what the table has no room for: job, overrides and results."""
    widths = column_widths(rows, width)
    for row in rows:
        run, detail = row.run, state_detail(row.run)
        known = {"job": run.job and f"job {run.job}", "overrides": row.overrides}
        hidden = [text for name, text in known.items() if text and name not in widths]
        if detail != run.reason and len(detail) > widths["detail"]:
            hidden.append(one_line(detail))
        if hidden:
            yield f"{row.sweep and f'{row.sweep}: '}run {run.number}: {', '.join(hidden)}"


def truncated_reasons(rows: Sequence[Row], width: int) -> list[str]:
    """Return the full text of each reason that the table truncates, with all runs of a sweep that have it."""
    detail_width = column_widths(rows, width)["detail"]
    groups: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        run = row.run
        if state_detail(run) == run.reason and len(run.reason) > detail_width:
            groups.setdefault((row.sweep, f"{run.state}: {run.reason}"), []).append(run.number)
    return [f"{sweep and f'{sweep}: '}{format_runs(numbers)} {text}" for (sweep, text), numbers in groups.items()]


def count_states(runs: Sequence[RunState]) -> str:
    """Count the runs of each state: ``3 completed, 1 pending``."""
    return ", ".join(f"{count} {state}" for state, count in Counter(run.state for run in runs).items())


def state_detail(run: RunState) -> str:
    """Return why a run is waiting, how far it is, its results, or why it failed."""
    if run.state in ("running", "ending"):
        progress = f"{read_progress(run.directory)}" + (f" on {run.nodes}" if run.nodes else "")
        return f"{progress}, {run.reason}" if run.reason else progress
    if run.record is not None and run.record.status == "completed":
        loss, speed = run.record.metrics.train_loss, run.record.metrics.train_samples_per_second
        parts = ["" if loss is None else f"train loss {loss:.4f}", "" if speed is None else f"{speed:,.1f} samples/s"]
        return ", ".join(filter(None, parts))
    return run.reason


def describe_state(run: RunState) -> str:
    """Return the state of a run and its detail in one line."""
    detail = state_detail(run)
    return f"{run.state}: {detail}" if detail else run.state


def state_key(run: RunState) -> str:
    """Return a text that changes with the run's state, nodes, reason or phase, but not with every step."""
    if run.state == "running":
        return f"running {run.nodes}{read_progress(run.directory).phase or 'start'}"
    return f"{run.state}{run.nodes}{run.reason}"


def _truncate_left(text: str, size: int) -> str:
    """Shorten a text on the left; the rightmost override varies fastest."""
    return text if len(text) <= size else "…" + text[len(text) - size + 1 :]


class InvalidCells:
    """The reasons of the invalid cells of a sweep, and which ones were printed."""

    def __init__(self, reasons: Iterable[str]) -> None:
        """Count the cells of each reason."""
        self._counts = Counter(reasons)
        self._printed: set[str] = set()

    def label(self, number: int, reason: str) -> str | None:
        """Return which runs a reason concerns: ``run 0 and 3 more``. None if the reason was printed before."""
        if reason in self._printed:
            return None
        self._printed.add(reason)
        others = self._counts[reason] - 1
        return f"run {number}" + (f" and {others} more" if others > 0 else "")


@dataclass
class SweepProgress:
    """Progress of a sweep on this machine, as numbers of cells. Those that train are runs; the others are invalid."""

    cells: int
    runs: int
    ended: int = 0
    durations: list[tuple[str, float]] = field(default_factory=list)  # status and seconds, with the start of processes
    ended_runs: int = 0
    started: float | None = None

    def start(self) -> None:
        """Note the time at which a cell starts."""
        self.started = time.monotonic()

    def add(self, record: RunRecord) -> None:
        """Count a cell that has ended, or was done before."""
        self.ended += 1
        if record.status == "invalid":
            return
        self.ended_runs += 1
        if self.started is not None:
            self.durations.append((record.status, time.monotonic() - self.started))

    def line(self) -> str | None:
        """Return ``2 of 8 done, about 50 s left``; None for a single run and at the end."""
        left = self.runs - self.ended_runs
        if self.cells == 1 or left <= 0:
            return None
        return f"{self.ended} of {self.cells} done, {self._time_left(left)}"

    def live_lines(self) -> Iterator[ProgressLine]:
        """Yield the line of a live display, unless there is one run. The time left gets shorter while a run trains."""
        if self.cells == 1:
            return
        elapsed = 0.0 if self.started is None else time.monotonic() - self.started
        known = self._time_left(self.runs - self.ended_runs, elapsed)
        text = known if self.durations else "time left unknown"
        yield ProgressLine("sweep", self.ended, self.cells, [(f"{self.ended}/{self.cells} done", 9), (text, 1)])

    def _time_left(self, runs: int, elapsed_s: float = 0.0) -> str:
        """Return the remaining time, from the median of completed runs. A failed one may have ended early."""
        completed = [seconds for status, seconds in self.durations if status == "completed"]
        known = sorted(completed or [seconds for _, seconds in self.durations])
        if not known:
            return "time left unknown until a run has ended"
        spread = f" (runs took {known[0]:,.0f} to {known[-1]:,.0f} s)" if known[-1] > MIN_SPREAD * known[0] else ""
        return f"about {format_about(max(0.0, runs * statistics.median_low(known) - elapsed_s))} left{spread}"


BAR_WIDTH, MIN_BAR_WIDTH, GAP = 24, 6, 2


@dataclass
class ProgressLine:
    """A line with a bar. On a narrow terminal the bar gets shorter, and the parts of least importance are left out."""

    title: str
    completed: float
    total: float | None  # None: there is no bar
    parts: Sequence[tuple[str, int]]  # Each text with its importance.

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept, bar = [part for part in self.parts if part[0]], MIN_BAR_WIDTH + GAP if self.total else 0
        needed = bar + cell_len(self.title)
        while len(kept) > 1 and needed + sum(cell_len(text) + GAP for text, _ in kept) > options.max_width - 1:
            kept.remove(min(kept, key=lambda part: part[1]))
        left = options.max_width - 1 - needed - sum(cell_len(text) + GAP for text, _ in kept)
        table = Table.grid(padding=(0, GAP, 0, 0))
        cells: list[RenderableType] = [Text(self.title, style="bold")]
        if self.total:
            width = max(MIN_BAR_WIDTH, min(BAR_WIDTH, MIN_BAR_WIDTH + left))
            cells.append(ProgressBar(self.total, min(self.completed, self.total), width=width))
        cells += [Text(text) for text, _ in kept]
        for _ in cells:
            table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_row(*cells)
        yield table


class RunLine:
    """Line about a running run: its phase and the duration of that, and from the first step on its progress."""

    def __init__(self, memory: Sequence[Tail] = ()) -> None:
        """Start with the imports of the workers. ``memory`` are the traces of the nodes."""
        self.phases = [("imports", time.time())]  # Name and start in Unix seconds of the phases before the first step.
        self.phase, self.note = "imports", ""
        self.step, self.passed, self.total = 0, 0, 0  # of the last line of the metrics, and of the latest step
        self._loss, self._speed = "", ""
        self._memory, self._used = memory, dict[tuple[Path, str, str], float]()
        self._first: tuple[float, int] | None = None  # time in Unix seconds and step of the first line of the metrics
        self._last_s = 0.0

    def add_event(self, event: Mapping[str, Any]) -> str:
        """Take up a line of the events. If the training starts, return how long each phase before it took."""
        self.total = event.get("total_steps", self.total)
        phase, now = event.get("phase") or event.get("preparing"), event.get("unix_time_s", time.time())
        if "compiling" in event:
            self.note = f"train.compile={event['compiling']}"
        elif phase is not None:
            starts_training = phase == TRAIN and not self._has_started
            self.phase, self.note = phase, ""
            if not self._has_started:
                self.phases.append((phase, now))
            return self._durations() if starts_training else ""
        return ""

    def add_build(self, entry: Mapping[str, Any]) -> None:
        """Take up a line about the build of operators."""
        if "step" in entry:
            self.note = f"DeepSpeed's operators, step {entry['step']} of {entry['steps']}"
        elif entry.keys() & {"compiled_s", "waited_s"}:
            self.note = ""
        else:
            self.note = "DeepSpeed's operators"

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        """Take up a line of the metrics."""
        self.step, self._last_s = metrics["step"], time.time()
        self._first = self._first or (self._last_s, self.step)
        self._loss = f"loss {format_loss(metrics['loss'])}"
        self._speed = f"{metrics['samples_per_second']:,.1f} samples/s"

    @property
    def _has_started(self) -> bool:
        return self.phases[-1][0] == TRAIN

    def _durations(self) -> str:
        seconds: dict[str, float] = {}
        for (name, start), (_, end) in pairwise(self.phases):
            seconds[name] = seconds.get(name, 0.0) + max(0.0, end - start)
        listed = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items())
        return f"the training starts after {sum(seconds.values()):.1f} s: {listed}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.total or not self._has_started:
            waited = f"{time.time() - self.phases[-1][1]:.0f} s"
            yield ProgressLine(self.phase, 0, None, [(self.note, 2), (waited, 3), (self.used_memory(), 1)])
            return
        step = max(self.step, self.passed)
        parts = [(f"{step}/{self.total}", 9), (self._loss, 4), (self._speed, 2), (self.used_memory(), 1)]
        yield ProgressLine(self.phase, step, self.total, [*parts, (self._time_left(), 3)])

    def used_memory(self) -> str:
        """Return the memory in use: of the GPU with the most, else of the node with the most."""
        for tail in self._memory:
            for line in tail.read_lines():
                with suppress(ValueError, KeyError):  # the header, or a value that could not be read
                    sample = dict(zip(COLUMNS, line.split(","), strict=False))
                    self._used[tail.path, sample["kind"], sample["index"]] = float(sample["used_mib"])
        kind = GPU if any(device[1] == GPU for device in self._used) else CPU
        used = [mib for device, mib in self._used.items() if device[1] == kind]
        return f"{kind.upper()} {format_memory(max(used))}" if used else ""

    def _time_left(self) -> str:
        """Return the remaining time, from the time between the first and the last line of the metrics."""
        if self._first is None or self.step <= self._first[1] or self.step >= self.total:
            return ""
        seconds_per_step = (self._last_s - self._first[0]) / (self.step - self._first[1])
        left = seconds_per_step * (self.total - self.step) - (time.time() - self._last_s)
        return f"{format_about(max(0.0, left))} left"
