"""Figures of the report. To add one, write a module with ``build_NAME(overview, traces) -> Figure | None``.

1. Data: settings and metrics of all runs are in the ``Overview``, and ``metrics.jsonl`` and ``memory/*.csv`` of a few
   runs in the ``RunTrace`` list. Return None if the runs have no data. A metric: ``distexp.report.data.metrics``.
2. Chart: draw it with altair, with the colors of ``base``.
3. Registration: add the function to ``FIGURES``. Then it is in ``report.html``, ``results.md`` and ``plots/``.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial

from distexp.exceptions import TRACE_VARIABLE, first_line, print_error
from distexp.report.data.answer import is_scaling
from distexp.report.data.overview import Overview
from distexp.report.figures import memory_figures
from distexp.report.figures.base import Figure
from distexp.report.figures.losses import build_losses
from distexp.report.figures.scaling_figure import build_scaling
from distexp.report.figures.step_figures import build_step_breakdown, build_step_timeline, build_step_times
from distexp.report.figures.tradeoff import build_energy_throughput, build_memory_throughput
from distexp.report.traces import RunTrace

Build = Callable[[Overview, Sequence[RunTrace]], Figure | None]

FIGURES: tuple[Build, ...] = (  # all figures, in their order in the report
    build_memory_throughput,
    build_energy_throughput,
    build_step_breakdown,
    build_step_timeline,
    memory_figures.build_memory_parts,
    memory_figures.build_peak_parts,
    memory_figures.build_predicted_memory,
    build_scaling,
    partial(memory_figures.build_memory_trace, kind="gpu"),
    partial(memory_figures.build_memory_trace, kind="cpu"),
    build_losses,
    build_step_times,
)


SCALING, ONE_RUN, SEVERAL = (
    ("scaling",),
    ("step_breakdown", "peak_parts", "memory_parts", "gpu_memory", "cpu_memory"),
    ("memory_throughput", "energy_throughput", "losses"),
)
"""Names of the figures that answer first: for one training on several sizes, for one run, for several."""


def build_figures(overview: Overview, traces: Sequence[RunTrace]) -> list[Figure]:
    """Build the figures that these runs have data for. Those with the answer come first."""
    built = (_build_drawable(build, overview, traces) for build in FIGURES)
    first = _answers(overview)
    order = {name: n for n, name in enumerate(first)}
    return sorted((figure for figure in built if figure), key=lambda figure: order.get(figure.name, len(order)))


FOREIGN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a figure about values that no distexp writes. They must not stop the report of the other runs."""


def _build_drawable(build: Build, overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Return a figure; None if the runs have no data for it, or if it cannot be drawn, which is printed."""
    figure = None
    try:
        figure = build(overview, traces)
        return figure and figure.drawn()
    except FOREIGN as error:
        if os.environ.get(TRACE_VARIABLE) == "1":
            raise
        title = figure.title if figure else getattr(build, "__name__", "build_memory_trace").removeprefix("build_")
        reason = f"{type(error).__name__}: {first_line(error)}"
        print_error(f"the figure '{title}' is left out, because a record has a value that it cannot show ({reason})")
        return None


def _answers(overview: Overview) -> tuple[str, ...]:
    completed = [group for group in overview.groups if group.completed]
    if len(completed) < 2:
        return ONE_RUN
    return SCALING + SEVERAL if is_scaling(overview) else SEVERAL


def count_leading(overview: Overview, figures: Sequence[Figure]) -> int:
    """Return how many of the first figures are the answer: where step and memory go for one run, else one."""
    wanted = figures[:2] if _answers(overview) is ONE_RUN else figures[:1]
    return sum(1 for figure in wanted if figure.panels and figure.name in _answers(overview))
