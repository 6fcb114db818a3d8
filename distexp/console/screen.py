"""Live view of local runs: progress, then a panel, and a table after a sweep; for trials of a search a line each.

A run is followed through the files it writes (``events.jsonl``, ``metrics.jsonl``, rank 0's log). The workers
therefore draw nothing, and a run on another machine can be followed in the same way.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from distexp.config.overrides import format_count, suggest_command
from distexp.console.run_summary import (
    build_message,
    format_answer_scores,
    format_loss,
    most_important_first,
    run_title,
    status_color,
    summary_lines,
)
from distexp.console.sweep_table import InvalidCells, RunLine, SweepProgress
from distexp.exceptions import discard_output, printable
from distexp.report.data.overview import Overview
from distexp.report.overview_table import ExerciseTables, build_overview_table
from distexp.runs.attempts import ERROR_HEADING
from distexp.runs.events import read_rank_progress
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.run_dir import EVENTS, METRICS, OPERATORS, RANK_LOG, RECORD, TRIALS_LOG, memory_trace_path
from distexp.runs.texts import failure_text, print_despite_full_disk
from distexp.system.files import Tail
from distexp.tables.columns import live_display, shows_live_lines

# Line that DeepSpeed prints in every run that loads an operator, also if nothing was built. It stays in the log.
OPERATOR_LOADED = re.compile(r"DeepSpeed \S+_op built successfully")
MAX_RESULT_LINES = 12  # at the end of a run


@dataclass
class LiveRun:
    """Live view of one run."""

    console: Console
    events: Tail
    metrics: Tail
    log: Tail
    line: RunLine | None = None  # on a terminal; None for plain lines
    total_steps: int | None = None
    resumed_from: int = 0  # lines up to this step are from an earlier attempt
    operators: Tail | None = None
    build_console: Console | None = None  # for the build of operators; None: console
    failed: bool = False  # the log has reached the error, which the panel shows in short
    show: Callable[[], None] = lambda: None  # draws the line

    def refresh(self) -> None:
        """Show what the run has written since the last call."""
        for line in self.log.read_lines():
            # A library may print in front of it without a new line, as torch does if a data loader process crashes.
            self.failed = self.failed or line.endswith(ERROR_HEADING)
            if not self.failed and not OPERATOR_LOADED.fullmatch(line):
                self._print(f"[dim]{escape(printable(line))}[/dim]")
        for entry in self.operators.read_entries() if self.operators else []:
            message = build_message(entry)
            if message is not None and ("step" not in entry or self.line is None):
                (self.build_console or self.console).print(escape(printable(message)), highlight=False, soft_wrap=True)
            if self.line is not None:
                self.line.add_build(entry)
        events = self.events.read_entries()
        for event in events:
            self.total_steps = event.get("total_steps", self.total_steps)
            self.resumed_from = event.get("resumed_from_step", self.resumed_from)
        for metrics in self.metrics.read_entries():
            if metrics["step"] > self.resumed_from:
                self._show_step(metrics)
        for event in events:
            self._show_event(event)
        if self.line is not None:  # The progress of the ranks has each step, and the metrics have few of them.
            self.line.passed = min((rank.step for rank in read_rank_progress(self.metrics.path.parent, 0)), default=0)
        self.show()

    def _show_event(self, event: dict[str, Any]) -> None:
        if self.line is not None and (durations := self.line.add_event(event)):
            self._print(f"[dim]{durations}[/dim]")
        if "epoch" in event:
            losses = f"train loss {format_loss(event['train_loss'])}"
            if "eval_loss" in event:
                losses += f", eval loss {format_loss(event['eval_loss'])}"
            if (accuracy := event.get("eval_accuracy")) is not None:
                losses += f", accuracy {accuracy:.1%}, top-5 {event['eval_top5_accuracy']:.1%}"
            self._print(f"epoch {event['epoch']}: {losses}")
        elif "exact_match" in event:
            self._print(f"answers: {format_answer_scores(event['exact_match'], event['f1'])}")
        elif "compiling" in event and self.line is None:
            self._print(f"compiling train.compile={event['compiling']}, {event['elapsed_s']:.0f} s")

    def _show_step(self, metrics: dict[str, Any]) -> None:
        if self.line is not None:
            self.line.add_step(metrics)
            return
        total = "" if self.total_steps is None else f"/{self.total_steps}"
        latest = f"loss {format_loss(metrics['loss'])}  {metrics['samples_per_second']:,.1f} samples/s"
        self._print(f"step {metrics['step']}{total}: {latest}")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


class RunConsole(Console):
    """A console whose command continues without output if it cannot be written, as on a full disk."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects. Raise BrokenPipeError if the program that read the output has ended."""
        try:
            super().print(*objects, **options)
        except BrokenPipeError:
            raise
        except OSError as error:
            discard_output(self.file)
            stream = "standard error" if self.stderr else "standard output"
            lost = f"{stream} cannot be written ({error.strerror}), so the command continues without it"
            print_despite_full_disk(f"distexp: warning: {lost}")


class Screen:
    """Output of one command: a progress bar on a terminal, else plain lines.

    Cells that have started, were skipped or are invalid are ``shown``, of a ``total`` in the sweep.
    """

    def __init__(self, total: int, sweep_dir: Path, *, invalid: Sequence[str] = ()) -> None:
        """Create the screen of a command, given the reason of each invalid cell."""
        self.console: Console = RunConsole(emoji=False)  # A path or a log may contain ``:key:``.
        self.total, self.sweep_dir = total, sweep_dir
        self.sweep = SweepProgress(total, total - len(invalid))
        self.invalid = InvalidCells(invalid)
        self.shown = 0
        self.records: list[RunRecord] = []
        self._since = psutil.Process().create_time()  # Unix time in seconds: since when the user waits for a result

    def run_header(self, number: int, overrides: str) -> None:
        """Print which run of a sweep starts, with the overrides of its own; print nothing for a single run."""
        self.shown += 1
        self.sweep.start()
        if self.total == 1:
            return
        if not shows_live_lines(self.console) and (line := self.sweep.line()):
            self.print(line)
        title = f"run {number} ({self.shown} of {self.total}): {_plain(overrides)}"
        if len(title) + 4 > self.console.width:  # a rule would truncate it
            self.console.print(title, highlight=False, soft_wrap=True)
        else:
            self.console.rule(title, align="left")

    @contextmanager
    def follow(self, spec: RunSpec, directory: Path) -> Iterator[LiveRun]:
        """Show a run until the block ends."""
        self.show_start(spec, directory)
        events, metrics, operators = (Tail(directory / name) for name in (EVENTS, METRICS, OPERATORS))
        live = LiveRun(self.console, events, metrics, Tail(RANK_LOG.path(directory, 0, 0)), operators=operators)
        with live_display(self.console) as show:
            if show is not None:
                live.line = line = RunLine([Tail(memory_trace_path(directory, node)) for node in range(spec.nodes)])
                live.show = lambda: show(Group(line, *self.sweep.live_lines()))
            yield live
            live.refresh()

    def show_start(self, spec: RunSpec, directory: Path) -> None:
        """Print which run starts, and its directory."""
        self.console.print(
            f"[bold]{_plain(run_title(spec))}[/bold]\n{escape(str(directory))}", highlight=False, soft_wrap=True
        )

    def print(self, message: str) -> None:
        """Print a message as it is."""
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def show_skipped(self, record: RunRecord) -> None:
        """Print that a resumed sweep keeps a finished run."""
        self.shown += 1
        self._add(record)
        self.print(f"run {record.run.number}: already {record.status}")

    def show_busy(self, number: int, owner: str) -> None:
        """Print that another command runs a run."""
        self.shown += 1
        self.print(f"run {number}: skipped, because {owner} runs it: wait for it, or stop that process")

    def show_invalid(self, record: RunRecord) -> None:
        """Print why a cell is invalid, once for each reason. If no cell is valid, the table has the reasons."""
        self.shown += 1
        reason = failure_text(record)
        label = self.invalid.label(record.run.number, reason) if self.sweep.runs else None
        if label is not None:
            self.console.print(f"{label}: [yellow]invalid[/yellow]: {_plain(reason)}", highlight=False, soft_wrap=True)
        self._add(record)

    def show_result(self, record: RunRecord, directory: Path, messages: Sequence[str] = ()) -> None:
        """Print the panel of a run that has ended, the log with its error, and the messages of its tracker."""
        self._add(record)
        now = time.time()
        waited_s, self._since = now - self._since, now
        color = status_color(record.status)
        log = None if record.error is None or record.error.log is None else f"log: {directory / record.error.log}"
        lines = most_important_first(summary_lines(record, waited_s))
        panel = self._fit_panel(lines, MAX_RESULT_LINES - len(messages) - (log is not None))
        panel.title, panel.title_align, panel.border_style = f"[{color}]{record.status}[/{color}]", "left", color
        self.console.print(panel)
        if log is not None:
            self.print(log)
        for message in messages:
            self.console.print(escape(message), highlight=False, soft_wrap=True)

    def _fit_panel(self, lines: Sequence[tuple[str, str]], height: int) -> Panel:
        """Return the panel with as many lines as fit, and the names of the others. A line may need several rows."""
        for count in range(len(lines), min(1, len(lines)) - 1, -1):
            grid, left = Table.grid(padding=(0, 2)), [name for name, _ in lines[count:]]
            more = [("more", f"{RECORD} has: {', '.join(left)}")] if left else []
            for name, value in (*lines[:count], *more):
                grid.add_row(f"[dim]{name}[/dim]", _plain(value))
            panel = Panel(grid, expand=False)
            if len(self.console.render_lines(panel)) <= height:
                break
        return panel

    def _add(self, record: RunRecord) -> None:
        self.records.append(record)
        self.sweep.add(record)

    def show_interrupted(self) -> None:
        """Print the table of the finished runs, how many have not started, and how to continue the sweep."""
        self.show_comparison()
        left = self.total - self.shown
        not_started = f"{format_count(left, 'run')} not started; " if left else ""
        self.print(f"{not_started}to continue: {suggest_command('resume', self.sweep_dir)}")

    def show_comparison(self) -> None:
        """Print the tables of a sweep or a single run, and the command for the report of a sweep."""
        if not self.records:
            return
        if self.total < 2:
            if self.records[0].config.get("exercise"):
                self.console.print(ExerciseTables(Overview.from_records(self.records)))
            return
        self.console.print(replace(build_overview_table(self.records, self.sweep_dir), is_short=True))
        self.print(f"to draw the report: {suggest_command('report', self.sweep_dir)}")


class TrialScreen(Screen):
    """Output of the local trials of a search, with their labels by number. The logs of workers stay in their files."""

    def __init__(self, sweep_dir: Path, console: Console, labels: Mapping[int, str]) -> None:
        super().__init__(1, sweep_dir)
        self.console, self.labels = console, labels

    def log(self, message: str) -> None:
        """Append a message about the shared start-up to a file. It changes with the strategies that are tried."""
        with (self.sweep_dir / TRIALS_LOG).open("a") as file:
            file.write(f"{message}\n")

    def run_header(self, number: int, overrides: str) -> None:
        """Print nothing before a trial."""

    def show_start(self, spec: RunSpec, directory: Path) -> None:
        """Print nothing at the start of a trial."""

    @contextmanager
    def follow(self, spec: RunSpec, directory: Path) -> Iterator[LiveRun]:
        """Show the progress of a trial on a terminal until the block ends, and the build of operators."""
        with super().follow(spec, directory) as live:
            live.console, live.build_console = Console(quiet=True), self.console
            yield live

    def show_result(self, record: RunRecord, directory: Path, messages: Sequence[str] = ()) -> None:
        """Print a line about a trial that has ended."""
        self.records.append(record)
        self.print(_trial_line(record, self.labels.get(record.run.number, "")))

    def show_invalid(self, record: RunRecord) -> None:
        """Print a line about a trial that cannot run."""
        self.show_result(record, self.sweep_dir)


def _trial_line(record: RunRecord, label: str) -> str:
    """Return a line: ``trial 3: fsdp full_shard, micro-batch 16 x 2: 812.0 samples/s, 23 steps, 31 s``."""
    metrics, number = record.metrics, record.run.number
    time = f"{record.run.duration_s or 0.0:,.0f} s"
    if record.status != "completed":
        return f"trial {number}: {label}: {record.status} after {time}: {failure_text(record)}"
    speed = metrics.train_samples_per_second
    shown = "speed unknown" if speed is None else f"{speed:,.1f} samples/s"
    return f"trial {number}: {label}: {shown}, {metrics.total_steps} steps, {time}"


def _plain(text: str) -> str:
    """Return a text that neither rich nor a terminal interprets."""
    return escape(printable(text))
