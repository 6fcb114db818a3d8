"""Monitoring of the runs of a queue until all have ended, or until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from distexp.console.plain_text import print_plain
from distexp.console.screen import Screen
from distexp.console.sweep_table import Row, describe_state, state_key, states_table
from distexp.exceptions import MonitoringInterrupted, SweepFailedError
from distexp.runs.command_text import suggest_command
from distexp.runs.record import FAILURES
from distexp.runs.record_search import read_records
from distexp.runs.run_state import RunState

FAST_POLLING_S, FAST_POLL_S, SLOW_POLL_S = 120.0, 2.0, 10.0
"""The queue is polled every 2 s for two minutes, then every 10 s, to limit the load on the controller."""


Poll = Callable[[], Sequence[RunState]]
"""Function that returns the current states of all runs of a sweep."""


def follow(poll: Poll, total: int, sweep_dir: Path, console: Console) -> None:
    """Show every run until the last has ended.

    Args:
        poll: Returns the states of the runs.
        total: Number of runs.
        sweep_dir: Directory of the sweep.
        console: Where to print.

    Raises:
        SweepFailedError: If a run failed.
        MonitoringInterrupted: On Ctrl-C; the jobs continue. The finished runs and a hint are printed.
    """
    try:
        poll_until_done(poll, console, {})
    except KeyboardInterrupt:
        print_finished(sweep_dir, total)
        print_plain(
            console,
            f"\nThe jobs continue. To follow them: {suggest_command('status', sweep_dir)} --watch\n"
            f"To cancel them:               {suggest_command('cancel', sweep_dir)}",
        )
        raise MonitoringInterrupted from None
    print_summary(sweep_dir)


def poll_until_done(poll: Poll, console: Console, printed: dict[int, str]) -> None:
    """Show the runs of a sweep until all have ended.

    Args:
        poll: Returns the states of the runs.
        console: Where to print.
        printed: Key of each run's last printed state, by number; updated by this call.
    """
    started = time.monotonic()
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while True:
            runs = poll()
            if console.is_terminal:
                live.update(states_table([Row(run) for run in runs], console.width), refresh=True)
            else:
                print_changes(runs, printed, console)
            if not any(run.is_active for run in runs):
                return
            time.sleep(FAST_POLL_S if time.monotonic() - started < FAST_POLLING_S else SLOW_POLL_S)


def print_changes(runs: Sequence[RunState], printed: dict[int, str], console: Console) -> None:
    """Print one line for each run whose state has changed.

    Args:
        runs: The current states.
        printed: Key of each run's last printed state, by number; updated by this call.
        console: Where to print.
    """
    for run in runs:
        key = state_key(run)
        if printed.get(run.number) != key:
            printed[run.number] = key
            job = f" (job {run.job})" if run.job else ""
            print_plain(console, f"run {run.number}{job}: {describe_state(run)}")


def print_finished(sweep_dir: Path, total: int) -> None:
    """Print the table of the runs that have ended while others are active, and the command for the report."""
    screen = Screen(total=total, sweep_dir=sweep_dir)
    screen.records.extend(read_records(sweep_dir).records)
    screen.show_comparison()


def print_summary(sweep_dir: Path) -> None:
    """Print the panel of a single run, or the table of several.

    Raises:
        SweepFailedError: If a run failed.
    """
    found = read_records(sweep_dir)
    screen = Screen(total=len(found.stored), sweep_dir=sweep_dir)
    if len(found.stored) == 1:
        screen.show_result(found.stored[0].record, found.stored[0].path.parent)
    else:
        screen.records.extend(found.records)
    screen.show_comparison()
    if any(record.status in FAILURES for record in found.records):
        raise SweepFailedError
