"""Tables of the candidates of a search on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from distexp.choose.candidate import COMPLETED, Candidate, Objective, Status
from distexp.choose.labels import row_label
from distexp.choose.mean_metrics import mean_metrics
from distexp.choose.ranking import ranked
from distexp.choose.search_result import PlannedTrial
from distexp.choose.untried import NOT_TRIED
from distexp.runs.listing import format_count
from distexp.system.units import MIB_PER_GB, format_amount
from distexp.tables.columns import cell

MAX_LISTED = 6
"""Most candidates without a trial that a table lists. More are counted by their reason."""

NUMBER = re.compile(r"(?<![\w=-])\d+(?:[.,]\d+)*")
"""A number, but not that of a name such as ZeRO-2 or zero_stage=2."""

DETAILS = re.compile(r" \([^)]*\)")
"""An explanation in parentheses."""

BATCH_LEGEND = "8x2: micro-batch 8, 2 micro-batches per step."
RESULT_LEGEND = f"{BATCH_LEGEND} peak GB: measured memory. predicted: before the trials. steps: of each trial."
CPU_LEGEND = " On CPUs a longer run may need more: a short trial has few memory samples."
ORDER_LEGEND = " Repeated ones come first: the best of many single trials may only be lucky."
DISTURBED_LEGEND = " (5): not counted, because the repeat was far faster."
PLAN_LEGEND = f"{BATCH_LEGEND} steps: measured steps. s/step: forecast. Cost: of all workers, with the start-up."


def result_table(
    candidates: Sequence[Candidate], objective: Objective, winner: Candidate | None, equal: Sequence[Candidate] = ()
) -> Iterator[RenderableType]:
    """Yield the table of the candidates that were tried, the best first, and what happened to the others.

    Args:
        candidates: All candidates.
        objective: What the best one has least of.
        winner: The winner; None if there is none.
        equal: Candidates that are as good as the winner within the noise.
    """
    tried = [candidate for candidate in candidates if candidate.trials]
    best = ranked(tried, objective)
    order = [*best, *(candidate for candidate in tried if candidate not in best)]
    if order:
        yield _measured_table(order, winner, equal)
        order_legend = ORDER_LEGEND if len({candidate.longest_steps for candidate in best}) > 1 else ""
        marks = f"{'*: the winner. ' if winner in order else ''}{'=: equal within the noise. ' if equal else ''}"
        disturbed = DISTURBED_LEGEND if any(trial.disturbed for each in order for trial in each.trials) else ""
        cpu_legend = CPU_LEGEND if any(candidate.on_cpus for candidate in best) else ""
        yield Text(f"{marks}{RESULT_LEGEND}{cpu_legend}{order_legend}{disturbed}", style="dim")
    yield from others_table([candidate for candidate in candidates if not candidate.trials])


def _measured_table(candidates: Sequence[Candidate], winner: Candidate | None, equal: Sequence[Candidate]) -> Table:
    """Return the table of the candidates that were tried."""
    values = [mean_metrics(candidate) for candidate in candidates]
    energy, price = any(metrics.j_per_sample for metrics in values), any(metrics.price_per_sample for metrics in values)
    table = _table("candidate", "workers", "samples/s", "peak GB", "predicted")
    for title, shown in (("J/sample", energy), ("price/10⁶", price)):
        if shown:
            table.add_column(title, justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    for candidate, found in zip(candidates, values, strict=True):
        price_of_many = None if found.price_per_sample is None else 1e6 * found.price_per_sample
        cells = [
            f"{'*' if candidate is winner else '=' if candidate in equal else ' '} {row_label(candidate)}",
            str(candidate.workers),
            _failure(candidate) or cell(found.samples_per_second, ",.1f"),
            _gb(found.peak_allocated_mib),
            _gb(candidate.expected_mib),
            *([cell(found.j_per_sample, format_amount)] if energy else []),
            *([cell(price_of_many, format_amount)] if price else []),
            "+".join(f"({trial.steps})" if trial.disturbed else str(trial.steps) for trial in candidate.trials),
        ]
        table.add_row(*map(Text, cells), style="bold" if candidate is winner else "")
    return table


def others_table(candidates: Sequence[Candidate]) -> Iterator[RenderableType]:
    """Yield the candidates without a trial: a table if there are few, else a line for each reason."""
    if not candidates:
        return
    yield Text(f"\nNot tried: {format_count(len(candidates), 'configuration')}", style="dim")
    if len(candidates) > MAX_LISTED:
        for reason, count in count_reasons(candidates).items():
            yield Text(f"{count:6}  {reason}", style="dim")
        return
    table = _table("not tried", "predicted GB")
    table.add_column("reason")
    for candidate in candidates:
        table.add_row(*map(Text, (row_label(candidate), _gb(candidate.expected_mib), _reason(candidate))))
    yield table


def count_reasons(candidates: Sequence[Candidate]) -> dict[str, int]:
    """Return how many candidates have each reason, the most frequent first.

    Reasons that differ only in their numbers or details count as one. Their numbers are then shown as N.
    """
    groups: dict[str, list[str]] = {}
    for candidate in candidates:
        short = DETAILS.sub("", _reason(candidate).partition(":")[0]).partition(" by ")[0]
        groups.setdefault(NUMBER.sub("N", short), []).append(short)
    by_frequency = sorted(groups.items(), key=lambda group: -len(group[1]))
    return {found[0] if len(set(found)) == 1 else general: len(found) for general, found in by_frequency}


def _reason(candidate: Candidate) -> str:
    return candidate.reason.removeprefix(f"{NOT_TRIED}: ") or str(candidate.status)


def planned_table(planned: Sequence[PlannedTrial], costs: Sequence[float]) -> Table:
    """Return the table of planned trials.

    Args:
        planned: The trials.
        costs: Forecast cost of each trial: seconds of all workers together.
    """
    table = _table("planned trial", "workers", "steps", "predicted GB", "s/step", "cost (s)")
    for trial, cost in zip(planned, costs, strict=True):
        candidate = trial.candidate
        cells = (row_label(candidate), str(candidate.workers), str(trial.steps), _gb(candidate.expected_mib))
        table.add_row(*map(Text, cells), Text(cell(candidate.forecast_s, format_amount)), Text(f"{cost:,.0f}"))
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _failure(candidate: Candidate) -> str:
    """Return the status of the trial that failed; empty if all completed, perhaps without the objective's metric."""
    if candidate.status is not Status.FAILED:
        return ""
    return next((trial.status for trial in reversed(candidate.trials) if trial.status != COMPLETED), "")


def _gb(mib: float | None) -> str:
    return cell(None if mib is None else mib / MIB_PER_GB, ",.2f")
