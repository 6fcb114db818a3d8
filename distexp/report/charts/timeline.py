"""Memory over time, a panel a run: a line a node, the phases shaded behind."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from distexp.report.charts.theme import PHASES, colour, values
from distexp.report.traces import RunTrace


def timelines(traces: Sequence[RunTrace], kind: str) -> list[tuple[str, alt.LayerChart]]:
    """Panels with their titles, all with the same axis of memory."""
    shown = [each for each in traces if each.curves(kind)]
    most = max((mib for each in shown for curve in each.curves(kind) for _, mib in curve.points), default=0.0)
    nodes = sorted({curve.node for each in shown for curve in each.curves(kind)})
    return [(_title(each), _panel(each, kind, most, nodes)) for each in shown]


def _title(traced: RunTrace) -> str:
    outcome = "" if traced.row.completed else f" ({traced.row.record.status})"
    return f"run {traced.row.label}: {traced.name}{outcome}".replace(f": run {traced.row.label}", "")


def _panel(traced: RunTrace, kind: str, most: float, nodes: Sequence[int]) -> alt.LayerChart:
    curves = traced.curves(kind)
    rows = [
        {"node": f"node {curve.node}", "seconds": second, "mib": mib}
        for curve in curves
        for second, mib in curve.points
    ]
    end = max(row["seconds"] for row in rows)  # type: ignore[type-var]
    phases = [
        {"phase": each.phase, "begin": each.begin_s, "end": each.end_s}
        for each in traced.phases
        if each.phase in PHASES
    ]
    x = alt.X("seconds:Q", title="s", scale=alt.Scale(domain=[0, end], nice=False), axis=alt.Axis(grid=False))
    y = alt.Y("mib:Q", title="MiB", scale=alt.Scale(domain=[0, most * 1.05], nice=False), axis=alt.Axis(tickCount=4))
    domain = [f"node {node}" for node in nodes]
    own = [f"node {curve.node}" for curve in curves]
    legend = alt.Legend(title=None, direction="horizontal", values=own) if len(own) > 1 else None
    line = (
        alt.Chart(values(rows))
        .mark_line(strokeWidth=1.8, clip=True)
        .encode(
            x=x, y=y,
            color=alt.Color("node:N", scale=alt.Scale(domain=domain), legend=legend),
            tooltip=["node:N", alt.Tooltip("seconds:Q", format=".1f"),
                     alt.Tooltip("mib:Q", title="MiB", format=",.0f")],
        )
    )  # fmt: skip
    shades = (
        alt.Chart(values(phases))
        .mark_rect(opacity=0.17)
        .encode(
            x=alt.X("begin:Q", title="s"),
            x2="end:Q",
            fill=alt.Fill(
                "phase:N",
                scale=alt.Scale(domain=list(PHASES), range=[colour(f"phase-{phase}") for phase in PHASES]),
                legend=None,
            ),
            tooltip=["phase:N", alt.Tooltip("begin:Q", format=".1f"), alt.Tooltip("end:Q", format=".1f")],
        )
    )
    return alt.layer(shades, line).properties(height=170)
