"""Output of the trials of a search: a progress bar on a terminal, and a line for each trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from distexp.console.screen import LiveRun, Screen
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import TRIALS_LOG
from distexp.runs.spec import RunSpec
from distexp.runs.texts import failure_text


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
        self.print(trial_line(record, self.labels.get(record.run.number, "")))

    def show_invalid(self, record: RunRecord) -> None:
        """Print a line about a trial that cannot run."""
        self.show_result(record, self.sweep_dir)


def trial_line(record: RunRecord, label: str) -> str:
    """Return a line: ``trial 3: fsdp full_shard, micro-batch 16 x 2: 812.0 samples/s, 23 steps, 31 s``."""
    metrics, number = record.metrics, record.run.number
    time = f"{record.run.duration_s or 0.0:,.0f} s"
    if record.status != "completed":
        return f"trial {number}: {label}: {record.status} after {time}: {failure_text(record)}"
    speed = metrics.train_samples_per_second
    shown = "speed unknown" if speed is None else f"{speed:,.1f} samples/s"
    return f"trial {number}: {label}: {shown}, {metrics.total_steps} steps, {time}"
