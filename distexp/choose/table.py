"""Tables of the candidates of a search on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from distexp.choose.candidate import COMPLETED, Candidate, Objective, Status
from distexp.choose.labels import row_label
from distexp.choose.mean_metrics import values_of
from distexp.choose.ranking import ranked
from distexp.choose.search_result import PlannedTrial
from distexp.runs.text import format_count
from distexp.system.units import MIB_PER_GB

MOST_PRUNED = 6
"""Candidates that were not tried in a table. The others are counted by their reason."""
NOT_TRIED = "not tried"
LEGEND = "predicted: peak in GB. steps: measured steps of each trial."


def result_table(
    candidates: Sequence[Candidate], objective: Objective, winner: Candidate | None
) -> Iterator[RenderableType]:
    """Yield the table of the candidates that were tried, the best first, and what happened to the others."""
    tried = [each for each in candidates if each.trials]
    best = ranked(tried, objective)
    order = [*best, *(each for each in tried if each not in best)]
    if order:
        yield _measured_table(order, winner)
        yield Text(f"{'*: the winner. ' if winner in order else ''}{LEGEND}", style="dim")
    yield from others_table([each for each in candidates if not each.trials])


def _measured_table(candidates: Sequence[Candidate], winner: Candidate | None) -> Table:
    """Return the table of the candidates that were tried."""
    values = [values_of(each) for each in candidates]
    energy, price = any(each.j_per_sample for each in values), any(each.price_per_sample for each in values)
    table = _table("candidate (batch x accumulation)", "workers", "samples/s", "peak GB", "predicted")
    for title, shown in (("J/sample", energy), ("price/10⁶", price)):
        if shown:
            table.add_column(title, justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    for candidate, found in zip(candidates, values, strict=True):
        price_of_many = None if found.price_per_sample is None else 1e6 * found.price_per_sample
        cells = [
            f"{'* ' if candidate is winner else '  '}{name(candidate)}",
            str(candidate.workers),
            _failure(candidate) or _number(found.samples_per_second, ",.1f"),
            _gb(found.peak_allocated_mib),
            _gb(predicted_mib(candidate)),
            *([_number(found.j_per_sample, ".3g")] if energy else []),
            *([_number(price_of_many, ".3g")] if price else []),
            "+".join(str(trial.steps) for trial in candidate.trials),
        ]
        table.add_row(*map(Text, cells), style="bold" if candidate is winner else "")
    return table


def others_table(candidates: Sequence[Candidate]) -> Iterator[RenderableType]:
    """Yield the candidates without a trial with their reason, folded if there are many."""
    if not candidates:
        return
    counts = Counter(short_reason(each) for each in candidates)
    summary = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    text = f"\nNot tried: {format_count(len(candidates), 'configuration')}"
    yield Text(text if set(counts) == {NOT_TRIED} else f"{text}: {summary}", style="dim")
    if len(candidates) > MOST_PRUNED:
        return
    table = _table(NOT_TRIED, "predicted GB")
    table.add_column("reason")
    for each in candidates:
        table.add_row(*map(Text, (name(each), _gb(predicted_mib(each)), each.reason.removeprefix(f"{NOT_TRIED}: "))))
    yield table


def short_reason(candidate: Candidate) -> str:
    """Return a reason without its numbers, so that equal ones can be counted."""
    reason = candidate.reason or str(candidate.status)
    return reason.partition(":")[0].partition(" (")[0].partition(" by ")[0]


def waiting_table(planned: Sequence[PlannedTrial], costs: Sequence[float]) -> Table:
    """Return the table of planned trials.

    Args:
        planned: The trials.
        costs: Forecast cost of each trial in GPU-seconds.
    """
    table = _table("planned trial", "workers", "steps", "predicted GB", "s/step", "GPU-s")
    for trial, cost in zip(planned, costs, strict=True):
        candidate = trial.candidate
        cells = (name(candidate), str(candidate.workers), str(trial.steps), _gb(predicted_mib(candidate)))
        table.add_row(*map(Text, cells), Text(_number(candidate.forecast_s, ".3g")), Text(f"{cost:,.0f}"))
    return table


def predicted_mib(candidate: Candidate) -> float | None:
    """Return the predicted peak of what is measured: torch's memory on a GPU, or that of the processes on a CPU."""
    if candidate.config is not None and candidate.config.cluster.device == "cpu":
        return None if candidate.predicted is None else candidate.predicted.required_mib
    return candidate.expected_mib


def name(candidate: Candidate) -> str:
    """Return a candidate for a table."""
    return row_label(candidate)


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _failure(candidate: Candidate) -> str:
    """Return the status of the trial that failed; empty if none did."""
    if candidate.status is not Status.FAILED:
        return ""
    return next((trial.status for trial in reversed(candidate.trials) if trial.status != COMPLETED), "failed")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _gb(mib: float | None) -> str:
    return "-" if mib is None else f"{mib / MIB_PER_GB:,.2f}"
