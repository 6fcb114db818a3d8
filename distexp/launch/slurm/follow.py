"""Following a sweep: what every run does, until all have ended or the watcher leaves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from distexp.console.screen import COLORS, Screen
from distexp.exceptions import MonitoringInterrupted, SweepFailedError
from distexp.launch.slurm.status import ACTIVE, Known, RunState, look
from distexp.runs.progress import progress
from distexp.runs.record import FAILURES, load_all

EARLY_S, QUICK_EVERY_S, EVERY_S = 120.0, 2.0, 10.0
"""The queue is asked every two seconds at first, and every ten after two minutes: others ask it too."""


def follow(sweep_dir: Path, console: Console) -> None:
    """Shows every run until the last has ended; SweepFailedError where one failed.

    Ctrl-C ends the watching alone: MonitoringInterrupted, after a word on how to go on.
    """
    try:
        _until_done(sweep_dir, console)
    except KeyboardInterrupt:
        console.print(
            f"\nThe jobs go on. To follow them: python -m distexp.status {sweep_dir} --watch\n"
            f"To end them:        python -m distexp.cancel {sweep_dir}",
            highlight=False,
            soft_wrap=True,
        )
        raise MonitoringInterrupted from None
    conclude(sweep_dir)


def _until_done(sweep_dir: Path, console: Console) -> None:
    known: Known = {}
    told: dict[int, str] = {}
    started = time.monotonic()
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while True:
            runs = look(sweep_dir, known)
            if console.is_terminal:
                live.update(table(runs, console.width), refresh=True)
            else:
                tell_news(runs, told, console)
            if all(run.state not in ACTIVE for run in runs):
                return
            time.sleep(QUICK_EVERY_S if time.monotonic() - started < EARLY_S else EVERY_S)


def conclude(sweep_dir: Path) -> None:
    """The summary of a single run, the table of several; SweepFailedError where one failed."""
    records = [record for _, record in load_all(sweep_dir)[0]]
    screen = Screen(total=len(records), sweep_dir=sweep_dir)
    if len(records) == 1:
        screen.done(records[0])
    else:
        screen.records.extend(records)
    screen.compare()
    if any(record.status in FAILURES for record in records):
        raise SweepFailedError


def tell_news(runs: Sequence[RunState], told: dict[int, str], console: Console) -> None:
    """A line for each run that stands otherwise than when it was last told of."""
    for run in runs:
        line = f"{run.state}{': ' + detail(run) if detail(run) else ''}"
        mark = f"{run.state}{run.nodes}{run.why}" if run.state != "running" else f"running {run.nodes}{phase(run)}"
        if told.get(run.number) != mark:
            told[run.number] = mark
            console.print(f"run {run.number} (job {run.job}): {line}", highlight=False, markup=False, soft_wrap=True)


def phase(run: RunState) -> str:
    """The phase that a running run is in."""
    return progress(run.directory).phase or "start"


def detail(run: RunState) -> str:
    """Why it waits, how far it is, or what it came to."""
    if run.state in ("running", "ending"):
        return f"{progress(run.directory)}" + (f" on {run.nodes}" if run.nodes else "")
    if run.record is not None and run.record.status == "completed":
        speed = run.record.metrics.train_samples_per_second
        loss = run.record.metrics.train_loss
        parts = ["" if loss is None else f"train loss {loss:.4f}", "" if speed is None else f"{speed:,.1f} samples/s"]
        return ", ".join(part for part in parts if part)
    return run.why


def summary(runs: Sequence[RunState]) -> str:
    """``3 completed, 1 pending``."""
    counts = Counter(run.state for run in runs)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _end(text: str, size: int) -> str:
    """As much of a text as fits: its end, for what is typed last varies first."""
    return text if len(text) <= size else "…" + text[len(text) - size + 1 :]


def widths(runs: Sequence[RunState], width: int, what: dict[int, str]) -> dict[str, int]:
    """Characters of each column of the table, in so many in all; the last has what is left."""
    wide = {
        "run": max(len(str(run.number)) for run in runs),
        "job": max(len(run.job or "") for run in runs),
        "state": max(len(run.state) for run in runs),
        "what": min(max((len(text) for text in what.values()), default=0), width // 3),
    }
    wide = {name: max(len(name), size) for name, size in wide.items() if size}
    return {**wide, "detail": max(20, width - sum(wide.values()) - 2 * (len(wide) + 1))}


def table(runs: Sequence[RunState], width: int, what: dict[int, str] | None = None) -> Table:
    """All runs of a sweep, a row each, in so many columns of characters."""
    what = what or {}
    grid = Table(box=None, padding=(0, 2, 0, 0))
    wide = widths(runs, width, what)
    for name, size in wide.items():
        grid.add_column(name, no_wrap=True, width=size, justify="right" if name == "run" else "left")
    for run in runs:
        color = COLORS.get(run.state, "red" if run.record is not None else "dim" if run.state == "pending" else "cyan")
        cells = {
            "run": str(run.number),
            "job": run.job or "",
            "state": f"[{color}]{run.state}[/{color}]",
            "what": escape(_end(what.get(run.number, ""), wide.get("what", 0))),
            "detail": escape(detail(run)),
        }
        grid.add_row(*(cells[name] for name in wide))
    return grid


def causes(runs: Sequence[RunState], width: int, what: dict[int, str]) -> list[str]:
    """Why runs did not complete, in full where the table has no room for it, those of one cause together."""
    room = widths(runs, width, what)["detail"]
    groups: dict[str, list[int]] = {}
    for run in runs:
        if run.record is not None and run.record.error is not None and (len(run.why) > room or "\n" in run.why):
            groups.setdefault(f"{run.state}, {run.why}", []).append(run.number)
    return [f"run{'s' if len(numbers) > 1 else ''} {some(numbers)}: {why}" for why, numbers in groups.items()]


def some(numbers: Sequence[int]) -> str:
    """``0, 1, 2``, of many only the first and the last."""
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"
