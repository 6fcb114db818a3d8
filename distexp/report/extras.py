"""Tables beside that of the runs, and the seam for each exercise's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from distexp.report.figures import FIGURE
from distexp.report.overview import Overview, reason
from distexp.report.repeats import Group
from distexp.report.settings import setting_text


@dataclass(frozen=True)
class Table:
    """A small table of texts; the first column names the rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def exercise_tables(overview: Overview) -> Iterator[Table]:
    """The tables of every exercise among the runs, by the key ``name`` of their configurations."""
    names = dict.fromkeys(str(row.record.config.get("name")) for row in overview.rows)
    for name in names:
        groups = [group for group in overview.groups if group.rows[0].record.config.get("name") == name]
        if name in EXERCISES:
            yield from EXERCISES[name](overview, groups)


def by_setting(title: str, setting: str, groups: Sequence[Group], figures: Sequence[str]) -> Table:
    """Figures as rows, a setting's values as columns; a cell without a figure says why."""
    header = ("", *(f"{setting}={setting_text(group.setting(setting))}" for group in groups))
    rows = [
        (said, *(cell(group, name) for group in groups)) for name in figures
        for said in [FIGURE[name].title.replace("-\n", "").replace("\n", " ")]
        if any(group.figure(name) for group in groups)
    ]  # fmt: skip
    return Table(title, header, tuple(rows))


def cell(group: Group, name: str) -> str:
    """A figure as it stands in a table, else why it is not there."""
    figure = group.figure(name)
    if figure is not None and group.completed:
        return figure.text(FIGURE[name])
    if group.completed:
        return "not measured"
    return f"{group.status}: {reason(group.rows[0], 80)}"


def _zero_stages(overview: Overview, groups: Sequence[Group]) -> Iterator[Table]:
    figures = (
        "train_samples_per_second", "train_loss", "gpu_peak_mib", "gpu_average_mib", "gpu_mode_mib", "cpu_peak_mib",
    )  # fmt: skip
    staged = [group for group in groups if group.setting("zero_stage") is not None]
    if staged:
        yield by_setting("ZeRO stages", "zero_stage", staged, figures)


EXERCISES: dict[str, Callable[[Overview, Sequence[Group]], Iterator[Table]]] = {"zero_stages": _zero_stages}
"""What an exercise's own tables are made by, under the ``name`` of its preset in conf/experiment."""
