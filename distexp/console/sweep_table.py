"""Table and summary of the states of a sweep's runs, and the reasons why cells are invalid."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from distexp.config.overrides import format_runs
from distexp.console.run_summary import status_color
from distexp.runs.run_state import RunState, read_progress
from distexp.system.files import one_line

MIN_DETAIL_WIDTH = 20
COLUMN_GAP = 2
HIDEABLE = ("overrides", "job", "folder")  # the first one is hidden first


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
        return f"{read_progress(run.directory)}" + (f" on {run.nodes}" if run.nodes else "")
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
