"""Table of what offloading costs in time and saves in memory, all other settings equal."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup, group_by_settings
from distexp.report.data.setting_names import SEED
from distexp.report.data.settings import MAX_LENGTH, format_setting
from distexp.report.data.text import format_change
from distexp.statistics.noise import is_within_noise
from distexp.tables.text_table import TextTable

OFFLOADS = (False, True, "pinned")
"""Values of ``offload``. The first one that was run is the baseline."""


def build_offload_table(overview: Overview, memory: str) -> TextTable | None:
    """Compare runs that differ only in ``offload``; None if there are none."""
    names = [name for name in overview.varied if name not in ("offload", SEED)]
    memories = list(dict.fromkeys((memory, "cpu_peak_mib")))
    rows = tuple(
        (
            *(format_setting(group.setting(name), MAX_LENGTH) for name in names),
            *(format_setting(one.setting("offload")) for one in (group, baseline)),
            _time(baseline, group),
            *(_memory(baseline, group, name) for name in memories),
        )
        for baseline, *others in _by_offload(overview.groups, names)
        for group in others
    )
    if not rows:
        return None
    header = (*names, "offload", "compared with", "time", *(MEMORIES[name] for name in memories))
    return TextTable("Effect of offloading", header, rows)


def _by_offload(groups: Sequence[RunGroup], names: Sequence[str]) -> list[list[RunGroup]]:
    """Collect groups that differ only in ``offload``, the baseline first."""
    members = group_by_settings(groups, names).values()
    alike = (sorted(similar, key=lambda group: OFFLOADS.index(group.setting("offload"))) for similar in members)
    return [similar for similar in alike if similar[0].setting("offload") != similar[-1].setting("offload")]


def _time(baseline: RunGroup, group: RunGroup) -> str:
    if not group.completed:
        return group.status
    if not baseline.completed:
        return f"{baseline.status} without it"
    before, after = baseline.metric(SPEED), group.metric(SPEED)
    if not (before and after and after.mean):
        return "-"
    noise = " (within noise)" if is_within_noise(before, after) else ""
    return f"{before.mean / after.mean:.2f}x{noise}"


def _memory(baseline: RunGroup, group: RunGroup, name: str) -> str:
    before, after = baseline.metric(name), group.metric(name)
    if not (baseline.completed and group.completed and before and after and before.mean):
        return "-"
    return f"{format_change(after.mean, before.mean)} ({after.mean:,.0f} MiB)"
