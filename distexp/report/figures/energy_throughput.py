"""Energy per sample against throughput: one point per training, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.report.data.metrics import ENERGY
from distexp.report.data.overview import Overview
from distexp.report.figures.base import Figure, Panel
from distexp.report.figures.tradeoff import Cost, Tradeoff
from distexp.report.traces import RunTrace

COST = Cost(ENERGY, "energy per sample", "J", ",.3~f")


def build_energy_throughput(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no energy was measured."""
    tradeoff = Tradeoff(overview, COST)
    chart = tradeoff.draw()
    if chart is None:
        return None
    caption = " ".join(tradeoff.describe("more economical"))
    return Figure("energy_throughput", "Energy against throughput", (Panel("", chart),), caption)
