"""Training losses over the steps, evaluation losses, and their differences to a baseline."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from distexp.report.data.overview import Overview
from distexp.report.data.rows import name_runs
from distexp.report.figures.base import (
    Figure,
    LegendEntry,
    Panel,
    Rows,
    color,
    describe_selection,
    group_colors,
    inline_data,
)
from distexp.report.losses import (
    LossCurve,
    Losses,
    all_coincide,
    any_overlap,
    describe_same_training,
    largest_difference,
    loss_range,
    relative_differences,
)
from distexp.report.traces import MAX_TRACES, RunTrace

TRAINING, OTHERS, EVALUATION = "training loss", "training loss of the other runs", "evaluation loss"
ONE, BOTH = (TRAINING,), (TRAINING, OTHERS)
COLORS = {TRAINING: "c1", OTHERS: "line", EVALUATION: "c2"}
SINGLE_HEIGHT = 320
PANEL_HEIGHT = 150
WHOLE_STEPS = "datum.value % 1 ? '' : format(datum.value, ',d')"
"""Vega expression of a label. Between two steps that are close, Vega places ticks in spite of ``tickMinStep``."""


def build_losses(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no run completed a step.

    Coinciding curves would hide each other, so their differences are drawn. Overlapping curves get a panel each.
    """
    curves = [curve for curve in map(LossCurve.of, traces) if curve.training]
    if not curves:
        return None
    caption, sentences = describe_selection(overview, traces), tuple(describe_same_training(overview))
    finding = _find(curves, sentences)
    if len(curves) > 1 and all_coincide(curves):
        return replace(_difference_figure(overview, curves, caption, sentences), finding=finding)
    if len(curves) > 1 and any_overlap(curves):
        panels = tuple(draw_apart(curves))
        legend = panel_legend(curves, others=True)
        return Figure("losses", "Losses", panels, caption, sentences, legend=legend, finding=finding)
    panels = (Panel("", draw_together(overview, curves)),)
    return Figure("losses", "Losses", panels, caption, sentences, finding=finding)


def _find(curves: Sequence[LossCurve], sentences: Sequence[str]) -> str:
    """Return whether all runs trained the same model, or how the only one learned."""
    if len(curves) == 1:
        (first, start), *_, (last, end) = (*curves[0].training.items(), *curves[0].training.items())
        fell = "falls" if end < start else "rises"
        return f"The loss {fell} from {start:.3g} to {end:.3g} in {last - first} steps" if last > first else ""
    statement = sentences[0].partition(": ")[0] if len(sentences) == 1 else ""
    return {"Same training": "All runs train the same model", "Different losses": "Losses differ"}.get(statement, "")


def _difference_figure(
    overview: Overview, curves: Sequence[LossCurve], caption: str, sentences: tuple[str, ...]
) -> Figure:
    baseline = next((curve for curve in curves if curve.trace.group is overview.baseline), curves[0])
    equal = [curve for curve in curves if curve is not baseline and is_equal(curve, baseline)]
    panels = tuple(draw_differences(curves, baseline))
    labels = name_runs((curve.trace.row.label for curve in equal), MAX_TRACES)
    notes = [
        f"Equal to it at every step: {labels}." if equal else "",
        "The axis of a difference is at least as wide as the tolerance." if len(panels) > 1 else "",
        caption,
    ]  # fmt: skip
    drawn = f"difference to {baseline.name}" if len(panels) > 1 else baseline.name
    return Figure(
        "losses", "Losses", panels, " ".join(filter(None, notes)), sentences,
        legend=panel_legend(curves, others=False), subtitle=f"All curves coincide; drawn: {drawn}",
    )  # fmt: skip


def panel_legend(curves: Sequence[LossCurve], *, others: bool) -> tuple[LegendEntry, ...]:
    """Return the legend of panels with one run each; ``others`` are the gray curves behind it."""
    lines = [LegendEntry(kind, COLORS[kind], "line") for kind in (BOTH if others else ONE)]
    rings = [LegendEntry(EVALUATION, COLORS[EVALUATION], "ring")] if any(curve.evaluation for curve in curves) else []
    return (*lines, *rings)


def draw_together(overview: Overview, curves: Sequence[LossCurve]) -> alt.LayerChart:
    """Draw a line per run, and a ring per evaluation."""
    names, shades = [curve.name for curve in curves], group_colors(overview, [curve.trace.group for curve in curves])
    style = {"symbolType": "stroke", "symbolStrokeWidth": 3, "labelLimit": alt.ExprRef("width")}
    legend = alt.Legend(title=None, columns=1, **style) if len(names) > 1 else None
    encoding = {
        **_axes(curves),
        "color": alt.Color("run:N", scale=alt.Scale(domain=names, range=shades), legend=legend),
    }
    rows = [row for curve in curves for row in _rows(curve, curve.training)]
    rings = [row for curve in curves for row in _rows(curve, curve.evaluation)]
    lines = alt.Chart(inline_data(rows)).mark_line().encode(**encoding)
    return alt.layer(lines, *_rings(rings, encoding)).properties(height=SINGLE_HEIGHT)


def draw_apart(curves: Sequence[LossCurve]) -> Iterator[Panel]:
    """Yield a panel per run, with the other runs in gray behind it. All have the same axes."""
    for curve in curves:
        others = [row for other in curves if other is not curve for row in _rows(other, other.training)]
        behind = _lines(others, OTHERS, BOTH).encode(**_axes(curves), detail="run:N")
        yield Panel(curve.name, alt.layer(behind, *_draw_run(curve, curves, BOTH)).properties(height=PANEL_HEIGHT))


def draw_differences(curves: Sequence[LossCurve], baseline: LossCurve) -> Iterator[Panel]:
    """Yield the losses of the baseline, then the differences of each other run that is not equal to it."""
    others = [curve for curve in curves if not is_equal(curve, baseline)]
    chart = alt.layer(*_draw_run(baseline, curves, ONE))
    yield Panel(baseline.name, chart.properties(height=PANEL_HEIGHT if others else SINGLE_HEIGHT))
    limit = 100 * max(max(curve.tolerance, _widest_difference(curve, baseline)) for curve in curves)
    for curve in others:
        size, step = largest_difference(curve, baseline)
        title = f"{curve.name}: at most {100 * size:.2g}%, at step {step}"
        yield Panel(title, _draw_difference(curve, baseline, limit))


def is_equal(curve: LossCurve, baseline: LossCurve) -> bool:
    """Return whether all losses at common steps are equal."""
    return _widest_difference(curve, baseline) == 0


def _widest_difference(curve: LossCurve, baseline: LossCurve) -> float:
    pairs = ((curve.training, baseline.training), (curve.evaluation, baseline.evaluation))
    return max((abs(difference) for pair in pairs for difference in relative_differences(*pair).values()), default=0.0)


def _draw_difference(curve: LossCurve, baseline: LossCurve, limit: float) -> alt.LayerChart:
    y = alt.Y("percent:Q", title="difference (%)", scale=alt.Scale(domain=[-limit, limit], nice=False),
              axis=alt.Axis(values=[-limit, 0, limit], format=".2~g"))  # fmt: skip
    tooltip = ["run:N", "step:Q", alt.Tooltip("percent:Q", title="difference (%)", format=".3~g")]
    encoding = {"x": _step_axis(), "y": y, "tooltip": tooltip}
    training = _percent_rows(curve.name, relative_differences(curve.training, baseline.training))
    evaluation = _percent_rows(curve.name, relative_differences(curve.evaluation, baseline.evaluation))
    lines = _lines(training, TRAINING, ONE).encode(**encoding)
    return alt.layer(lines, *_rings(evaluation, encoding)).properties(height=PANEL_HEIGHT)


def _percent_rows(run: str, differences: Losses) -> Rows:
    return [{"run": run, "step": step, "percent": 100 * difference} for step, difference in differences.items()]


def _draw_run(curve: LossCurve, curves: Sequence[LossCurve], kinds: Sequence[str]) -> Iterator[alt.Chart]:
    yield _lines(_rows(curve, curve.training), TRAINING, kinds).encode(**_axes(curves))
    yield from _rings(_rows(curve, curve.evaluation), _axes(curves))


def _rows(curve: LossCurve, losses: Losses) -> Rows:
    return [{"run": curve.name, "step": step, "loss": loss} for step, loss in losses.items()]


def _axes(curves: Sequence[LossCurve]) -> dict[str, Any]:
    low, high = loss_range(curves)  # from 0, unless a loss is negative
    y = alt.Y(
        "loss:Q", title="loss", scale=alt.Scale(domain=[min(0.0, low), high], nice=True), axis=alt.Axis(tickCount=6)
    )
    return {"x": _step_axis(), "y": y, "tooltip": ["run:N", "step:Q", alt.Tooltip("loss:Q", format=".4f")]}


def _step_axis() -> alt.X:
    axis = alt.Axis(grid=False, tickMinStep=1, tickCount=10, labelExpr=WHOLE_STEPS)
    return alt.X("step:Q", title="step", axis=axis)


def _lines(rows: Rows, kind: str, kinds: Sequence[str]) -> alt.Chart:
    """Return lines whose color is that of a kind, with a legend of all kinds in the figure."""
    scale = alt.Scale(domain=list(kinds), range=[color(COLORS[name]) for name in kinds])
    legend = alt.Legend(title=None, direction="horizontal", symbolType="stroke")
    marked = inline_data([{**row, "kind": kind} for row in rows])
    return alt.Chart(marked).mark_line().encode(color=alt.Color("kind:N", scale=scale, legend=legend))


def _rings(rows: Rows, encoding: dict[str, Any]) -> Iterator[alt.Chart]:
    """Yield the layer of the evaluations, if there are any."""
    scale = alt.Scale(domain=[EVALUATION], range=["circle"])
    shape = alt.Shape("kind:N", scale=scale, legend=alt.Legend(title=None))
    if rows:
        chart = alt.Chart(inline_data([{**row, "kind": EVALUATION} for row in rows]))
        marks = chart.mark_point(filled=False, size=70, strokeWidth=2, color=color(COLORS[EVALUATION]))
        yield marks.encode(**encoding, shape=shape)
