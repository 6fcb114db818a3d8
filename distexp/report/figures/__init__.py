"""Figures of the report, one module each.

To add a figure:

1. Data: take what it shows from the ``Overview`` (settings and metrics of all runs) or from the ``RunTrace`` list
   (``metrics.jsonl`` and ``memory/*.csv`` of a few runs). To add a metric, see ``distexp.report.data.metrics``.
2. Chart: write a module here with a function ``build_NAME(overview, traces) -> Figure | None``. Draw it with altair,
   with the colors of ``theme``. Return None if the runs have no data for it.
3. Registration: add the function to ``FIGURES`` below. The figure is then in ``report.html``, ``results.md`` and
   ``plots/NAME.png``.
"""

from __future__ import annotations

from collections.abc import Sequence

from distexp.report.data.overview import Overview
from distexp.report.figures import memory_figures
from distexp.report.figures.base import Figure
from distexp.report.figures.losses import build_losses
from distexp.report.figures.scaling_figure import build_scaling
from distexp.report.figures.step_figures import build_step_breakdown, build_step_timeline, build_step_times
from distexp.report.figures.tradeoff import build_energy_throughput, build_memory_throughput
from distexp.report.traces import RunTrace

FIGURES = (  # all figures, in their order in the report
    build_memory_throughput,
    build_energy_throughput,
    build_step_breakdown,
    build_step_timeline,
    memory_figures.build_memory_parts,
    memory_figures.build_peak_parts,
    memory_figures.build_predicted_memory,
    build_scaling,
    memory_figures.build_gpu_memory,
    memory_figures.build_cpu_memory,
    build_losses,
    build_step_times,
)


def build_figures(overview: Overview, traces: Sequence[RunTrace]) -> list[Figure]:
    """Build the figures that these runs have data for."""
    built = (build(overview, traces) for build in FIGURES)
    return [figure for figure in built if figure is not None]
