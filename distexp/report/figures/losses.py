"""Training losses over the steps, evaluation losses, and whether runs trained the same model."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.report.data.overview import Overview
from distexp.report.data.text import name_runs
from distexp.report.figures.base import Figure, Panel, describe_selection
from distexp.report.figures.loss_charts import draw_apart, draw_differences, draw_together, is_equal, panel_legend
from distexp.report.loss_curves import LossCurve, all_coincide, any_overlap
from distexp.report.same_training import compare_losses
from distexp.report.traces import MAX_TRACES, RunTrace


def build_losses(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no run completed a step.

    Coinciding curves would hide each other, so their differences are drawn. Overlapping curves get a panel each.
    """
    curves = [curve for curve in map(LossCurve.of, traces) if curve.training]
    if not curves:
        return None
    caption, sentences = describe_selection(overview, traces), tuple(compare_losses(curves))
    if len(curves) > 1 and all_coincide(curves):
        return _difference_figure(overview, curves, caption, sentences)
    if len(curves) > 1 and any_overlap(curves):
        panels = tuple(draw_apart(curves))
        return Figure("losses", "Losses", panels, caption, sentences, legend=panel_legend(curves, others=True))
    return Figure("losses", "Losses", (Panel("", draw_together(curves)),), caption, sentences)


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
