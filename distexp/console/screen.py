"""What a person sees: progress while a run goes on, a panel when it is done, a table after a sweep.

A run is followed through the files it writes (``events.jsonl``, ``metrics.jsonl``, rank 0's log), so
that the workers draw nothing, and a run on another machine can be followed in the same way.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from distexp.launch.sweep import Cell
from distexp.report.table import build_exercise_tables, build_overview_table
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import log_path
from distexp.runs.spec import RunSpec

MOST_EPOCHS = 6  # in a panel
COLORS = {"completed": "green", "invalid": "yellow", "oom_gpu": "magenta", "oom_host": "magenta"}


@dataclass
class Tail:
    """The new lines of a growing file."""

    path: Path
    position: int = 0
    rest: str = ""

    def lines(self) -> list[str]:
        """Whole lines written since the last call."""
        if not self.path.exists():
            return []
        with self.path.open(errors="replace") as file:
            file.seek(self.position)
            self.rest += file.read()
            self.position = file.tell()
        *whole, self.rest = self.rest.split("\n")
        return whole

    def records(self) -> list[dict[str, Any]]:
        """New lines as JSON."""
        return [json.loads(line) for line in self.lines()]


@dataclass
class Live:
    """One run on the screen."""

    console: Console
    events: Tail
    metrics: Tail
    log: Tail
    progress: Progress | None = None
    task: TaskID | None = None
    total: int | None = None
    resumed_from: int = 0  # the step up to which the lines are of an earlier attempt
    latest: str = ""

    def refresh(self) -> None:
        """Shows what has been written since the last call."""
        for line in self.log.lines():
            self._print(f"[dim]{escape(line)}[/dim]")
        events = self.events.records()
        for event in events:
            self.total = event.get("total_steps", self.total)
            self.resumed_from = event.get("resumed_from_step", self.resumed_from)
        for metrics in self.metrics.records():
            if metrics["step"] > self.resumed_from:
                self._step(metrics)
        for event in events:
            self._event(event)

    def _event(self, event: dict[str, Any]) -> None:
        if "eval_loss" in event:
            accuracy = event["eval_accuracy"]
            more = "" if accuracy is None else f", accuracy {accuracy:.1%}, top-5 {event['eval_top5_accuracy']:.1%}"
            self._print(
                f"epoch {event['epoch']}: train loss {_loss(event['train_loss'])}, "
                f"eval loss {_loss(event['eval_loss'])}{more}"
            )
        elif "exact_match" in event:
            self._print(f"answers: {_answers(event['exact_match'], event['f1'])}")
        elif "phase" in event and self.progress is not None and self.task is not None:
            self.progress.update(self.task, description=event["phase"], total=self.total)

    def _step(self, metrics: dict[str, Any]) -> None:
        rate = metrics["samples_per_second"]
        self.latest = f"loss {_loss(metrics['loss'])}  {rate:,.1f} samples/s"
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=metrics["step"], latest=self.latest)
        else:
            self._print(f"step {metrics['step']}/{self.total}: {self.latest}")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


class Screen:
    """The terminal of one command: a live bar where there is one, plain lines otherwise."""

    def __init__(self, total: int, sweep_dir: Path) -> None:
        self.console = Console()
        self.total, self.sweep_dir = total, sweep_dir
        self.begun = 0
        self.records: list[RunRecord] = []

    def headline(self, cell: Cell) -> None:
        """Which run of a sweep begins; nothing for a single one."""
        self.begun += 1
        if self.total > 1:
            what = " ".join(cell.varied).replace("'", "")
            title = f"run {self.begun} of {self.total}: {escape(what)}"
            if len(title) + 4 > self.console.width:  # a rule would cut it
                self.console.print(title, highlight=False, soft_wrap=True)
            else:
                self.console.rule(title, align="left")

    @contextmanager
    def follow(self, spec: RunSpec, directory: Path) -> Iterator[Live]:
        """Shows a run until the block ends."""
        self.console.print(f"[bold]{describe(spec)}[/bold]\n{directory}", highlight=False, soft_wrap=True)
        live = Live(
            self.console,
            events=Tail(directory / "events.jsonl"),
            metrics=Tail(directory / "metrics.jsonl"),
            log=Tail(log_path(directory, 0, 0)),
        )
        if not self.console.is_terminal:
            yield live
            live.refresh()
            return
        columns = (
            TextColumn("{task.description:>7}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[latest]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            live.progress, live.task = progress, progress.add_task("start", total=None, latest="")
            yield live
            live.refresh()

    def tell(self, sentence: str) -> None:
        """What a person should know before the runs begin."""
        self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def kept(self, record: RunRecord) -> None:
        """A run of a resumed sweep that was done already."""
        self.begun += 1
        self.records.append(record)
        self.console.print(f"run {record.run.number}: {record.status} already", highlight=False)

    def invalid(self, record: RunRecord) -> None:
        """A cell that cannot run, and why, which is said once."""
        assert record.error is not None
        alike = [each for each in self.records if each.error and each.error.message == record.error.message]
        why = f"as run {alike[0].run.number}" if alike else escape(record.error.message)
        self.console.print(f"run {record.run.number} [yellow]invalid[/yellow]: {why}", highlight=False)
        self.records.append(record)

    def done(self, record: RunRecord, told: Sequence[str] = ()) -> None:
        """The summary of a run, and what its tracker told."""
        self.records.append(record)
        color = COLORS.get(record.status, "red")
        grid = Table.grid(padding=(0, 2))
        for name, value in summary(record):
            grid.add_row(f"[dim]{name}[/dim]", escape(value))
        title = f"[{color}]{record.status}[/{color}]"
        self.console.print(Panel(grid, title=title, title_align="left", border_style=color, expand=False))
        for sentence in told:
            self.console.print(escape(sentence), highlight=False, soft_wrap=True)

    def interrupted(self) -> None:
        """How an interrupted sweep goes on, and what it lacks."""
        left = self.total - self.begun
        rest = f"{left} run{'s were' if left > 1 else ' was'} not started; " if left else ""
        self.tell(f"{rest}to go on: python -m distexp.resume {shlex.quote(str(self.sweep_dir))}")

    def compare(self) -> None:
        """The table after a sweep; for a single run that of its exercise, if it is one."""
        if len(self.records) < 2:
            if self.records and self.records[0].config.get("exercise"):
                self.console.print(build_exercise_tables(self.records))
            return
        self.console.print(build_overview_table(self.records))
        self.console.print(f"records: {self.sweep_dir}", highlight=False, soft_wrap=True)


def describe(spec: RunSpec) -> str:
    """``bloom_tiny on squad_sample, fsdp full_shard, 2 cpu workers``, or what is measured without a training."""
    config = spec.config
    workers = f"{spec.world_size} {config.cluster.device} worker{'s' if spec.world_size > 1 else ''}"
    nodes = f" on {spec.nodes} nodes" if spec.nodes > 1 else ""
    if config.preflight.only:
        return f"preflight of {workers}{nodes}"
    knob = {
        "fsdp": f" {config.fsdp.sharding}",
        "deepspeed": f" ZeRO-{config.deepspeed.zero_stage}",
    }.get(config.strategy.name, "")
    offload = ", offloaded" if config.offload.enabled else ""
    engine = "" if config.engine.name == "native" else f" by {config.engine.name}"
    return (
        f"{_model_label(config.model.name)} on {config.dataset.name}, {config.strategy.name}{knob}{offload}{engine}, "
        f"{config.precision.name}, {workers}{nodes}"
    )


def _model_label(name: str) -> str:
    """A model's name; of a folder its last part."""
    return Path(name).name if Path(name).is_absolute() else name


def summary(record: RunRecord) -> Iterator[tuple[str, str]]:
    """The lines of a run's panel."""
    metrics, built = record.metrics, record.built
    if record.error is not None:
        known = {"phase": record.error.phase, "rank": record.error.rank}
        where = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
        yield "error", f"{record.error.type}: {record.error.message}" + (f" ({where})" if where else "")
    if record.preflight is not None:
        yield "interconnect", _interconnect(record.preflight)
    if built is not None:
        yield (
            "built",
            f"{built.wrapper}, mesh {built.mesh}, {built.parameters:,} parameters, {built.optimizer}",
        )
    if metrics.train_losses:
        yield "train loss", _by_epoch(map(_loss, metrics.train_losses))
        yield "eval loss", _by_epoch(map(_loss, metrics.eval_losses))
    if metrics.eval_accuracies:
        yield "eval accuracy", _by_epoch(f"{value:.1%}" for value in metrics.eval_accuracies)
    if metrics.eval_top5_accuracies:
        yield "eval top-5", _by_epoch(f"{value:.1%}" for value in metrics.eval_top5_accuracies)
    if metrics.exact_match is not None and metrics.f1 is not None:
        yield "answers", _answers(metrics.exact_match, metrics.f1)
    yield from _speed(record)
    memory = [
        *(f"GPU {entry['index']} of node {entry['node']} {_mib(entry['peak_mib'])}" for entry in record.memory["gpu"]),
        *(f"CPU of node {entry['node']} {_mib(entry['peak_mib'])}" for entry in record.memory["cpu"]),
    ]
    if memory:
        yield "peak memory", ", ".join(memory)
    if metrics.train_runtime is not None:
        yield (
            "runtime",
            f"{metrics.train_runtime:.1f} s training and evaluation, {record.run.duration_s:.1f} s in all",
        )


def _by_epoch(texts: Iterable[str]) -> str:
    """A figure from epoch to epoch; of many the first two and the last three."""
    epochs = list(texts)
    shown = epochs if len(epochs) <= MOST_EPOCHS else [*epochs[:2], "...", *epochs[-3:]]
    return " -> ".join(shown)


def _speed(record: RunRecord) -> Iterator[tuple[str, str]]:
    metrics = record.metrics
    if metrics.train_samples_per_second is not None:
        yield "throughput", f"{metrics.train_samples_per_second:,.1f} samples/s"
    elif record.built is not None:
        yield "throughput", "not measured: no step after train.measure_after_step"
    if metrics.step_time_s is not None:
        yield "step time", f"{metrics.step_time_s['p50'] * 1000:.1f} ms median"
    if metrics.communication is not None:
        yield "communication", _communication(metrics.communication)


def _interconnect(preflight: dict[str, Any]) -> str:
    """The bus bandwidth of the largest all-reduce over all ranks."""
    reduces = [one for one in preflight["measurements"] if (one["group"], one["operation"]) == ("all", "all_reduce")]
    if not reduces:
        return "not measured: single worker"
    largest = max(reduces, key=lambda one: int(one["bytes"]))
    return (
        f"{largest['busbw_gbps']:.2f} GB/s bus bandwidth, all_reduce of {largest['bytes'] / 2**20:,.0f} MiB over "
        f"{preflight['backend']}"
    )


def _communication(found: dict[str, Any]) -> str:
    """The share of it in the profiled steps."""
    if found["share"] is None:
        return f"not measured: {found['note']}"
    exposed = "" if found["exposed_share"] is None else f" ({found['exposed_share']:.0%} not hidden behind computing)"
    steps = f"{found['profiled_steps']} step{'s' if found['profiled_steps'] > 1 else ''}"
    return f"{found['share']:.0%} of a step{exposed}, in the {steps} of profile/rank0.json.gz"


def _mib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f} MiB"


def _answers(exact_match: float, f1: float) -> str:
    return f"exact match {exact_match:.1f}%, F1 {f1:.1f}%"


def _loss(value: float | None) -> str:
    """A loss; JSON has no number for one that is not finite."""
    return "nan" if value is None else f"{value:.4f}"
