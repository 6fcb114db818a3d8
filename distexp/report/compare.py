"""Two sweeps side by side, and what became worse from the first to the second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from distexp.report.data.failures import failure_reason
from distexp.report.data.metrics import MEMORIES, METRICS_BY_NAME, SPEED, Metric
from distexp.report.data.repeats import RunGroup, Spread, format_metric, group_repeats, is_within_noise
from distexp.report.data.rows import Row
from distexp.report.data.setting_names import SEED
from distexp.report.data.settings import format_setting
from distexp.report.data.varying import varying_settings
from distexp.report.table import ALWAYS, LONGEST_VALUE, Column, build_table, fit_columns, heading

SLOWER = 0.95
MORE_MEMORY = 1.05
WORSE_LOSS = 1.01  # two runs on GPUs differ by less without any change
LOSSES = {"eval_loss": "eval loss", "train_loss": "train loss"}


@dataclass(frozen=True)
class Pair:
    """The same training in both sweeps."""

    before: RunGroup
    after: RunGroup

    def metric_pair(self, name: str) -> tuple[Spread, Spread] | None:
        """A figure of both; None where one of them lacks it or did not complete."""
        if not (self.before.completed and self.after.completed):
            return None
        before, after = self.before.metric(name), self.after.metric(name)
        return None if before is None or after is None else (before, after)

    def ratio(self, name: str) -> float | None:
        """After over before."""
        both = self.metric_pair(name)
        return both[1].mean / both[0].mean if both and both[0].mean else None

    def first(self, names: Sequence[str]) -> str | None:
        """The first of some figures that both have."""
        return next((name for name in names if self.metric_pair(name)), None)


@dataclass(frozen=True)
class Comparison:
    """Sweep A before, sweep B after."""

    pairs: tuple[Pair, ...]
    only_before: tuple[RunGroup, ...]
    only_after: tuple[RunGroup, ...]
    varied: tuple[str, ...]
    throughout: tuple[str, ...]  # what all of B has changed

    @classmethod
    def of(cls, before: Sequence[Row], after: Sequence[Row]) -> Comparison:
        """Matches by training first, then by what varies within the sweeps."""
        pairs, left, right = _match_by_training(before, after)
        varied = tuple(
            name for name in dict.fromkeys([*_varied(before), *_varied(after)]) if name != SEED
        )  # fmt: skip
        for names in (varied, _varied(before), _varied(after)):
            more, left, right = _match_by_settings(left, right, names)
            pairs += more
        return cls(tuple(pairs), tuple(left), tuple(right), varied, tuple(_throughout(before, after, varied)))

    def regressions(self) -> Iterator[str]:
        """A sentence for each thing that became worse."""
        for pair in self.pairs:
            for error in _errors(pair):
                yield f"{self.describe(pair.after)}: {error}"

    def describe(self, group: RunGroup) -> str:
        """``strategy=fsdp, offload=true``, else the label of the run."""
        chosen = [f"{name}={format_setting(group.setting(name), LONGEST_VALUE)}" for name in self.varied
                  if group.setting(name) is not None]  # fmt: skip
        return ", ".join(chosen) or f"run {group.label}"


def _varied(rows: Sequence[Row]) -> list[str]:
    return varying_settings([row.record for row in rows], [row.settings for row in rows])


def _match_by_training(
    before: Sequence[Row], after: Sequence[Row]
) -> tuple[list[Pair], list[RunGroup], list[RunGroup]]:
    pairs, left, right = [], [], []
    sides = {id(row) for row in before}
    for group in group_repeats([*before, *after]):
        ours = tuple(row for row in group.rows if id(row) in sides)
        theirs = tuple(row for row in group.rows if id(row) not in sides)
        if ours and theirs:
            pairs.append(Pair(RunGroup(ours), RunGroup(theirs)))
        elif ours:
            left.append(RunGroup(ours))
        else:
            right.append(RunGroup(theirs))
    return pairs, left, right


def _match_by_settings(
    left: list[RunGroup], right: list[RunGroup], varied: Sequence[str]
) -> tuple[list[Pair], list[RunGroup], list[RunGroup]]:
    """Pairs where the varied settings name exactly one group on each side."""

    def by_settings(groups: list[RunGroup]) -> dict[str, list[RunGroup]]:
        found: dict[str, list[RunGroup]] = {}
        for group in groups:
            found.setdefault(str([group.setting(name) for name in varied]), []).append(group)
        return found

    ours, theirs = by_settings(left), by_settings(right)
    shared = [key for key in ours if len(ours[key]) == 1 and len(theirs.get(key, ())) == 1]
    pairs = [Pair(ours[key][0], theirs[key][0]) for key in shared]
    matched = {id(group) for pair in pairs for group in (pair.before, pair.after)}
    return (
        pairs,
        [group for group in left if id(group) not in matched],
        [group for group in right if id(group) not in matched],
    )


def _throughout(before: Sequence[Row], after: Sequence[Row], varied: Sequence[str]) -> Iterator[str]:
    """``precision fp32 -> bf16``: settings that have one value in A and another one in B."""
    for name in _varied([*before, *after]):
        ours = {format_setting(row.settings.get(name)) for row in before}
        theirs = {format_setting(row.settings.get(name)) for row in after}
        if name not in varied and ours != theirs and len(ours) == len(theirs) == 1:
            yield f"{name} {ours.pop()} -> {theirs.pop()}"


def _errors(pair: Pair) -> Iterator[str]:
    broken = [row for row in pair.after.rows if not row.completed]
    if pair.before.status == "completed" and broken:
        yield f"completed -> {pair.after.status} ({failure_reason(broken[0])})"
    speed, memory, loss = SPEED, pair.first(list(MEMORIES)), pair.first(list(LOSSES))
    if (ratio := _beyond_spread(pair, speed)) is not None and ratio < SLOWER:
        yield f"slower, {_change(pair, speed)} samples/s ({ratio - 1:+.1%})"
    if memory and (ratio := _beyond_spread(pair, memory)) is not None and ratio > MORE_MEMORY:
        yield f"more {MEMORIES[memory]}, {_change(pair, memory)} MiB ({ratio - 1:+.1%})"
    if loss and (ratio := _beyond_spread(pair, loss)) is not None and ratio > WORSE_LOSS:
        yield f"worse {LOSSES[loss]}, {_change(pair, loss)} ({ratio - 1:+.1%})"


def _beyond_spread(pair: Pair, name: str) -> float | None:
    """The ratio of a figure, None where the difference is within the spread."""
    both = pair.metric_pair(name)
    return None if both is None or is_within_noise(*both) else pair.ratio(name)


def _change(pair: Pair, name: str) -> str:
    before, after = (format_metric([group], METRICS_BY_NAME[name])[0] for group in (pair.before, pair.after))
    return f"{before} -> {after}"


@dataclass(frozen=True)
class ComparisonTable:
    """A row a matched training; A is before, B after."""

    comparison: Comparison
    before: str
    after: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self.comparison
        columns = list(comparison_columns(comparison))
        kept, dropped = fit_columns(columns, options.max_width)
        yield Text(f"A: {self.before}\nB: {self.after}\n", style="bold")
        if comparison.throughout:
            yield Text(f"B differs from A throughout in {', '.join(comparison.throughout)}.\n")
        yield build_table(kept)
        yield Text("")
        if dropped:
            names = ", ".join(column.one_line_title for column in sorted(dropped, key=columns.index))
            yield Text(f"Left out for want of width: {names} (a wider terminal shows them).", style="dim")
        for side, groups in (("A", comparison.only_before), ("B", comparison.only_after)):
            if groups:
                yield Text(f"In {side} alone: {'; '.join(comparison.describe(group) for group in groups)}.")
        if any("~" in cell for column in kept for cell in column.cells):
            yield Text("~ marks a difference within the spread of the repeats.", style="dim")
        found = list(comparison.regressions())
        for sentence in found:
            yield Text(f"Regression: {sentence}", style="red")
        if not found:
            yield Text(f"No regression in {len(comparison.pairs)} matched configurations.", style="green")


def comparison_columns(comparison: Comparison) -> Iterator[Column]:
    """Settings, outcome, and each figure before, after and as a ratio."""
    pairs = comparison.pairs
    for index, name in enumerate(comparison.varied):
        cells = tuple(format_setting(pair.after.setting(name), LONGEST_VALUE) for pair in pairs)
        yield Column(heading(name), cells, ALWAYS - index, right=False)
    if not comparison.varied:
        yield Column("run", tuple(pair.after.label for pair in pairs), ALWAYS)
    yield Column("status", tuple(_statuses(pair) for pair in pairs), 120, right=False)
    if any(max(len(pair.before.rows), len(pair.after.rows)) > 1 for pair in pairs):
        counts = tuple(f"{len(pair.before.counted_rows)}, {len(pair.after.counted_rows)}" for pair in pairs)
        yield Column("n", counts, 50)
    names = (SPEED, *MEMORIES)
    for name in names:
        if any(pair.ratio(name) is not None for pair in pairs):
            yield from _ratio_columns(pairs, METRICS_BY_NAME[name])
    for name in LOSSES:
        if any(pair.metric_pair(name) for pair in pairs):
            yield Column(METRICS_BY_NAME[name].title + " B-A", tuple(_difference(pair, name) for pair in pairs), 90)


def _ratio_columns(pairs: Sequence[Pair], figure: Metric) -> Iterator[Column]:
    for side, groups in (("A", [pair.before for pair in pairs]), ("B", [pair.after for pair in pairs])):
        yield Column(f"{figure.title} {side}", format_metric(groups, figure), figure.importance - 30)
    ratios = [pair.ratio(figure.name) for pair in pairs]
    verdicts = tuple("-" if ratio is None else f"{ratio:.2f}x{_mark(pair, figure.name)}"
                     for pair, ratio in zip(pairs, ratios, strict=True))  # fmt: skip
    yield Column(f"{figure.title.split(chr(10))[0]}\nB/A", verdicts, figure.importance + 10)


def _mark(pair: Pair, name: str) -> str:
    """A tilde where the difference is within the spread."""
    both = pair.metric_pair(name)
    return "~" if both and is_within_noise(*both) else ""


def _difference(pair: Pair, name: str) -> str:
    both = pair.metric_pair(name)
    return "-" if both is None else f"{both[1].mean - both[0].mean:+.4f}{_mark(pair, name)}"


def _statuses(pair: Pair) -> str:
    before, after = pair.before.status, pair.after.status
    return before if before == after else f"{before} -> {after}"
