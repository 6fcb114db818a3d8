"""Command ``distexp report [DIR...] [--compare A B]``: reports on finished runs.

Exit codes: 0 written; 1 regression found by --compare, or unwritable files; 2 nothing to report on.
"""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from distexp.cli.main import CommandParser
from distexp.config import Command, ConfigError
from distexp.config.overrides import format_count, suggest_command
from distexp.exceptions import print_error, print_text, printable, run_until_pipe_closes
from distexp.report.data.forecasts import keep_errors
from distexp.report.data.metrics import MEMORIES, METRICS_BY_NAME, SPEED
from distexp.report.data.overview import DISTURBED_MARK, NOISE_MARK, Overview, failure_reason
from distexp.report.data.repeats import (
    EQUAL,
    RunGroup,
    format_metric,
    group_by_settings,
    group_repeats,
    share_deviations,
    varying_settings,
)
from distexp.report.data.rows import MAX_LENGTH, SEED, Row, format_noise, format_setting, format_settings, load_rows
from distexp.report.files import PAGE, PLOTS, write_figures, write_files
from distexp.report.overview_table import OverviewTable
from distexp.runs.record import ExistingRuns, choose_newest_sweep, no_readable_record, not_a_folder
from distexp.runs.run_dir import RECORD, REPORT
from distexp.runs.texts import describe_disk_error
from distexp.statistics.noise import Spread, difference_noise, is_within_noise
from distexp.status import read_folder
from distexp.tables import columns
from distexp.tables.columns import make_console

DRAWING_PACKAGES = {"vl_convert": "vl-convert-python"}  # by module, if the names differ
DIRECTORY_HELP = "directory of a run or a sweep (default: the newest sweep below multirun_outputs)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(arguments)
    if not options.directories and not options.compare:
        options.directories = [choose_newest_sweep(leave_out=(Command.PREFLIGHT,))]
    missing = [path for path in (*options.directories, *(options.compare or ())) if not path.is_dir()]
    if missing:
        raise ConfigError([not_a_folder(path) for path in missing])
    code = 0
    if options.directories:
        code = report(options.directories, options.trace, options.figures)
    if options.open and options.directories and code == 0:
        page = (options.directories[0] / REPORT / PAGE).resolve()
        if not webbrowser.open(page.as_uri()):
            print_text(f"no browser on this machine: copy {page} to yours, and open it there")
    if options.compare and code != 2:
        code = max(code, compare(*options.compare))
    return code


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="distexp report",
        description="Print a table of the finished runs below DIR, at any depth, and write report.html, results.csv, "
        "results.md, results.parquet and plots/ into DIR/report. Several DIRs make one report, in the first of them.",
    )
    parser.add_argument("directories", metavar="DIR", nargs="*", type=Path, help=DIRECTORY_HELP)
    parser.add_argument("--open", action="store_true", help="open report.html in the browser")
    parser.add_argument(
        "--trace", metavar="RUN", nargs="+", default=[],
        help="draw these runs over time (labels from the column run) instead of the fastest and the smallest ones",
    )  # fmt: skip
    parser.add_argument(
        "--figures", metavar="DIR", type=Path,
        help="also write the figures as SVG, PDF and PNG, and the tables as LaTeX and Markdown, for a paper or slides",
    )  # fmt: skip
    parser.add_argument(
        "--compare", metavar=("A", "B"), nargs=2, type=Path,
        help="compare sweep B with sweep A; the exit code is 1 if there are regressions",
    )  # fmt: skip
    return parser


def report(directories: Sequence[Path], traced_runs: Sequence[str] = (), figures: Path | None = None) -> int:
    """Print the table of some runs and write the files. Return the exit code."""
    for directory in directories:
        if any(run.status is None for run in ExistingRuns.read(directory).runs):
            read_folder(directory)  # It writes the records of runs whose launcher and agent were killed.
    for directory in directories:
        left = [run for run in ExistingRuns.read(directory).runs if not (run.directory / RECORD).exists()]
        if left:
            runs = format_count(len(left), "run")
            text = f"left out: {runs} without a record: {suggest_command('status', directory)}"
            print(printable(text), file=sys.stderr)
    rows, skipped = _load(directories)
    if not rows:
        return _print_error(no_readable_record(directories, skipped))
    unknown = sorted(set(traced_runs) - {row.label for row in rows})
    if unknown:
        return _print_error(f"--trace {' '.join(unknown)}: no such run. Give labels such as {rows[0].label}")
    target = directories[0] / REPORT
    if link := next((path for path in (target, target / PLOTS) if path.is_symlink()), None):
        return _print_error(f"{link} is a link to another place, and a report is written to none: remove it")
    overview = Overview.from_rows(rows)
    keep_errors(overview)
    make_console().print(OverviewTable(overview, results=target / "results.csv"))
    try:
        notes = [f"skipped: {message}" for message in skipped]
        written = write_files(overview, target, traced_runs, notes)
        parts = [path.relative_to(target).parts for path in written]
        names = sorted({f"{first}/" if rest else first for first, *rest in parts})
        print_text(f"written: {target}, {len(written)} files: {', '.join(names)}")
        if figures is not None:
            target = figures
            count = len(write_figures(overview, target, traced_runs))
            print_text(f"written: {target}, {count} files for a paper or slides")
    except BrokenPipeError:  # The reader of the output has seen enough.
        raise
    except OSError as error:
        print_error(f"cannot write to {target}: {describe_disk_error(error)}")
        return 1
    except ModuleNotFoundError as error:
        package = DRAWING_PACKAGES.get(error.name or "", error.name)
        print_error(f"figures need the package {package}: pip install {package}")
        return 1
    return 0


def compare(before: Path, after: Path) -> int:
    """Print the comparison of two sweeps. Return 1 if there are regressions."""
    (rows_before, skipped), (rows_after, skipped_after) = _load([before]), _load([after])
    if not rows_before or not rows_after:
        missing, reasons = (after, skipped_after) if rows_before else (before, skipped)
        return _print_error(no_readable_record([missing], reasons))
    comparison = Comparison.of(rows_before, rows_after)
    if not comparison.pairs:
        return _print_error(f"{before} and {after} have no configuration in common: nothing to compare")
    make_console().print(ComparisonTable(comparison, str(before), str(after)))
    return 1 if any(comparison.regressions()) else 0


def _load(directories: Sequence[Path]) -> tuple[list[Row], list[str]]:
    rows, skipped = load_rows(directories)
    for message in skipped if rows else ():  # Without rows, they are the error.
        print(f"skipped: {message}", file=sys.stderr)
    return rows, skipped


def _print_error(message: str) -> int:
    print_error(message)
    return 2


# Comparison of two sweeps, ``distexp report --compare A B``: matching runs, regressions, and their table.


MIN_SPEED_RATIO = 0.95
MAX_MEMORY_RATIO = 1.05
MAX_LOSS_RATIO = 1.01  # without any change, two runs on GPUs differ by less
LOSSES = {"eval_loss": "eval loss", "train_loss": "train loss"}
DISTURBED_NOTE = (
    "Another program slowed one of the two runs down. If this is B, its lower speed does not count as a regression."
)


@dataclass(frozen=True)
class Pair:
    """The same training in both sweeps."""

    before: RunGroup
    after: RunGroup

    def metric_pair(self, name: str) -> tuple[Spread, Spread] | None:
        """Return a metric before and after; None if one side lacks it or did not complete."""
        before, after = self.before.metric(name), self.after.metric(name)
        is_complete = self.before.completed and self.after.completed
        return (before, after) if is_complete and before and after else None

    def ratio(self, name: str) -> float | None:
        """Return after / before."""
        pair = self.metric_pair(name)
        return pair[1].mean / pair[0].mean if pair and pair[0].mean else None

    @property
    def disturbance(self) -> str:
        """Return what makes the ratio of the speeds uncertain; empty if nothing does.

        A disturbed A seems slower than it is. So a B that is slower still is slower in any case.
        """
        ratio = self.ratio(SPEED)
        is_slower = ratio is not None and ratio < 1
        sides = {"B": self.after.disturbance, "A": None if is_slower else self.before.disturbance}
        return "; ".join(f"{side} was disturbed: {reason}" for side, reason in sides.items() if reason)

    def is_noise(self, name: str) -> bool:
        """Return whether a difference is within run-to-run noise."""
        pair = self.metric_pair(name)
        return bool(pair and is_within_noise(*pair))

    def noise(self, name: str) -> float | None:
        """Return the noise of a difference, relative to the value before; None if unknown."""
        pair = self.metric_pair(name)
        noise = difference_noise(*pair) if pair else None
        return noise / abs(pair[0].mean) if pair and noise is not None and pair[0].mean else None

    def first_measured(self, names: Iterable[str]) -> str | None:
        """Return the first of some metrics that both sides have."""
        return next((name for name in names if self.metric_pair(name)), None)


@dataclass(frozen=True)
class Comparison:
    """Sweep A (before) and sweep B (after); ``changed`` are settings such as ``precision fp32 -> bf16``."""

    pairs: tuple[Pair, ...]
    only_before: Sequence[RunGroup]
    only_after: Sequence[RunGroup]
    varied: tuple[str, ...]
    changed: tuple[str, ...]

    @classmethod
    def of(cls, before: Sequence[Row], after: Sequence[Row]) -> Comparison:
        """Match equal trainings first, then those with equal varying settings."""
        matched, only_before, only_after = _match_by_training(before, after)
        names = dict.fromkeys([*_varying(before), *_varying(after)])
        varied = tuple(name for name in names if name != SEED)
        for settings in (varied, _varying(before), _varying(after)):
            matched += _match_by_settings(only_before, only_after, settings)
        # The groups of a pair know the noise between repeats of either sweep.
        shared = iter(share_deviations([group for pair in matched for group in (pair.before, pair.after)]))
        pairs = tuple(starmap(Pair, zip(shared, shared, strict=True)))
        return cls(pairs, only_before, only_after, varied, tuple(_changed(before, after, varied)))

    def regressions(self) -> Iterator[str]:
        """Yield a line for each regression."""
        for pair in self.pairs:
            for regression in _regressions(pair):
                yield f"{self.describe(pair.after)}: {regression}"

    def uncertain(self) -> Iterator[str]:
        """Yield a line for each lower speed and larger memory that is no regression, with the reason."""
        for pair in self.pairs:
            memory = pair.first_measured(MEMORIES)
            if (ratio := pair.ratio(SPEED)) is not None and ratio < MIN_SPEED_RATIO:
                if pair.disturbance:
                    change = f"{_format_change(pair, SPEED)} samples/s ({ratio - 1:+.1%})"
                    yield f"{self.describe(pair.after)}: {change}, but {pair.disturbance}: repeat it"
                else:
                    yield from self._within_noise(pair, SPEED, "samples/s", ratio)
            if memory and (ratio := pair.ratio(memory)) is not None and ratio > MAX_MEMORY_RATIO:
                yield from self._within_noise(pair, memory, f"MiB of {MEMORIES[memory]}", ratio)

    def _within_noise(self, pair: Pair, name: str, unit: str, ratio: float) -> Iterator[str]:
        noise = pair.noise(name)
        if noise is not None and pair.is_noise(name):
            change = f"{_format_change(pair, name)} {unit} ({ratio - 1:+.1%})"
            yield f"{self.describe(pair.after)}: {change}, within the noise of {format_noise(noise, 1)}"

    def describe(self, group: RunGroup) -> str:
        """Return ``strategy=fsdp, offload=true``, or the label of the run."""
        return format_settings(group.settings, self.varied) or f"run {group.label}"


def _varying(rows: Sequence[Row]) -> list[str]:
    return varying_settings([row.record for row in rows], [row.settings for row in rows])


def _match_by_training(
    before: Sequence[Row], after: Sequence[Row]
) -> tuple[list[Pair], list[RunGroup], list[RunGroup]]:
    """Return the pairs of equal trainings, and the groups that are in one sweep only."""
    pairs: list[Pair] = []
    only_before: list[RunGroup] = []
    only_after: list[RunGroup] = []
    ids_before = {id(row) for row in before}
    for group in group_repeats([*before, *after]):
        rows_before = tuple(row for row in group.rows if id(row) in ids_before)
        rows_after = tuple(row for row in group.rows if id(row) not in ids_before)
        if rows_before and rows_after:
            pairs.append(Pair(RunGroup(rows_before), RunGroup(rows_after)))
        else:
            (only_before if rows_before else only_after).append(group)
    return pairs, only_before, only_after


def _match_by_settings(only_before: list[RunGroup], only_after: list[RunGroup], names: Sequence[str]) -> Iterator[Pair]:
    """Move groups with equal settings to pairs, if no other group of their sweep has these settings."""
    before, after = group_by_settings(only_before, names), group_by_settings(only_after, names)
    for key, groups in before.items():
        if len(groups) == 1 and len(after.get(key, ())) == 1:
            pair = Pair(groups[0], after[key][0])
            only_before[:] = [group for group in only_before if group is not pair.before]
            only_after[:] = [group for group in only_after if group is not pair.after]
            yield pair


def _changed(before: Sequence[Row], after: Sequence[Row], varied: Sequence[str]) -> Iterator[str]:
    for name in _varying([*before, *after]):
        values_before = {format_setting(row.settings.get(name)) for row in before}
        values_after = {format_setting(row.settings.get(name)) for row in after}
        if name not in varied and values_before != values_after and len(values_before) == len(values_after) == 1:
            yield f"{name} {values_before.pop()} -> {values_after.pop()}"


def _regressions(pair: Pair) -> Iterator[str]:
    failed = [row for row in pair.after.rows if not row.completed]
    if pair.before.status == "completed" and failed:
        yield f"completed -> {pair.after.status} ({failure_reason(failed[0])})"

    def ratio_beyond_noise(name: str) -> float:
        ratio = None if pair.is_noise(name) else pair.ratio(name)
        return 1.0 if ratio is None else ratio

    memory, loss = pair.first_measured(MEMORIES), pair.first_measured(LOSSES)
    if not pair.disturbance and (ratio := ratio_beyond_noise(SPEED)) < MIN_SPEED_RATIO:
        yield f"slower, {_format_change(pair, SPEED)} samples/s ({ratio - 1:+.1%})"
    if memory and (ratio := ratio_beyond_noise(memory)) > MAX_MEMORY_RATIO:
        yield f"more {MEMORIES[memory]}, {_format_change(pair, memory)} MiB ({ratio - 1:+.1%})"
    if loss and (ratio := ratio_beyond_noise(loss)) > MAX_LOSS_RATIO:
        yield f"higher {LOSSES[loss]}, {_format_change(pair, loss)} ({ratio - 1:+.1%})"


def _format_change(pair: Pair, name: str) -> str:
    before, after = (format_metric([group], METRICS_BY_NAME[name])[0] for group in (pair.before, pair.after))
    return f"{before} -> {after}"


@dataclass(frozen=True)
class ComparisonTable:
    """A row for each training that is in both sweeps, then the regressions; ``before`` and ``after`` are names."""

    comparison: Comparison
    before: str
    after: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self.comparison
        kept, hidden = columns.fit_columns(list(comparison_columns(comparison)), options.max_width)
        yield Text(f"A: {self.before}\nB: {self.after}\n", style="bold")
        if comparison.changed:
            yield Text(f"Changed in all runs from A to B: {', '.join(comparison.changed)}.\n")
        for block in columns.split_columns(kept, options.max_width):
            yield columns.build_table(block)
            yield Text("")
        if hidden:
            yield columns.hidden_columns_note(hidden, "A wider terminal shows them.")
        for side, groups in (("A", comparison.only_before), ("B", comparison.only_after)):
            if groups:
                yield Text(f"Only in {side}: {'; '.join(comparison.describe(group) for group in groups)}.")
        if any("~" in cell for column in kept for cell in column.cells):
            yield Text("~, ~1: the difference is within the noise.", style="dim")
        if any(pair.disturbance for pair in comparison.pairs):
            yield Text(f"{DISTURBED_MARK}: {DISTURBED_NOTE}", style="dim")
        for change in comparison.uncertain():
            yield Text(f"Not a regression: {change}.", style="yellow")
        regressions = [Text(f"Regression: {regression}", style="red") for regression in comparison.regressions()]
        matched = format_count(len(comparison.pairs), "matched configuration")
        yield from regressions or [Text(f"No regression in {matched}.", style="green")]


def comparison_columns(comparison: Comparison) -> Iterator[columns.Column]:
    """Yield the columns: settings, status, and each metric of A, of B and B/A."""
    pairs = comparison.pairs
    for index, name in enumerate(comparison.varied):
        cells = tuple(format_setting(pair.after.setting(name), MAX_LENGTH) for pair in pairs)
        yield columns.Column(columns.setting_title(name), cells, columns.ALWAYS - index, right=False)
    if not comparison.varied:
        yield columns.Column("run", tuple(pair.after.label for pair in pairs), columns.ALWAYS)
    statuses = [(pair.before.status, pair.after.status) for pair in pairs]
    changes = tuple(before if before == after else f"{before} -> {after}" for before, after in statuses)
    yield columns.Column("status", changes, 120, right=False)
    if any(max(len(pair.before.rows), len(pair.after.rows)) > 1 for pair in pairs):
        counts = tuple(f"{len(pair.before.counted_rows)}, {len(pair.after.counted_rows)}" for pair in pairs)
        yield columns.Column("n", counts, 50)
    for name in (SPEED, *MEMORIES):
        ratios = [(pair, pair.ratio(name)) for pair in pairs]
        if any(ratio is not None for _, ratio in ratios):
            metric = METRICS_BY_NAME[name]
            for side, groups in (("A", [pair.before for pair in pairs]), ("B", [pair.after for pair in pairs])):
                yield columns.Column(f"{metric.title} {side}", format_metric(groups, metric), metric.importance - 30)
            first_line = metric.title.split("\n")[0]
            cells = tuple("-" if ratio is None else _ratio_cell(pair, name, ratio) for pair, ratio in ratios)
            yield columns.Column(f"{first_line}\nB/A", cells, metric.importance + 10)
    for name in LOSSES:
        both = [(pair, pair.metric_pair(name)) for pair in pairs]
        if any(known for _, known in both):
            cells = tuple(
                f"{known[1].mean - known[0].mean:+z.4f}{_mark(pair, name)}" if known else "-" for pair, known in both
            )
            yield columns.Column(METRICS_BY_NAME[name].title + " B-A", cells, 90)


def _ratio_cell(pair: Pair, name: str, ratio: float) -> str:
    """Return a ratio, or its mark if it may not be ranked."""
    mark = _mark(pair, name)
    return (EQUAL if mark == NOISE_MARK else mark) if mark else f"{ratio:.2f}x"


def _mark(pair: Pair, name: str) -> str:
    if name == SPEED and pair.disturbance:
        return DISTURBED_MARK
    return NOISE_MARK if pair.is_noise(name) else ""


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
