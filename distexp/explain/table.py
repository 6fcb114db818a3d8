"""Tables of ``distexp explain``: the parts of a step with bars, for each rank, or of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from distexp.explain.profile_comparison import ProfileComparison
from distexp.explain.step_profile import RankStep, StepProfile
from distexp.runs.step_parts import HIDDEN, PARTS
from distexp.tables.columns import ALWAYS, Column, build_table, cell, fit_columns

BAR_WIDTH = 24
BAR, HALF = "█", "▌"
HIDDEN_TITLE = "hidden communication"
WITHOUT_CORE_TITLE = "waiting for a CPU core"
"""Time inside the parts."""


def ranks_table(profile: StepProfile, width: int) -> Iterator[Table | Text]:
    """Yield the table with a row per part and a column per rank, and how many ranks it hides."""
    shown = [name for name in PARTS if any(rank.parts[name] is not None for rank in profile.ranks)]
    means_ms = [profile.mean_ms(name) for name in shown]
    largest = max(means_ms, default=0.0) or 1.0
    others = [HIDDEN_TITLE, *([WITHOUT_CORE_TITLE] if profile.without_core_share is not None else [])]
    empty = [""] * len(others)
    columns = [
        Column("part", (*map(_title, shown), "sum", *others), ALWAYS, right=False),
        Column(
            "mean\n%" if len(profile.ranks) > 1 else "%",
            (*(f"{100 * mean / profile.step_ms:.1f}" for mean in means_ms), "100.0", *empty),
            ALWAYS,
        ),
        Column("", (*(_bar(mean / largest) for mean in means_ms), "", *empty), 90, right=False),
        *(_rank_column(rank, shown, len(others)) for rank in profile.ranks),
    ]
    kept, hidden = fit_columns(columns, width)
    yield build_table(kept)
    if hidden:
        count = sum(column.title.startswith("rank") for column in hidden)
        yield Text(f"{count} more ranks: use --json, or a wider terminal. The % are means over all ranks.", style="dim")


def _rank_column(rank: RankStep, shown: Sequence[str], num_others: int) -> Column:
    """Return the times of a rank: its parts, their sum, and others. In a narrow terminal, rank 0 stays longest."""
    others = (rank.parts[HIDDEN], rank.without_core_ms)[:num_others]
    times = (*(rank.parts[name] for name in shown), rank.step_ms, *others)
    return Column(f"rank {rank.rank}\nms", tuple(cell(time, ",.2f") for time in times), 80 if rank.rank else 95)


def comparison_table(comparison: ProfileComparison, width: int) -> Table:
    """Return the table with a row per part, and both runs per sample."""
    ranks = (*comparison.a.ranks, *comparison.b.ranks)
    shown = [name for name in PARTS if any(rank.parts[name] is not None for rank in ranks)]
    parts = [comparison.per_sample(name) for name in shown]
    rows = [*parts, comparison.totals]
    largest = max((abs(part.change) for part in parts), default=0.0) or 1.0
    columns = [
        Column("part", (*map(_title, shown), "sum"), ALWAYS, right=False),
        Column("A\nms/sample", tuple(f"{row.a:,.3f}" for row in rows), ALWAYS),
        Column("B\nms/sample", tuple(f"{row.b:,.3f}" for row in rows), ALWAYS),
        Column("difference", tuple(f"{row.change:+,.3f}" for row in rows), ALWAYS),
        Column("", (*(_bar(abs(part.change) / largest) for part in parts), ""), 50, right=False),
    ]
    return build_table(fit_columns(columns, width)[0])


def _title(name: str) -> str:
    return PARTS[name]


def _bar(fraction: float) -> str:
    halves = round(2 * BAR_WIDTH * fraction)
    return BAR * (halves // 2) + HALF * (halves % 2)
