"""Memory against throughput: one point per training, the Pareto front, and runs out of memory."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.report.data.metrics import MEMORIES
from distexp.report.data.overview import Overview
from distexp.report.data.ranking import memory_metric
from distexp.report.data.repeats import RunGroup
from distexp.report.figures.base import Figure, Panel
from distexp.report.figures.offload_table import build_offload_table
from distexp.report.figures.tradeoff import Cost, Tradeoff
from distexp.report.traces import RunTrace


def build_memory_throughput(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no memory was measured."""
    memory = memory_metric(overview)
    if memory is None:
        return None
    tradeoff = Tradeoff(overview, Cost(memory, MEMORIES[memory], "MiB", ",.0f"), _out_of_memory(overview, memory))
    chart = tradeoff.draw()
    if chart is None:
        return None
    offload = build_offload_table(overview, memory)
    return Figure(
        "memory_throughput", "Memory against throughput", (Panel("", chart),), _caption(tradeoff),
        tables=(offload,) if offload else (),
    )  # fmt: skip


def _caption(tradeoff: Tradeoff) -> str:
    crosses = ["Red crosses: runs out of memory, at their peak."] if tradeoff.failed else []
    return " ".join([*tradeoff.describe("smaller"), *crosses])


def _out_of_memory(overview: Overview, memory: str) -> tuple[RunGroup, ...]:
    """Return the groups that ran out of memory and have a peak."""
    return tuple(
        group for group in overview.groups if "oom" in group.status and not group.completed and group.metric(memory)
    )
