"""Terminal table of two sweeps, printed by ``distexp report --compare A B``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from distexp.report.compare import LOSSES, Comparison, Pair
from distexp.report.data.metrics import MEMORIES, METRICS_BY_NAME, SPEED, Metric
from distexp.report.data.overview import DISTURBED_MARK
from distexp.report.data.repeats import format_metric
from distexp.report.data.settings import MAX_LENGTH, format_setting
from distexp.runs.listing import format_count
from distexp.tables.columns import (
    ALWAYS,
    Column,
    build_table,
    fit_columns,
    hidden_columns_note,
    setting_title,
    split_columns,
)

DISTURBED_NOTE = (
    "Another program slowed one of the two runs down. If this is B, its lower speed does not count as a regression."
)


@dataclass(frozen=True)
class ComparisonTable:
    """A row for each training that is in both sweeps, then the regressions.

    Attributes:
        before: Name of sweep A.
        after: Name of sweep B.
    """

    comparison: Comparison
    before: str
    after: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self.comparison
        kept, hidden = fit_columns(list(comparison_columns(comparison)), options.max_width)
        yield Text(f"A: {self.before}\nB: {self.after}\n", style="bold")
        if comparison.changed:
            yield Text(f"Changed in all runs from A to B: {', '.join(comparison.changed)}.\n")
        for block in split_columns(kept, options.max_width):
            yield build_table(block)
            yield Text("")
        if hidden:
            yield hidden_columns_note(hidden, "A wider terminal shows them.")
        for side, groups in (("A", comparison.only_before), ("B", comparison.only_after)):
            if groups:
                yield Text(f"Only in {side}: {'; '.join(comparison.describe(group) for group in groups)}.")
        if any("~" in cell for column in kept for cell in column.cells):
            yield Text("~: the difference is within the noise.", style="dim")
        if any(pair.disturbance for pair in comparison.pairs):
            yield Text(f"{DISTURBED_MARK}: {DISTURBED_NOTE}", style="dim")
        yield from _regression_lines(comparison)


def _regression_lines(comparison: Comparison) -> Iterator[Text]:
    for change in comparison.uncertain():
        yield Text(f"Not a regression: {change}.", style="yellow")
    regressions = list(comparison.regressions())
    for regression in regressions:
        yield Text(f"Regression: {regression}", style="red")
    if not regressions:
        yield Text(f"No regression in {format_count(len(comparison.pairs), 'matched configuration')}.", style="green")


def comparison_columns(comparison: Comparison) -> Iterator[Column]:
    """Yield the columns: settings, status, and each metric of A, of B and B/A."""
    pairs = comparison.pairs
    for index, name in enumerate(comparison.varied):
        cells = tuple(format_setting(pair.after.setting(name), MAX_LENGTH) for pair in pairs)
        yield Column(setting_title(name), cells, ALWAYS - index, right=False)
    if not comparison.varied:
        yield Column("run", tuple(pair.after.label for pair in pairs), ALWAYS)
    yield Column("status", tuple(_status_change(pair) for pair in pairs), 120, right=False)
    if any(max(len(pair.before.rows), len(pair.after.rows)) > 1 for pair in pairs):
        counts = tuple(f"{len(pair.before.counted_rows)}, {len(pair.after.counted_rows)}" for pair in pairs)
        yield Column("n", counts, 50)
    for name in (SPEED, *MEMORIES):
        if any(pair.ratio(name) is not None for pair in pairs):
            yield from _ratio_columns(pairs, METRICS_BY_NAME[name])
    for name in LOSSES:
        if any(pair.metric_pair(name) for pair in pairs):
            cells = tuple(_format_difference(pair, name) for pair in pairs)
            yield Column(METRICS_BY_NAME[name].title + " B-A", cells, 90)


def _ratio_columns(pairs: Sequence[Pair], metric: Metric) -> Iterator[Column]:
    for side, groups in (("A", [pair.before for pair in pairs]), ("B", [pair.after for pair in pairs])):
        yield Column(f"{metric.title} {side}", format_metric(groups, metric), metric.importance - 30)
    first_line = metric.title.split("\n")[0]
    ratios = tuple(_format_ratio(pair, metric.name) for pair in pairs)
    yield Column(f"{first_line}\nB/A", ratios, metric.importance + 10)


def _format_ratio(pair: Pair, name: str) -> str:
    ratio = pair.ratio(name)
    return "-" if ratio is None else f"{ratio:.2f}x{_mark(pair, name)}"


def _format_difference(pair: Pair, name: str) -> str:
    both = pair.metric_pair(name)
    return "-" if both is None else f"{both[1].mean - both[0].mean:+z.4f}{_mark(pair, name)}"


def _mark(pair: Pair, name: str) -> str:
    if name == SPEED and pair.disturbance:
        return DISTURBED_MARK
    return "~" if pair.is_noise(name) else ""


def _status_change(pair: Pair) -> str:
    before, after = pair.before.status, pair.after.status
    return before if before == after else f"{before} -> {after}"
