"""What ``distexp explain`` prints: the parts of a step with bars, for each rank, or of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from distexp.explain.profile_comparison import ProfileComparison
from distexp.explain.step_profile import StepProfile
from distexp.report.columns import ALWAYS, Column, build_table, fit_columns
from distexp.runs.step_parts import HIDDEN, PARTS

BAR_WIDTH = 24
BAR, HALF = "█", "▌"
CPU_NOTE = (
    "Without a GPU, operators of PyTorch count as kernels, slow launches are unknown, and the profiler makes all parts "
    "longer."
)


def ranks_table(profile: StepProfile, width: int) -> Iterator[Table | Text]:
    """Yield the table with a row per part and a column per rank, and what is hidden."""
    shown = [name for name in PARTS if any(rank.parts[name] is not None for rank in profile.ranks)]
    means = [profile.mean_ms(name) for name in shown]
    largest = max(means, default=0.0) or 1.0
    columns = [
        Column("part", (*map(_title, shown), "sum", "hidden communication"), ALWAYS, right=False),
        Column(
            "mean\n%" if len(profile.ranks) > 1 else "%",
            (*(f"{100 * mean / profile.step_ms:.1f}" for mean in means), "100.0", ""),
            ALWAYS,
        ),
        Column("", (*(_bar(mean / largest) for mean in means), "", ""), 90, right=False),
    ]
    for rank in profile.ranks:
        times = [rank.parts[name] for name in (*shown, HIDDEN)]
        texts = [_format(time) for time in times]
        columns.append(
            Column(f"rank {rank.rank}\nms", (*texts[:-1], _format(rank.step_ms), texts[-1]), 80 if rank.rank else 95)
        )
    kept, hidden = fit_columns(columns, width)
    yield build_table(kept)
    if hidden:
        count = sum(column.title.startswith("rank") for column in hidden)
        yield Text(f"{count} more ranks: use --json, or a wider terminal. The % are means over all ranks.", style="dim")


def comparison_table(comparison: ProfileComparison, width: int) -> Table:
    """Return the table with a row per part, and both runs per sample."""
    profiles = comparison.before, comparison.after
    shown = [name for name in PARTS if any(rank.parts[name] is not None for each in profiles for rank in each.ranks)]
    pairs = [comparison.per_sample(name) for name in shown]
    before, after = comparison.totals
    rows = [*pairs, (before, after)]
    largest = max((abs(b - a) for a, b in pairs), default=0.0) or 1.0
    columns = [
        Column("part", (*map(_title, shown), "sum"), ALWAYS, right=False),
        Column("A\nms/sample", tuple(f"{a:,.3f}" for a, _ in rows), ALWAYS),
        Column("B\nms/sample", tuple(f"{b:,.3f}" for _, b in rows), ALWAYS),
        Column("difference", tuple(f"{b - a:+,.3f}" for a, b in rows), ALWAYS),
        Column("", (*(_bar(abs(b - a) / largest) for a, b in pairs), ""), 50, right=False),
    ]
    return build_table(fit_columns(columns, width)[0])


def notes(profile: StepProfile) -> Iterator[str]:
    """Yield what limits the meaning of a profile."""
    if profile.overhead_ms > 0.05 * profile.step_ms:
        yield (
            f"The profiler made the step {profile.overhead_ms / profile.step_ms:.0%} longer. This is left out of "
            "slow launches, host work and waiting, in proportion to their size, and then of the data wait."
        )
    if profile.includes_overhead and profile.on_gpu:
        yield "The parts include the overhead of the profiler, because the batches have different sizes."
    if median := profile.different_median_ms:
        yield (
            f"The parts add up to {profile.step_ms:,.1f} ms. The median of the steps that were not profiled is "
            f"{median:,.1f} ms."
        )
    if not profile.on_gpu:
        yield CPU_NOTE


def comparison_notes(comparison: ProfileComparison) -> Iterator[str]:
    """Yield what limits the meaning of two profiles: first what is about one of them."""
    before, after = list(notes(comparison.before)), list(notes(comparison.after))
    yield from (f"A: {note}" for note in before if note not in after)
    yield from (f"B: {note}" for note in after if note not in before)
    yield from (note for note in before if note in after)


def _title(name: str) -> str:
    return PARTS[name]


def _format(time: float | None) -> str:
    return "-" if time is None else f"{time:,.2f}"


def _bar(fraction: float) -> str:
    halves = round(2 * BAR_WIDTH * fraction)
    return BAR * (halves // 2) + HALF * (halves % 2)


def try_line(alternatives: Sequence[str]) -> str | None:
    """Return the line with the overrides to try; None if there are none."""
    return f"try: {'  or  '.join(alternatives)}" if alternatives else None


def batch_line(larger: Sequence[str]) -> str | None:
    """Return the line about overrides that make the global batch larger; None if there are none."""
    return f"A larger global batch changes the training: {', '.join(larger)}." if larger else None
