"""Terminal table of runs, with notes on failures and a summary below it."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from distexp.config.overrides import join_first
from distexp.report.data.answer import are_trials, headline
from distexp.report.data.memory_by_part import build_parts_table, has_small_parts
from distexp.report.data.metrics import EFFICIENCY, MEMORIES, METRICS_BY_NAME, SPEED, SPEEDUP
from distexp.report.data.overview import (
    NOISE_MARK,
    Overview,
    Ranking,
    describe_disturbances,
    describe_stragglers,
    energy_totals,
    failure_notes,
    group_by_task,
    memory_metric,
    rank_by_metric,
    remark_on_scaling,
)
from distexp.report.data.reasons import reasons
from distexp.report.data.repeats import EQUAL, RunGroup, format_metric
from distexp.report.data.rows import (
    MAX_LENGTH,
    format_noise,
    format_setting,
    global_batch,
    name_runs,
    rows_from_records,
)
from distexp.report.exercises import exercise_tables, quiz_columns
from distexp.report.losses import describe_same_training
from distexp.runs.record import FAILURES, RunRecord
from distexp.runs.texts import STAND_IN, missing_costs, record_model_label
from distexp.statistics.noise import SINGLE_CPU_RUN, difference_noise, distinct_ratio
from distexp.system.typed_values import UNCOUNTED_CPU_PHASES
from distexp.tables import columns
from distexp.tables.columns import render_text_table, without_wide_labels

MAX_ROWS = 200  # on a terminal
MAX_NOTES = 20
# Importance of the first settings, relative to the metrics; the others are hidden before any metric.
SETTING_IMPORTANCE = (columns.ALWAYS - 2, 94, 92, 88)
MAX_TASKS, FEW_STEPS = 4, 5
SAME = 0.005  # relative difference
CPU_SPEEDS = "Speeds on CPU vary with other programs"
HIGH_SETUP_PEAK = 1.25  # times the peak of all later phases


@dataclass(frozen=True)
class OverviewTable:
    """Table of runs for a terminal of any width; ``results`` is the file with all columns, if one was written.

    At the end of a sweep it is short: with the answer, and without what the report explains.
    """

    overview: Overview
    results: Path | None = None
    is_short: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        overview = self.overview
        shown = [column.first_rows(MAX_ROWS) for column in overview_columns(overview)]
        blocks, hidden = columns.arrange_columns(shown, options.max_width)
        for block in blocks:
            yield columns.build_table(block, [status_style(group) for group in overview.groups])
            yield Text("")
        more_rows = len(overview.groups) - MAX_ROWS
        if more_rows > 0:
            place = f"in {self.results}" if self.results else "not shown"
            yield Text(f"{more_rows} more rows are {place}.", style="dim")
        if hidden:
            yield columns.hidden_columns_note(hidden, f"All columns are in {self.results}." if self.results else "")
        notes = list(failure_notes(overview.rows))
        yield from (Text(note, style="yellow") for note in notes[:MAX_NOTES])
        if len(notes) > MAX_NOTES:
            yield Text(f"{len(notes) - MAX_NOTES} more errors are not shown.", style="dim")
        yield from map(Text, describe_same_training(overview))
        if self.is_short:
            yield from _short_summary(overview)
        else:
            yield from map(Text, summarize(overview, hidden={column.title for column in hidden}))
        yield ExerciseTables(overview)
        if not self.is_short and has_small_parts(overview) and (parts := build_parts_table(overview)):
            yield from render_text_table(without_wide_labels(parts, options.max_width), options.max_width)


def _short_summary(overview: Overview) -> Iterator[Text]:
    """Yield which run to take or why this is not decided, and what marks in the table mean."""
    yield from map(Text, describe_disturbances(overview))
    yield from (Text(sentence, style="bold") for sentence in headline(overview))
    yield from map(Text, reasons(overview))


@dataclass(frozen=True)
class ExerciseTables:
    """Tables of the exercises that the runs belong to, on a terminal."""

    overview: Overview

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if all(row.record.status == "invalid" for row in self.overview.rows):
            return  # the notes on the runs list the errors already
        tables = list(exercise_tables(self.overview))
        for table in tables:
            yield from render_text_table(table, console.width)
        if tables:
            yield Text("The workshop explains the exercises: docs/workshop.md", style="dim")


def build_overview_table(records: Sequence[RunRecord], sweep_dir: Path | None = None) -> OverviewTable:
    """Return the table printed after a sweep. Without its directory, the losses are not compared."""
    return OverviewTable(Overview.from_rows(rows_from_records(records, sweep_dir)))


def overview_columns(overview: Overview) -> Iterator[columns.Column]:
    """Yield the columns of runs, settings, status and metrics; those that a quiz asks for are required."""
    groups, quiz, always = overview.groups, quiz_columns(overview), columns.ALWAYS
    yield columns.Column("run", tuple(group.label for group in groups), always)
    if any(len(group.rows) > 1 for group in groups):
        yield columns.Column("n", tuple(str(len(group.counted_rows)) for group in groups), always - 1)
    for name, importance in zip(overview.varied, chain(SETTING_IMPORTANCE, repeat(0)), strict=False):
        cells = tuple(format_setting(group.setting(name), MAX_LENGTH) for group in groups)
        yield columns.Column(columns.setting_title(name), cells, always if name in quiz else importance, right=False)
    yield columns.Column("status", tuple(group.status for group in groups), always, right=False)
    for metric in overview.metrics():
        shown = zip(groups, format_metric(groups, metric), strict=True)
        cells = tuple(overview.cell(metric.name, group, text) for group, text in shown)
        yield columns.Column(metric.title, cells, always if metric.name in quiz else metric.importance)


def status_style(group: RunGroup) -> str:
    """Return the color of a status: green for completed, red for failures."""
    statuses = {row.record.status for row in group.rows}
    if statuses == {"completed"}:
        return "green"
    return "red" if statuses & FAILURES else "yellow" if "invalid" in statuses else "magenta"


def summarize(overview: Overview, *, hidden: Collection[str] = ()) -> Iterator[str]:
    """Yield the sentences below a table of runs. The titles of hidden columns are not explained."""
    yield from _stand_ins(overview)
    yield from explain_cpu_speeds(overview)
    if are_trials(overview.rows):
        yield from _trials(overview)
    else:
        yield from _fastest(overview)
        if (name := memory_metric(overview)) is not None:
            yield from _best(overview, name, f"Lowest {MEMORIES[name]}", "{:,.0f} MiB", largest=False)
    yield from describe_disturbances(overview)
    yield from describe_stragglers(overview.rows)
    yield from _setup_peaks(overview)
    yield from remark_on_scaling(overview)
    if not are_trials(overview.rows):
        yield from _few_steps(overview)
    yield from _global_batches(overview)
    yield from _definitions(overview, hidden)
    yield from _repeats(overview)
    yield from _total_energy(overview)
    yield from _incomplete_runs(overview)


def _stand_ins(overview: Overview) -> Iterator[str]:
    sizes: dict[str, list[int]] = {}
    for record in (row.record for row in overview.rows):
        label = record_model_label(record)
        if STAND_IN in label and record.built is not None:
            sizes.setdefault(label, []).append(record.built.parameters)
    for label, counts in list(sizes.items())[:MAX_TASKS]:
        low, high = min(counts), max(counts)
        yield f"Model: {label}, {low:,}{f' to {high:,}' if high > low else ''} parameters."


def explain_cpu_speeds(overview: Overview) -> Iterator[str]:
    """Yield what speed comparisons on CPU are worth, if these runs can be compared."""
    completed = [group for group in overview.groups if group.completed]
    on_cpu = [group for group in completed if group.setting("device") == "cpu" and group.metric(SPEED) is not None]
    tasks = list(group_by_task(on_cpu).values())[:MAX_TASKS]
    groups = next((groups for groups in tasks if len(groups) > 1), None)
    if groups is None:
        return
    repeated = groups[0].deviations.get(SPEED)
    if repeated is None:
        ratio = f"{distinct_ratio(SINGLE_CPU_RUN):.1f}x"
        yield f"{CPU_SPEEDS}: compare only those that differ by more than {ratio}, or use repeats=3."
    else:
        deviation = format_noise(repeated.relative, 1)
        yield f"{CPU_SPEEDS}: equal runs differed by {deviation} here (standard deviation)."


def _trials(overview: Overview) -> Iterator[str]:
    steps = sorted({row.record.metrics.total_steps for row in overview.rows if row.record.metrics.total_steps})
    if steps:
        count = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
        yield f"These are trials of distexp choose with {count} steps each. Their speeds are rough."
    yield "The winner and its margin are in choose.json."


def _fastest(overview: Overview) -> Iterator[str]:
    yield from _best(overview, SPEED, "Fastest", "{:,.1f} samples/s", largest=True)
    tasks = group_by_task([group for group in overview.groups if group.completed and group.metric(SPEED)])
    for task, groups in list(tasks.items())[:MAX_TASKS]:
        disturbed = [group.label for group in groups if group.disturbance is not None]
        if len(groups) > 1 and len(groups) - len(disturbed) < 2:
            start = f"Fastest ({task})" if len(tasks) > 1 else "Fastest"
            yield f"{start}: not decided, because the speed of {name_runs(disturbed)} is not known."


def _best(overview: Overview, name: str, what: str, number_format: str, *, largest: bool) -> Iterator[str]:
    rankings = list(rank_by_metric(overview, name, largest=largest))[:MAX_TASKS]
    for ranking in rankings:
        if len(ranking.ranked) > 1:
            start = f"{what} ({ranking.task}): " if len(rankings) > 1 else f"{what}: "
            yield from _compare_best(overview, ranking, start, number_format)


def _compare_best(overview: Overview, ranking: Ranking, start: str, number_format: str) -> Iterator[str]:
    """Yield the best group and the next one. The next one is the first that is equal to the best, if there is one."""
    best, equal = ranking.best, ranking.equal_to_best
    following = equal[0] if equal else ranking.ranked[1]
    first, other = (
        f"{overview.describe(group.group)}, {number_format.format(group.value.mean)}" for group in (best, following)
    )
    noise = difference_noise(best.value, following.value)
    if equal and noise is not None:
        yield f"{start}{first}, and {other}, {ranking.why_equal(noise)}."
        if len(equal) > 1:
            yield f"Also equal within the noise: {name_runs(group.group.label for group in equal[1:])}."
        return
    yield f"{start}{first}."
    if noise is not None:
        yield f"The next is {other}, beyond the noise of {format_noise(noise, best.value.mean)}."
    elif abs(best.value.mean - following.value.mean) < SAME * best.value.mean:
        yield f"Equal within {SAME:.1%}: {other}."


def _setup_peaks(overview: Overview) -> Iterator[str]:
    """Yield runs whose CPU memory peaked during setup, for example while DeepSpeed compiled an extension."""
    if memory_metric(overview) != "cpu_peak_mib":
        return
    left_out = {"setup", *UNCOUNTED_CPU_PHASES}
    for row in (row for group in overview.groups for row in group.counted_rows if row.completed):
        phases = [entry.get("phases") or {} for entry in row.record.memory.get("cpu") or []]
        setup = max((peaks.get("setup") or 0.0 for peaks in phases), default=0.0)
        later = max((mib for peaks in phases for phase, mib in peaks.items() if phase not in left_out), default=0.0)
        if later and setup > HIGH_SETUP_PEAK * later:
            yield f"Run {row.label} had its memory peak during setup. After setup its peak was {later:,.0f} MiB."
            if (strategy := row.record.strategy) is not None and strategy.setup_note:
                yield strategy.setup_note


def _few_steps(overview: Overview) -> Iterator[str]:
    completed = [group for group in overview.groups if group.completed]
    few = [group.label for group in completed if 0 < group.rows[0].measured_steps < FEW_STEPS]
    if few:
        yield f"Fewer than {FEW_STEPS} steps were measured in {name_runs(few)}."
        yield "For a reliable speed, raise train.max_steps or train.num_epochs."


def _global_batches(overview: Overview) -> Iterator[str]:
    tasks = group_by_task([group for group in overview.groups if group.completed])
    for task, groups in list(tasks.items())[:MAX_TASKS]:
        batches: dict[int, list[str]] = {}
        for group in groups:
            if batch := global_batch(group.rows[0].settings):
                batches.setdefault(batch, []).append(group.label)
        if len(batches) > 1:
            of = f" ({task})" if len(tasks) > 1 else ""
            sizes = join_first((f"{batch} in {name_runs(labels, 2)}" for batch, labels in batches.items()), MAX_TASKS)
            yield f"Global batch sizes differ{of}: {sizes}."
            yield "Their losses are not comparable. Make the batches equal with train.gradient_accumulation_steps."


def _definitions(overview: Overview, hidden: Collection[str]) -> Iterator[str]:
    if overview.baseline is not None and METRICS_BY_NAME[SPEEDUP].title not in hidden:
        several = len({group.task for group in overview.groups if group.completed}) > 1
        only = f" Only runs of {overview.baseline.task} have one." if several else ""
        yield f"Speedup: samples/s relative to {overview.describe(overview.baseline)}.{only}"
        if any(overview.mark(SPEEDUP, group) == NOISE_MARK for group in overview.groups):
            yield f"{EQUAL}: equal to this run within the noise."
    several_epochs = any(len(row.record.metrics.train_losses) > 1 for row in overview.rows)
    if several_epochs and METRICS_BY_NAME["train_loss"].title not in hidden:
        yield "Train loss: mean of all steps, as in the Hugging Face Trainer."
    if overview.series and METRICS_BY_NAME[EFFICIENCY].title not in hidden:
        yield "Efficiency: ideal time / real time, relative to the fewest workers of the same configuration."


def _repeats(overview: Overview) -> Iterator[str]:
    counts = [len(group.counted_rows) for group in overview.groups if group.completed]
    if any(count > 1 for count in counts):
        yield "Repeats of a training are one row (n runs): mean ± sample standard deviation."
    elif len(counts) > 1:
        yield "Each row is one run. Repeat with repeats=3 to measure the noise."
    mixed = [group for group in overview.groups if len({row.record.run.git_sha for row in group.rows}) > 1]
    if mixed:
        yield f"These repeats ran different git commits: {join_first(map(overview.describe, mixed), 3)}."


def _incomplete_runs(overview: Overview) -> Iterator[str]:
    if counts := Counter(row.record.status for row in overview.rows if not row.completed):
        each = ", ".join(f"{count} {status}" for status, count in counts.items())
        yield f"{sum(counts.values())} of {len(overview.rows)} runs did not complete: {each}."


def _total_energy(overview: Overview) -> Iterator[str]:
    """Yield energy and cost of all runs together, and why they lack some of it. A single run has them in its row."""
    totals = list(energy_totals(overview.rows))
    if totals and len(overview.rows) > 1:
        yield f"In total: {', '.join(totals)}."
    for reason in dict.fromkeys(reason for row in overview.rows for reason in missing_costs(row.record)):
        yield f"{reason[0].upper()}{reason[1:]}."
