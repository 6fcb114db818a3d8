"""Table and summary of the states of a sweep's runs, local or on Slurm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from distexp.console.run_summary import status_color
from distexp.runs.progress import read_progress
from distexp.runs.run_state import RunState
from distexp.runs.text import format_runs

MIN_DETAIL_WIDTH = 20
COLUMN_GAP = 2


def states_table(runs: Sequence[RunState], width: int, overrides: Mapping[int, str] | None = None) -> Table:
    """Build a table with one row per run.

    Args:
        runs: The runs to show; at least one.
        width: Characters of the terminal.
        overrides: The overrides that differ between the runs, by run number.
    """
    overrides = overrides or {}
    table = Table(box=None, padding=(0, COLUMN_GAP, 0, 0))
    widths = column_widths(runs, width, overrides)
    for name, size in widths.items():
        table.add_column(name, no_wrap=True, width=size, justify="right" if name == "run" else "left")
    for run in runs:
        color = _state_color(run)
        cells = {
            "run": str(run.number),
            "job": run.job or "",
            "state": f"[{color}]{run.state}[/{color}]",
            "overrides": escape(_truncate_left(overrides.get(run.number, ""), widths.get("overrides", 0))),
            "detail": escape(state_detail(run)),
        }
        table.add_row(*(cells[name] for name in widths))
    return table


def column_widths(runs: Sequence[RunState], width: int, overrides: Mapping[int, str]) -> dict[str, int]:
    """Return the width of each column in characters.

    Empty columns are absent, and "detail" gets the remaining width.
    """
    longest = {
        "run": max(len(str(run.number)) for run in runs),
        "job": max(len(run.job or "") for run in runs),
        "state": max(len(run.state) for run in runs),
        "overrides": min(max((len(text) for text in overrides.values()), default=0), width // 3),
    }
    widths = {name: max(len(name), size) for name, size in longest.items() if size}
    detail = width - sum(widths.values()) - COLUMN_GAP * (len(widths) + 1)
    return {**widths, "detail": max(MIN_DETAIL_WIDTH, detail)}


def truncated_reasons(runs: Sequence[RunState], width: int, overrides: Mapping[int, str]) -> list[str]:
    """Return the full text of each reason that the table truncates.

    Each text names all runs that failed for this reason.
    """
    detail_width = column_widths(runs, width, overrides)["detail"]
    groups: dict[str, list[int]] = {}
    for run in runs:
        if run.record is not None and run.record.error is not None and len(run.reason) > detail_width:
            groups.setdefault(f"{run.state}: {run.reason}", []).append(run.number)
    return [f"{format_runs(numbers)} {text}" for text, numbers in groups.items()]


def count_states(runs: Sequence[RunState]) -> str:
    """Count the runs of each state: ``3 completed, 1 pending``."""
    counts = Counter(run.state for run in runs)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def state_detail(run: RunState) -> str:
    """Return why a run is waiting, how far it is, its results, or why it failed."""
    if run.state in ("running", "ending"):
        return f"{read_progress(run.directory)}" + (f" on {run.nodes}" if run.nodes else "")
    if run.record is not None and run.record.status == "completed":
        speed = run.record.metrics.train_samples_per_second
        loss = run.record.metrics.train_loss
        parts = ["" if loss is None else f"train loss {loss:.4f}", "" if speed is None else f"{speed:,.1f} samples/s"]
        return ", ".join(part for part in parts if part)
    return run.reason


def describe_state(run: RunState) -> str:
    """Return the state of a run and its detail in one line."""
    detail = state_detail(run)
    return f"{run.state}: {detail}" if detail else run.state


def state_key(run: RunState) -> str:
    """Return a text that changes with the run's state, nodes, reason or phase.

    It does not change with every step.
    """
    if run.state == "running":
        return f"running {run.nodes}{read_progress(run.directory).phase or 'start'}"
    return f"{run.state}{run.nodes}{run.reason}"


def _state_color(run: RunState) -> str:
    if run.record is not None:
        return status_color(run.state)
    return "dim" if run.state == "pending" else "cyan"


def _truncate_left(text: str, size: int) -> str:
    """Shorten a text on the left; the rightmost override varies fastest."""
    return text if len(text) <= size else "…" + text[len(text) - size + 1 :]
