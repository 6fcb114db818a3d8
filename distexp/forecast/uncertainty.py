"""The interval of a forecast, and how far it is from what was measured."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from distexp.forecast.collectives import MEASURED, MODEL, SCALED
from distexp.forecast.communication import Target
from distexp.forecast.measured_step import MeasuredStep
from distexp.forecast.simulate import SimulatedStep
from distexp.statistics.noise import SINGLE_CPU_RUN
from distexp.system.typed_values import number_of

UNCERTAINTY = {MEASURED: 0.15, SCALED: 0.3, MODEL: 0.6}
"""Relative error of the exposed communication that the interval assumes, by the source of its duration."""
HIDDEN_UNCERTAINTY = 0.15
"""Fraction of the hidden communication by which a step may be longer: its kernels share the device with others."""
BASE_UNCERTAINTY = 0.03
"""Relative error of the interval at the profiled size, from run to run."""
DOUBLING_UNCERTAINTY = 0.01
"""Relative error that each doubling of the workers adds."""
HOST_SPREAD = 4 / 3
"""Factor by which launches on GPUs may be slower, or faster, in another run (docs/results/forecast.md)."""


@dataclass(frozen=True)
class HostChange:
    """Seconds by which a step is shorter, or longer, if the CPU is faster, or slower, by HOST_SPREAD."""

    shorter_s: float = 0.0
    longer_s: float = 0.0


LEAST_SHARE = 0.05
"""Smallest lower end of an interval, relative to the forecast: no step takes no time."""


def interval_of(
    seconds: float, step: SimulatedStep, sources: Set[str], run: MeasuredStep, target: Target, *, host: HostChange
) -> tuple[float, float]:
    """Return the ends of the interval. The errors are independent, so their squares are added."""
    worst = max((UNCERTAINTY[source] for source in sources), default=0.0)
    speed_error = number_of(run.record.metrics.speed_error or {}, "relative") or 0.0
    errors = (
        BASE_UNCERTAINTY * seconds,
        DOUBLING_UNCERTAINTY * abs(math.log2(target.workers / run.model.workers)) * seconds,
        2 * speed_error * seconds,
        worst * step.exposed_s,
        (run.waiting_s(target.workers) - run.own_waiting_s) / 2,
        0.0 if run.model.on_gpu else SINGLE_CPU_RUN * seconds,  # As in the report: other programs share the cores.
    )
    combined = math.hypot(*errors)
    below = math.hypot(combined, host.shorter_s)
    above = math.hypot(combined, host.longer_s, HIDDEN_UNCERTAINTY * step.hidden_s)
    return max(seconds - below, LEAST_SHARE * seconds), seconds + above


def describe_distance(run: MeasuredStep, target: Target, sources: Set[str]) -> str:
    """Return how far a target is outside of the measured range; empty if it is inside."""
    parts = []
    if target.workers > run.model.workers:
        parts.append(f"{target.workers / run.model.workers:g} x the workers of the profiled run ({run.model.workers})")
    if target.nodes > run.model.nodes:
        parts.append(f"{target.nodes} nodes instead of {run.model.nodes}")
    if MODEL in sources:
        parts.append("collectives from link speeds, not measured")
    elif SCALED in sources:
        parts.append("collectives scaled from another number of workers")
    return ", ".join(parts)


def describe_limit(parts: dict[str, float], largest: str) -> str:
    """Return what limits a step most, other than its kernels; empty if nothing takes a tenth of it."""
    names = {
        "exposed_communication": f"communication, mainly the {largest}" if largest else "communication",
        "launch": "the launches of the CPU",
        "waiting": "the wait for the slowest worker",
    }
    total = sum(parts.values())
    part = max(names, key=lambda name: parts[name])
    return names[part] if parts[part] >= 0.1 * total else ""
