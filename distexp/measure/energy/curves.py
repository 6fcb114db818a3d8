"""Energy over time of one device, from the samples of a memory trace."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from distexp.runs.memory_trace import MemorySample

Curve = Sequence[tuple[float, float]]
"""(Unix time in s, energy in J from an arbitrary start) of each sample. Between two samples, energy grows linearly."""

Span = tuple[float, float]
"""Start and end in Unix seconds; the end may be infinite."""

MAX_GAP = 2
"""Spacings of samples that may be missing at an end of an interval."""


def counter_curve(samples: Sequence[MemorySample]) -> Curve:
    """Return the energy counter of a device; empty if it is unknown in a sample, or if it was reset."""
    curve = [(sample.unix_time_s, sample.energy_j) for sample in samples if sample.energy_j is not None]
    complete = len(curve) == len(samples) and all(a[1] <= b[1] for a, b in pairwise(curve))
    return curve if complete else []


def power_curve(samples: Sequence[MemorySample]) -> Curve:
    """Return the trapezoidal integral of a device's power; empty if the power is unknown."""
    power = [(sample.unix_time_s, sample.power_w) for sample in samples if sample.power_w is not None]
    curve = [(power[0][0], 0.0)] if power else []
    for (begin, first), (end, last) in pairwise(power):
        curve.append((end, curve[-1][1] + (end - begin) * (first + last) / 2))
    return curve


def energy_in(curve: Curve, span: Span) -> float | None:
    """Return the joules in an interval, or None if samples are missing at an end of it."""
    if len(curve) < 2:
        return None
    begin, end = span[0], min(span[1], curve[-1][0]) if math.isinf(span[1]) else span[1]
    if end <= begin != span[1]:  # The interval starts after the last sample.
        return None
    spacing = (curve[-1][0] - curve[0][0]) / (len(curve) - 1)
    if curve[0][0] - begin > MAX_GAP * spacing or end - curve[-1][0] > MAX_GAP * spacing:
        return None
    return _interpolate(curve, end) - _interpolate(curve, begin)


def _interpolate(curve: Curve, time_s: float) -> float:
    """Return the value of a curve at a time, with linear interpolation and extrapolation."""
    position = min(max(bisect_right(curve, (time_s, math.inf)), 1), len(curve) - 1)
    before, after = curve[position - 1], curve[position]
    slope = (after[1] - before[1]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
    return before[1] + slope * (time_s - before[0])
